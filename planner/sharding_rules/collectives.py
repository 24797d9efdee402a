"""Conversions of one axis seen by another: they are linear, and free in every dim they do not touch."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Value
from planner.ir.layout import Pair
from planner.sharding_rules.rule import Rule


def converted(node: Node, values: Mapping[str, Value]) -> Rule:
    """convert(x, axis, 'f -> t'): dims that f or t cuts stay whole on any other axis."""
    source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
    placements = (p for pair in (source, target) for p in (pair.value, pair.gradient))
    touched = {p.dim for p in placements if p is not None and p.kind == "S"}
    shape = values[node.operands[0]].shape
    letters = tuple(f"d{i}" for i in range(len(shape)))
    inside = tuple((x,) for x in letters)
    outside = tuple((f"t{i}",) if i in touched else (x,) for i, x in enumerate(letters))
    sizes = dict(zip(letters, shape, strict=True)) | {f"t{i}": node.output.shape[i] for i in touched}
    whole = frozenset({f"d{i}" for i in touched} | {f"t{i}" for i in touched})
    return Rule((inside,), (outside,), sizes, whole, linear=(frozenset({0}),))
