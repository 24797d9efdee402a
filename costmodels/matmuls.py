"""The matrix products inside an operator, read off its shapes.

    Matmul(batch, m, n, k)     batch products of (m x k) by (k x n): 2 batch m n k operations

    linear        x [.., k], w [n, k]                    m = product of the leading dims of x
    mm, addmm, bmm, baddbmm, addbmm, mv, dot, matmul     by their definition; batch dims of matmul broadcast, and those
                                                         of the left fold into m when the right is a matrix
    convolution   x [b, c, ..], w [o, c/g, kernel..]     batch g, m = b x output positions, n = o/g,
                                                         k = c/g x kernel positions; transposed: input positions,
                                                         n = o/g x kernel positions, k = c/g
    einsum        from left to right, two operands at a time; letters of one operand only are summed first

The gradient of the left operand multiplies (m x n) by (n x k), that of the right one (k x m) by (m x n): each costs
as much as the forward product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from costmodels.operators import Hint, Shape, hinted

CONVOLUTIONS = frozenset({
    "convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "cudnn_convolution", "mkldnn_convolution",
})  # fmt: skip
# For each operator with one product: where its left and right operand and its addend stand.
_OPERANDS = {
    "linear": (0, 1, 2), "mm": (0, 1, None), "bmm": (0, 1, None), "matmul": (0, 1, None), "mv": (0, 1, None),
    "dot": (0, 1, None), "addmm": (1, 2, 0), "addmv": (1, 2, 0), "baddbmm": (1, 2, 0), "addbmm": (1, 2, 0),
    "__matmul__": (0, 1, None), "linalg_matmul": (0, 1, None), "inner": (0, 1, None),
    **dict.fromkeys(CONVOLUTIONS, (0, 1, 2)),
}  # fmt: skip


@dataclass(frozen=True)
class Matmul:
    """``left`` and ``right``: positions of the operands among the operator's tensors. ``rows``: of a gradient, the rows of
    the product it belongs to, whose tensors it reads and writes."""

    batch: int
    m: int
    n: int
    k: int
    left: int = 0
    right: int = 1
    rows: int = 0

    @property
    def row_elements(self) -> int:
        """The greatest number that divides the rows of all operands as they lie in memory, which hold k or n elements."""
        return self.rows or math.gcd(self.n, self.k)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def left_gradient(self) -> Matmul:
        return Matmul(self.batch, self.m, self.k, self.n, rows=self.row_elements)

    def right_gradient(self) -> Matmul:
        return Matmul(self.batch, self.k, self.n, self.m, rows=self.row_elements)


def addend(name: str) -> int | None:
    """Position of the tensor that is added to the product (a bias), if the operator has one."""
    return _OPERANDS[name][2] if name in _OPERANDS else None


@lru_cache(maxsize=16384)
def matmuls(name: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], hint: Hint = ()) -> tuple[Matmul, ...]:
    """The products of the operator of plain name ``name``; none for operators that hold no matrix product."""
    if name == "einsum":
        return _einsum(str(hinted(hint, "equation", "")), inputs, outputs)
    if name not in _OPERANDS:
        return ()
    left, right, _ = _OPERANDS[name]
    if max(left, right) >= len(inputs) or not outputs:
        return ()
    a, b = inputs[left], inputs[right]
    if name in CONVOLUTIONS:
        batch, m, n, k = _convolution(name, a, b, outputs[0], hint)
    elif name in ("linear", "inner"):
        batch, m, n, k = 1, math.prod(a[:-1]), math.prod(b[:-1]), a[-1] if a else 1
    else:
        batch, m, n, k = _matmul(a, b)
    return (Matmul(batch, m, n, k, left, right),)


def _matmul(a: Shape, b: Shape) -> tuple[int, int, int, int]:
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    m, k, n = a[-2], a[-1], b[-1]
    if len(b) == 2:
        return 1, math.prod(a[:-2]) * m, n, k
    lead_a, lead_b = a[:-2], b[:-2]
    longest = max(len(lead_a), len(lead_b))
    padded = zip((1,) * (longest - len(lead_a)) + lead_a, (1,) * (longest - len(lead_b)) + lead_b, strict=True)
    return math.prod(max(pair) if min(pair) else 0 for pair in padded), m, n, k


def _convolution(name: str, x: Shape, weight: Shape, output: Shape, hint: Hint) -> tuple[int, int, int, int]:
    kernel = math.prod(weight[2:])
    spatial = len(weight) - 2
    lead, channels = math.prod(x[: -spatial - 1]), x[-spatial - 1]
    if name.startswith("conv_transpose") or hinted(hint, "transposed", False) is True:
        groups = max(1, output[-spatial - 1] // weight[1])
        return groups, lead * math.prod(x[-spatial:]), weight[1] * kernel, channels // groups
    groups = max(1, channels // weight[1])
    return groups, lead * math.prod(output[-spatial:]), weight[0] // groups, weight[1] * kernel


def _einsum(equation: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Matmul, ...]:
    """Two operands at a time. Without an equation the contracted size follows from the element counts."""
    terms, result = _terms(equation, inputs)
    if not terms:
        return _einsum_by_size(inputs, outputs)
    sizes: dict[str, int] = {}
    for letters, shape in zip(terms, inputs, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))

    def product(letters: set[str]) -> int:
        return math.prod(sizes[letter] for letter in letters)

    steps = []
    have = set(terms[0])
    for i in range(1, len(terms)):
        more = set(terms[i])
        later = set(result).union(*terms[i + 1 :])
        both, kept = have & more, (have | more) & later
        batch, summed = product(both & later), product(both - later)
        m, n = product(have & later - more), product(more & later - have)
        steps.append(Matmul(batch, m, n, summed, 0 if i == 1 else -1, i))
        have = kept
    return tuple(steps)


def _terms(equation: str, inputs: tuple[Shape, ...]) -> tuple[list[str], str]:
    """Letters of each operand and of the result, an ellipsis written out; nothing when the equation does not fit."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if not left or len(operands) != len(inputs):
        return [], ""
    hidden = [len(shape) - len(term.replace("...", "")) for term, shape in zip(operands, inputs, strict=True)]
    spare = "".join(chr(0x3B1 + i) for i in range(max(hidden)))  # Greek letters: no equation can hold them
    terms = [term.replace("...", spare[len(spare) - count :]) for term, count in zip(operands, hidden, strict=True)]
    if any(len(term) != len(shape) for term, shape in zip(terms, inputs, strict=True)):
        return [], ""
    if not arrow:
        every = "".join(operands).replace(".", "")
        result = "..." + "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    return terms, result.replace("...", spare)


def _einsum_by_size(inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[Matmul, ...]:
    """|a| = B M K, |b| = B K N, |out| = B M N; B is taken as the leading dims that all three share."""
    if len(inputs) != 2 or not outputs:
        return ()
    batch = 1
    for sizes in zip(*inputs, outputs[0], strict=False):
        if len(set(sizes)) > 1:
            break
        batch *= sizes[0]
    a, b, out = (max(1, math.prod(shape) // batch) for shape in (*inputs, outputs[0]))
    k = max(1, round(math.sqrt(a * b / out)))
    return (Matmul(batch, max(1, a // k), max(1, b // k), k),)
