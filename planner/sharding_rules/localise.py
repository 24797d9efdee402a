"""What one device calls: an operator's arguments for its shards.

Most operators run unchanged on local tensors. Those that carry sizes (view, expand, slice, ...), group counts, or need
another function on shards (vocabulary cross-entropy, synchronised statistics) are rewritten here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from planner.ir.graph import Argument, Node, Ref, Value
from planner.ir.mesh import MICRO
from planner.sharding_rules.rule import Strategy, option


def localise(
    node: Node, original: Node, outputs: tuple[Value, ...], strategy: Strategy, axis: str, k: int, share: int = 1
) -> tuple[Node, ...]:
    """The local nodes of ``node`` (operands already renamed), with local ``outputs``. ``original``: global shapes.

    The device holds ``share`` of k units: sizes are multiplied by share / k, and its mean counts for as much.
    """
    local = replace(node, outputs=outputs)
    if strategy.local:
        return (replace(local, op=strategy.local, kwargs=_with_axis(local, axis)),)
    base = node.base
    if base in SIZES:
        local = replace(local, args=SIZES[base](local, original, strategy, Fraction(share, k)))
    elif node.is_random and strategy.letter and axis != MICRO:
        # Shards draw masks of their own; micro-batches do anyway, their number is part of the seed.
        local = replace(local, kwargs=_with_axis(local, axis))
    if not strategy.divide:
        return (local,)
    total = replace(outputs[0], name=f"{outputs[0].name}_sum_{axis}")
    divisor = k // share if k % share == 0 else k / share
    counted = Node("aten.div.Scalar", (Ref(total.name), divisor), outputs, (), node.module, node.segment)
    return replace(local, outputs=(total,)), counted


def _with_axis(node: Node, axis: str) -> tuple[tuple[str, Argument], ...]:
    """Operators that act over several axes list them, outermost first, in the keyword ``axes``."""
    options = dict(node.kwargs)
    options["axes"] = (*options.get("axes", ()), axis)
    return tuple(options.items())


def _shape(node: Node, original: Node, strategy: Strategy, local: Fraction) -> tuple[Argument, ...]:
    return (node.args[0], node.output.shape, *node.args[2:])


def _fill(node: Node, original: Node, strategy: Strategy, local: Fraction) -> tuple[Argument, ...]:
    return (node.output.shape, *node.args[1:])


def _is_cut(strategy: Strategy, dim: int) -> bool:
    pair = strategy.outputs[0]
    return pair.value.kind == "S" and pair.value.dim == dim


def _slice(node: Node, original: Node, strategy: Strategy, local: Fraction) -> tuple[Argument, ...]:
    dim = int(option(node, 1, "dim", 0)) % len(node.output.shape)
    if not _is_cut(strategy, dim):
        return node.args
    length = original.output.shape[dim]
    start = int(node.args[2] or 0) if len(node.args) > 2 else 0
    return (node.args[0], dim, int(start * local), int((start + length) * local))


def _split(node: Node, original: Node, strategy: Strategy, local: Fraction) -> tuple[Argument, ...]:
    dim = int(option(node, 2, "dim", 0)) % len(node.output.shape)
    if not _is_cut(strategy, dim):
        return node.args
    sizes = node.args[1]
    scaled = tuple(int(size * local) for size in sizes) if isinstance(sizes, tuple) else int(sizes * local)
    return (node.args[0], scaled, *node.args[2:])


def _groups_at(place: int) -> Callable[[Node, Node, Strategy, Fraction], tuple[Argument, ...]]:
    def rewrite(node: Node, original: Node, strategy: Strategy, local: Fraction) -> tuple[Argument, ...]:
        if strategy.letter != "g":
            return node.args
        return (*node.args[:place], int(node.args[place] * local), *node.args[place + 1 :])

    return rewrite


SIZES: dict[str, Callable[[Node, Node, Strategy, Fraction], tuple[Argument, ...]]] = {
    "view": _shape,
    "expand": _shape,
    "unflatten": _shape,
    "full": _fill,
    "zeros": _fill,
    "ones": _fill,
    "new_full": _shape,
    "new_zeros": _shape,
    "new_ones": _shape,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "group_norm": _groups_at(1),
    "conv1d": _groups_at(6),
    "conv2d": _groups_at(6),
    "conv3d": _groups_at(6),
    "conv_transpose1d": _groups_at(6),
    "conv_transpose2d": _groups_at(6),
    "conv_transpose3d": _groups_at(6),
}
