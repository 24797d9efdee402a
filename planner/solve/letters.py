"""The letters of a plan: the strategy of every operator on the tp axis, and how its leaves are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.ir.graph import Graph, Value
from planner.ir.layout import REPLICATED, WHOLE, Pair
from planner.ir.mesh import Mesh
from planner.sharding_rules import Strategy, rule_of, strategies


@dataclass(frozen=True)
class Letters:
    """The solution. ``strategies`` by node name, ``leaves`` by leaf name; ``objective_s``: seconds of one micro-batch.

    ``bound_s``: proven lower bound of the objective, under any strategies. ``least_s``: of the time itself, without what
    only breaks ties and without starting each reduction apart.
    """

    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Pair]
    objective_s: float
    bound_s: float
    least_s: float = 0.0

    @property
    def partial_leaves(self) -> frozenset[str]:
        """Trainable leaves whose gradient is partial on the axis (summed once a step)."""
        return frozenset(name for name, pair in self.leaves.items() if pair == REPLICATED)


def whole_letters(graph: Graph) -> Letters:
    """The solution on an axis of degree 1: everything whole."""
    chosen = {}
    for node in graph.nodes:
        options = strategies(rule_of(node, graph.values), node, graph.values, 2**62)
        chosen[node.name] = next(s for s in options if s.name == "R")
    return Letters(chosen, {leaf.name: with_its_gradient(WHOLE, leaf.value) for leaf in graph.leaves}, 0.0, 0.0)


def with_its_gradient(pair: Pair, value: Value) -> Pair:
    """``pair`` of a value, without a gradient where it has none."""
    return pair if value.differentiable else pair.without_gradient()


def letters_mesh(mesh: Mesh) -> Mesh:
    """A mesh on which letters cost the same: with neighbours on tp, and dp next, the pipeline does not matter."""
    is_usual = mesh.stride("tp") == 1 and (mesh.dp == 1 or mesh.stride("dp") == mesh.tp)
    return Mesh(dp=mesh.dp, tp=mesh.tp) if is_usual else mesh


def letters_zero(zero: int) -> int:
    """The ZeRO stages that differ to letters: none, weights whole but updated in shares, weights in shares."""
    return zero if zero in (0, 3) else 1
