"""Rules of operators, as data: letters name the dims, and every strategy follows from them.

A rule is written like an einsum, operands before ``->``, results after, commas between tensors:

    linear      b.. i, o i, o -> b.. o        ``b..``: all leading dims, a letter each
    layer_norm  b.. [h], h, h -> b.. [h]      a bracket: this letter must stay whole
    split       b.. (c r) -> b.. r            ``(c r)``: two letters in one dim, the first is the slower one
    reduction   b h -> b                      a letter missing on the right is summed (contracted)
    broadcast   b 1, b h -> b h               ``1``: a dim of size one has no letter
    unknown     b _ -> b                      ``_``: a dim of any size that is not cut has none

Cutting one letter on a mesh axis of k devices is a strategy (``strategies``):

    an operand or result that holds the letter          S(d,outer):S(d,outer), outer = product of the letters before it
    an operand without it                               R:P     used whole, its gradient is partial
    an additive operand (a bias) under a contracted one P:R
    a result without it                                 P:R     a partial sum

Besides the letters every operator may run whole (``R``: all R:R), on whole values with partial gradients (``RP``: all
R:P, because a vector-Jacobian product is linear), and on partial values where it is linear (``P``).
A letter may also be cut inside: ``o@3`` sees a letter o as (3, k, rest), as a fused QKV projection needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.graph import Argument, Node, Value
from planner.ir.layout import PARTIAL, REPLICATED, WHOLE, Pair, shard

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on one mesh axis: a pair per tensor operand and per result.

    ``letter``: the letter that is cut ('' for R, RP, P). ``local``: name of the local form when running the same
    operator on the shards is not enough ('vocab_embedding', ...). ``divide``: results are divided by the axis degree
    (means).
    """

    name: str
    operands: tuple[Pair, ...]
    outputs: tuple[Pair, ...]
    letter: str = ""
    local: str = ""
    divide: bool = False


@dataclass(frozen=True)
class Special:
    """A letter whose shards run another function, with collectives inside: its name, and the pairs of its results
    (None: as any letter)."""

    local: str
    outputs: tuple[Pair | None, ...]


@dataclass(frozen=True)
class Rule:
    """``operands``/``outputs``: letters of each dim of each tensor. ``whole``: letters that must not be cut.

    ``additive``: operands that are added after the contraction. ``linear``: sets of operands through which a partial
    value passes. ``mean``: contracted letters are averaged. ``special``: letters whose cut needs a local form of its
    own. ``partial_gradient``: False when the backward is not linear in the gradient.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    mean: bool = False
    special: Mapping[str, Special] = field(default_factory=dict)
    partial_gradient: bool = True

    def letters(self) -> tuple[str, ...]:
        """All letters, in order of appearance."""
        found = (letter for dims in (*self.operands, *self.outputs) for dim in dims for letter in dim)
        return tuple(dict.fromkeys(found))

    def position(self, dims: Dims, letter: str) -> tuple[int, int] | None:
        """(dim, outer) of ``letter`` in a tensor, None when it does not hold it."""
        for index, dim in enumerate(dims):
            if letter in dim:
                outer = 1
                for before in dim[: dim.index(letter)]:
                    outer *= self.sizes[before]
                return index, outer
        return None


def option(node: Node, place: int, name: str, default: Argument) -> Argument:
    """The argument called ``name``, given by keyword or at ``place``."""
    return dict(node.kwargs).get(name, node.args[place] if len(node.args) > place else default)


def parse_rule(
    notation: str,
    operands: tuple[Value, ...],
    outputs: tuple[Value, ...],
    additive: tuple[int, ...] = (),
    linear: tuple[tuple[int, ...], ...] = (),
    mean: bool = False,
    special: Mapping[str, Special] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """A Rule from its notation and the tensors at hand. ``sizes`` gives letters that a merged dim cannot tell.

    Raises ValueError when the notation does not fit the shapes: a defect of the rule.
    """
    left, _, right = notation.partition("->")
    known: dict[str, int] = dict(sizes or {})
    whole: set[str] = set()
    texts = [_tokens(part) for part in left.split(",")]
    results = [_tokens(part) for part in right.split(",")]
    read_operands = tuple(_read(t, v.shape, known, whole) for t, v in zip(texts, operands, strict=True))
    read_outputs = tuple(_read(t, v.shape, known, whole) for t, v in zip(results, outputs, strict=True))
    return Rule(
        read_operands,
        read_outputs,
        known,
        frozenset(whole),
        frozenset(additive),
        tuple(frozenset(group) for group in linear),
        mean,
        special or {},
    )


def _tokens(text: str) -> list[str]:
    """``b.. (h d) [s] 1`` as its dims."""
    return re.findall(r"\([^)]*\)|\[[^\]]*\]|\S+", text)


def _read(tokens: list[str], shape: tuple[int, ...], sizes: dict[str, int], whole: set[str]) -> Dims:
    leading = len(shape) - sum(not token.endswith("..") for token in tokens)
    if leading < 0:
        raise ValueError(f"{tokens} does not fit a tensor of shape {shape}")
    dims: list[Dim] = []
    for token in tokens:
        if token.endswith(".."):
            # Leading dims count from the right, so tensors of different rank broadcast together.
            for i in range(leading, 0, -1):
                size = shape[len(dims)]
                letter = f"{token[:-2]}{i}"
                dims.append(() if size == 1 and sizes.get(letter, 1) != 1 else (letter,))
                if dims[-1]:
                    _agree(sizes, letter, size)
            continue
        size = shape[len(dims)]
        if token in ("1", "_"):
            dims.append(())
        elif token.startswith("("):
            letters = tuple(token[1:-1].split())
            unknown = [letter for letter in letters if letter not in sizes]
            product = 1
            for letter in letters:
                product *= sizes.get(letter, 1)
            if len(unknown) == 1 and product and size % product == 0:
                sizes[unknown[0]] = size // product
            elif unknown or product != size:
                raise ValueError(f"{token} does not fit a dim of size {size}")
            dims.append(letters)
        else:
            letter = token.strip("[]")
            if token.startswith("["):
                whole.add(letter)
            _agree(sizes, letter, size)
            dims.append((letter,))
    if len(dims) != len(shape):
        raise ValueError(f"{tokens} does not fit a tensor of shape {shape}")
    return tuple(dims)


def _agree(sizes: dict[str, int], letter: str, size: int) -> None:
    if sizes.setdefault(letter, size) != size:
        raise ValueError(f"letter {letter} has size {sizes[letter]} and {size}")


def strategies(
    rule: Rule, node: Node, values: Mapping[str, Value], k: int, cuts: Mapping[str, frozenset[int]] | None = None
) -> tuple[Strategy, ...]:
    """All strategies of ``node`` on an axis of ``k`` devices, those with letters first.

    ``cuts``: inner cut points of each letter (1 is always among them), see sharding_rules.cuts.
    """
    differentiable = tuple(values[name].differentiable for name in node.operands)
    found: list[Strategy] = []
    for letter in rule.letters():
        size = rule.sizes[letter]
        if letter in rule.whole or size < k:
            continue
        for cut in sorted((cuts or {}).get(letter, frozenset()) | {1}):
            if size % cut == 0 and size // cut % k == 0:
                strategy = _cut(rule, node, letter, cut, differentiable)
                if strategy is not None:
                    found.append(strategy)
    found.append(_uniform("R", WHOLE, node, differentiable))
    if rule.partial_gradient and any(differentiable):
        found.append(_uniform("RP", REPLICATED, node, differentiable))
    for index, group in enumerate(rule.linear):
        operands = tuple(PARTIAL if i in group else REPLICATED for i in range(len(node.operands)))
        if all(value.dtype.startswith(("float", "bfloat", "complex")) for value in node.outputs):
            name = "P" if index == 0 else f"P{index}"
            outputs = (PARTIAL,) * len(node.outputs)
            found.append(Strategy(name, _gradients(operands, differentiable), _of_outputs(outputs, node)))
    return tuple(found)


def _cut(rule: Rule, node: Node, letter: str, cut: int, differentiable: tuple[bool, ...]) -> Strategy | None:
    contracted = all(rule.position(dims, letter) is None for dims in rule.outputs)
    operands = []
    for index, dims in enumerate(rule.operands):
        place = rule.position(dims, letter)
        if place is not None:
            operands.append(shard(place[0], place[1] * cut))
        elif contracted and index in rule.additive:
            operands.append(PARTIAL)
        else:
            operands.append(REPLICATED)
    outputs = []
    for dims in rule.outputs:
        place = rule.position(dims, letter)
        outputs.append(shard(place[0], place[1] * cut) if place is not None else PARTIAL)
    special = rule.special.get(letter)
    if special is not None:
        if cut != 1:
            return None
        outputs = [own or pair for own, pair in zip(special.outputs, outputs, strict=True)]
    name = letter if cut == 1 else f"{letter}@{cut}"
    divide = rule.mean and contracted
    local = special.local if special is not None else ""
    return Strategy(
        name, _gradients(tuple(operands), differentiable), _of_outputs(tuple(outputs), node), letter, local, divide
    )


def _uniform(name: str, pair: Pair, node: Node, differentiable: tuple[bool, ...]) -> Strategy:
    operands = (pair,) * len(node.operands)
    return Strategy(name, _gradients(operands, differentiable), _of_outputs((pair,) * len(node.outputs), node))


def _gradients(pairs: tuple[Pair, ...], differentiable: tuple[bool, ...]) -> tuple[Pair, ...]:
    return tuple(p if d else p.without_gradient() for p, d in zip(pairs, differentiable, strict=True))


def _of_outputs(pairs: tuple[Pair, ...], node: Node) -> tuple[Pair, ...]:
    return _gradients(pairs, tuple(value.differentiable for value in node.outputs))


def unknown_rule(node: Node) -> Rule:
    """The rule of an operator nobody wrote one for: no letters, so it runs whole."""
    return Rule(tuple(() for _ in node.operands), tuple(() for _ in node.outputs))
