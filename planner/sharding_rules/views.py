"""Views: operators that only rename, cut or join dims. All are linear, so partial values pass."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Value
from planner.sharding_rules.rule import Dim, Dims, Rule, option

PASS = (frozenset({0}),)


def _names(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(count))


def view(node: Node, values: Mapping[str, Value]) -> Rule:
    """Letters are the common refinement of both shapes: (4, 96) -> (4, 3, 4, 8) gives a (b c d) -> a b c d.

    Dims whose cuts do not nest, as in (4, 6) -> (8, 3), stay whole.
    """
    source, target = values[node.operands[0]].shape, node.output.shape
    inside: list[Dim] = []
    outside: list[Dim] = []
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for left, right in _groups(source, target):
        edges = sorted(set(_edges(left)) | set(_edges(right)))
        nests = all(b % a == 0 for a, b in zip(edges, edges[1:], strict=False))
        if nests:
            letters = {}
            for a, b in zip(edges, edges[1:], strict=False):
                name = f"v{len(sizes)}"
                letters[a] = name
                sizes[name] = b // a
            inside += _dims_of(left, edges, letters)
            outside += _dims_of(right, edges, letters)
        else:
            for group, dims in ((left, inside), (right, outside)):
                for size in group:
                    name = f"v{len(sizes)}"
                    sizes[name] = size
                    whole.add(name)
                    dims.append((name,))
    return Rule((tuple(inside),), (tuple(outside),), sizes, frozenset(whole), linear=PASS)


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest runs of dims on both sides that hold the same number of elements."""
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left = [source[i]] if i < len(source) else []
        right = [target[j]] if j < len(target) else []
        i, j = i + len(left), j + len(right)
        a, b = left[0] if left else 1, right[0] if right else 1
        if left and right and 1 in (a, b) and a != b:
            # A dim of size one has no partner: leave it alone.
            if a == 1:
                groups.append(((1,), ()))
                j -= 1
            else:
                groups.append(((), (1,)))
                i -= 1
            continue
        while a != b:
            if a < b and i < len(source):
                left.append(source[i])
                a *= source[i]
                i += 1
            elif b < a and j < len(target):
                right.append(target[j])
                b *= target[j]
                j += 1
            else:
                break
        groups.append((tuple(left), tuple(right)))
    return groups


def _edges(shape: tuple[int, ...]) -> list[int]:
    edges = [1]
    for size in shape:
        edges.append(edges[-1] * size)
    return edges


def _dims_of(shape: tuple[int, ...], edges: list[int], letters: Mapping[int, str]) -> list[Dim]:
    dims: list[Dim] = []
    start = 1
    for size in shape:
        end = start * size
        dims.append(tuple(letters[e] for e in edges if start <= e < end))
        start = end
    return dims


def permute(node: Node, values: Mapping[str, Value]) -> Rule:
    """transpose, permute, t, movedim given as an order of dims."""
    shape = values[node.operands[0]].shape
    rank = len(shape)
    base = node.base
    order = list(range(rank))
    if base == "transpose":
        a, b = (int(d) % rank for d in node.args[1:3])
        order[a], order[b] = b, a
    elif base == "permute":
        order = [int(d) % rank for d in node.args[1]]
    else:
        order.reverse()
    letters = _names("d", rank)
    sizes = dict(zip(letters, shape, strict=True))
    return Rule((tuple((x,) for x in letters),), (tuple((letters[d],) for d in order),), sizes, linear=PASS)


def expand(node: Node, values: Mapping[str, Value]) -> Rule:
    shape, full = values[node.operands[0]].shape, node.output.shape
    letters = _names("d", len(full))
    sizes = dict(zip(letters, full, strict=True))
    offset = len(full) - len(shape)
    inside: Dims = tuple(
        (letters[offset + i],) if size == full[offset + i] else () for i, size in enumerate(shape)
    )  # fmt: skip
    return Rule((inside,), (tuple((x,) for x in letters),), sizes, linear=PASS)


def repeat(node: Node, values: Mapping[str, Value]) -> Rule:
    """repeat(x, times) and tile: a dim of n repeated r times is (r n)."""
    shape, times = values[node.operands[0]].shape, node.args[1]
    times = (1,) * (len(shape) - len(times)) + tuple(times)
    offset = len(times) - len(shape)
    padded = (1,) * offset + shape
    sizes = {f"d{i}": s for i, s in enumerate(padded)} | {f"r{i}": int(t) for i, t in enumerate(times)}
    out = tuple((f"r{i}", f"d{i}") for i in range(len(times)))
    inside = tuple((f"d{i + offset}",) for i in range(len(shape)))
    whole = frozenset(f"r{i}" for i in range(len(times)))
    return Rule((inside,), (out,), sizes, whole, linear=PASS)


def repeat_interleave(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """repeat_interleave(x, times, dim): each element of a dim of n repeated r times is (n r); without dim, of them all."""
    shape, times = values[node.operands[0]].shape, node.args[1]
    dim = option(node, 2, "dim", None)
    if not isinstance(times, int):
        return None
    letters = _names("d", len(shape))
    sizes = dict(zip(letters, shape, strict=True)) | {"r": times}
    inside = tuple((x,) for x in letters)
    if dim is None:
        return Rule((inside,), (((*letters, "r"),),), sizes, frozenset({"r"}), linear=PASS)
    out = tuple((x, "r") if i == int(dim) % len(shape) else (x,) for i, x in enumerate(letters))
    return Rule((inside,), (out,), sizes, frozenset({"r"}), linear=PASS)


def last_dim(node: Node, values: Mapping[str, Value]) -> Rule:
    """view_as_complex [.., 2] -> [..] and view_as_real [..] -> [.., 2]."""
    shape, out = values[node.operands[0]].shape, node.output.shape
    letters = _names("d", max(len(shape), len(out)))
    sizes = dict(zip(letters, shape if len(shape) > len(out) else out, strict=True))
    inside, outside = (tuple((x,) for x in letters[: len(s)]) for s in (shape, out))
    return Rule((inside,), (outside,), sizes, frozenset({letters[-1]}), linear=PASS)


def slice_dim(node: Node, values: Mapping[str, Value]) -> Rule:
    """slice(x, dim, start, end, step): a slice that is one of equal chunks sees its dim as (c r).

    Starts are counted from the front (planner.normalise makes them so); one from the end keeps the dim whole.
    """
    shape, out = values[node.operands[0]].shape, node.output.shape
    dim = int(option(node, 1, "dim", 0)) % len(shape)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = int(node.args[4]) if len(node.args) > 4 else 1
    aligned = step == 1 and start >= 0 and start % max(out[dim], 1) == 0
    return _chunk_rule(shape, dim, out[dim], aligned, len(node.outputs))


def split(node: Node, values: Mapping[str, Value]) -> Rule:
    """split, split_with_sizes, chunk into equal parts: dim (c r) -> r each."""
    shape = values[node.operands[0]].shape
    dim = int(option(node, 2, "dim", 0)) % len(shape)
    lengths = {value.shape[dim] for value in node.outputs}
    length = node.output.shape[dim]
    return _chunk_rule(shape, dim, length, len(lengths) == 1, len(node.outputs))


def _chunk_rule(shape: tuple[int, ...], dim: int, length: int, aligned: bool, outputs: int) -> Rule:
    letters = _names("d", len(shape))
    sizes = dict(zip(letters, shape, strict=True))
    inside: list[Dim] = [(x,) for x in letters]
    outside: list[Dim] = [(x,) for x in letters]
    if length == shape[dim]:
        whole = frozenset[str]()
    elif aligned and length and shape[dim] % length == 0:
        sizes |= {"c": shape[dim] // length, "r": length}
        del sizes[letters[dim]]
        inside[dim], outside[dim] = ("c", "r"), ("r",)
        whole = frozenset({"c"})
    else:
        sizes["r"] = length
        outside[dim] = ("r",)
        whole = frozenset({letters[dim], "r"})
    return Rule((tuple(inside),), (tuple(outside),) * outputs, sizes, whole, linear=PASS)


def remove_dim(node: Node, values: Mapping[str, Value]) -> Rule:
    """select(x, dim, index) and unbind(x, dim): the dim is read whole."""
    shape = values[node.operands[0]].shape
    dim = int(option(node, 1, "dim", 0)) % len(shape)
    letters = _names("d", len(shape))
    sizes = dict(zip(letters, shape, strict=True))
    out = tuple((x,) for i, x in enumerate(letters) if i != dim)
    return Rule(
        (tuple((x,) for x in letters),), (out,) * len(node.outputs), sizes, frozenset({letters[dim]}), linear=PASS
    )


def cat(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """cat of equal parts: r each -> (c r). Unequal parts keep the dim whole."""
    shapes = [values[name].shape for name in node.operands]
    rank = len(node.output.shape)
    if any(len(shape) != rank for shape in shapes):
        return None
    dim = int(option(node, 1, "dim", 0)) % rank
    letters = _names("d", rank)
    sizes = dict(zip(letters, node.output.shape, strict=True))
    joint = (frozenset(range(len(shapes))),)
    plain: list[Dim] = [(x,) for x in letters]
    outside = list(plain)
    if len({shape[dim] for shape in shapes}) == 1:
        sizes |= {"c": len(shapes), "r": shapes[0][dim]}
        del sizes[letters[dim]]
        outside[dim] = ("c", "r")
        inside = list(plain)
        inside[dim] = ("r",)
        return Rule((tuple(inside),) * len(shapes), (tuple(outside),), sizes, frozenset({"c"}), linear=joint)
    operands = []
    for i, shape in enumerate(shapes):
        inside = list(plain)
        inside[dim] = (f"r{i}",)
        sizes[f"r{i}"] = shape[dim]
        operands.append(tuple(inside))
    whole = frozenset({letters[dim], *(f"r{i}" for i in range(len(shapes)))})
    return Rule(tuple(operands), (tuple(outside),), sizes, whole, linear=joint)


def stack(node: Node, values: Mapping[str, Value]) -> Rule:
    shape = values[node.operands[0]].shape
    rank = len(node.output.shape)
    dim = int(option(node, 1, "dim", 0)) % rank
    letters = _names("d", len(shape))
    inside = tuple((x,) for x in letters)
    sizes = dict(zip(letters, shape, strict=True)) | {"c": len(node.operands)}
    out = (*inside[:dim], ("c",), *inside[dim:])
    joint = (frozenset(range(len(node.operands))),)
    return Rule((inside,) * len(node.operands), (out,), sizes, frozenset({"c"}), linear=joint)


def pad(node: Node, values: Mapping[str, Value]) -> Rule:
    """pad(x, amounts, mode, value), amounts (left, right) of the last dim first: padded dims stay whole.

    Linear unless filled with a constant other than zero.
    """
    shape, out = values[node.operands[0]].shape, node.output.shape
    amounts = node.args[1]
    rest = [a for a in node.args[2:] if a is not None]
    constant = node.op.startswith("aten.constant_pad_nd") or not rest or rest[0] == "constant"
    number = next((a for a in rest if not isinstance(a, str)), dict(node.kwargs).get("value") or 0)
    letters = _names("d", len(shape))
    sizes = dict(zip(letters, shape, strict=True))
    outside: list[Dim] = [(x,) for x in letters]
    whole: set[str] = set()
    for place in range(0, len(amounts), 2):
        d = len(shape) - 1 - place // 2
        if amounts[place : place + 2] != (0, 0):
            sizes[f"p{d}"] = out[d]
            whole |= {letters[d], f"p{d}"}
            outside[d] = (f"p{d}",)
    linear = PASS if not constant or number == 0 else ()
    return Rule((tuple((x,) for x in letters),), (tuple(outside),), sizes, frozenset(whole), linear=linear)


def filled(node: Node, values: Mapping[str, Value]) -> Rule:
    """full, zeros, ones, new_zeros, ...: a constant, of any local shape."""
    letters = _names("d", len(node.output.shape))
    sizes = dict(zip(letters, node.output.shape, strict=True))
    unused = tuple(tuple(() for _ in values[name].shape) for name in node.operands)
    return Rule(unused, (tuple((x,) for x in letters),), sizes)
