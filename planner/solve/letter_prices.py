"""Prices of the letters program: of an operator under a strategy, and of a parameter once a step."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from costmodels.collectives import collective_time_s
from costmodels.compute import optimizer_step_s
from planner.costing import Cost, Pricing, node_cost, sum_of
from planner.ir.graph import Graph, Leaf, Node, Ref, Value, map_refs
from planner.ir.layout import REPLICATED, Pair
from planner.sharding_rules import Strategy
from planner.sharding_rules.localise import localise
from planner.states import (
    bucketed_s,
    measured_update_s,
    reduced_ratio,
    reduces_alone,
    update_correction,
    update_moves,
)

MICROSECONDS_PER_S = 1e6


def operator_price(node: Node, strategy: Strategy, graph: Graph, pricing: Pricing) -> tuple[Cost, int]:
    """(cost, bytes of results held for backward) of an operator under a strategy: of the local nodes it becomes."""
    nodes, values, outputs = local_nodes(node, strategy, graph, pricing.mesh.degree("tp"))
    cost = sum_of(node_cost(made, values, pricing) for made in nodes)
    return cost, sum(value.size_bytes for value in outputs) if node.output.differentiable else 0


def local_nodes(
    node: Node, strategy: Strategy, graph: Graph, k: int
) -> tuple[Sequence[Node], Mapping[str, Value], tuple[Value, ...]]:
    """What one of ``k`` devices runs of ``node`` under a strategy on tp: nodes, the values they read and make, the results."""
    own: dict[str, Value] = {}
    renamed = []
    for number, (name, pair) in enumerate(zip(node.operands, strategy.operands, strict=True)):
        value = graph.values[name]
        local = replace(value, name=f"{node.name}.{number}", shape=pair.value.local_shape(value.shape, k))
        own[local.name] = local
        renamed.append(local.name)
    outputs = tuple(
        replace(value, shape=pair.value.local_shape(value.shape, k))
        for value, pair in zip(node.outputs, strategy.outputs, strict=True)
    )
    nodes = localise(_with_operands(node, renamed), node, outputs, strategy, "tp", k)
    own.update((value.name, value) for made in nodes for value in made.outputs)
    values = ChainMap(own, dict(graph.values)) if any(n not in own for m in nodes for n in m.operands) else own
    return nodes, values, outputs


def _with_operands(node: Node, names: list[str]) -> Node:
    in_order = iter(names)
    return replace(
        node,
        args=map_refs(node.args, lambda _: Ref(next(in_order))),
        kwargs=map_refs(node.kwargs, lambda _: Ref(next(in_order))),
    )


def parameter_step_s(local: Value, leaf: Leaf, pair: Pair, pricing: Pricing) -> float:
    """Seconds a parameter costs once a step on one device: its update, its reduction over tp where partial, over dp."""
    if not leaf.trainable:
        return 0.0
    mesh, cluster = pricing.mesh, pricing.cluster
    size = local.size_bytes
    updated = size if pricing.zero == 0 else size // mesh.dp  # and summed over tp
    measured = measured_update_s(pricing.optimizer, updated, 0, pricing.zero > 0, cluster)
    total = (
        update_correction(cluster)
        * optimizer_step_s(
            updated, pricing.optimizer, cluster.device, launches=0, moves=update_moves(leaf, cluster.software)
        )
        if measured is None
        else measured
    )
    if pair == REPLICATED and mesh.tp > 1:
        total += bucketed_s("all_reduce", updated, mesh, "tp", cluster)
    if mesh.dp > 1 and pricing.zero < 3 and reduces_alone(cluster):  # elsewhere backward hides it
        total += _least_reduction_s(size * reduced_ratio(leaf, cluster.software), pricing)
    return max(total, 0.0)


def _least_reduction_s(size: float, pricing: Pricing) -> float:
    """Of gradients over dp: an all-reduce, or under ZeRO-1 and 2 what that is made of, where measured to take less."""
    mesh, cluster = pricing.mesh, pricing.cluster
    reduced_s, scattered_s, gathered_s = (
        bucketed_s(kind, size, mesh, "dp", cluster) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    return min(reduced_s, scattered_s + gathered_s) if pricing.zero and cluster.measured is not None else reduced_s


def gathering_s(local: Value, leaf: Leaf, pricing: Pricing) -> float:
    """Seconds that ZeRO-3 moves a trained weight over dp for one micro-batch: two all-gathers and a reduce-scatter."""
    mesh = pricing.mesh
    if not leaf.trainable or mesh.dp == 1:
        return 0.0
    ratio = reduced_ratio(leaf, pricing.cluster.software)
    moves = (("all_gather", 2, 1.0), ("reduce_scatter", 1, ratio))

    def seconds(size: int) -> float:
        return sum(
            n * collective_time_s(kind, size * part, mesh.dp, mesh.stride("dp"), pricing.cluster)
            for kind, n, part in moves
        )

    return seconds(local.size_bytes) - seconds(0)


def starting_s(pricing: Pricing) -> float:
    """What starting the reductions of a parameter costs; those of a segment are done together, so no bound may hold it."""
    axes = ("tp", "dp") if pricing.cluster.device.kind == "cpu" else ("tp",)
    return sum(bucketed_s("all_reduce", 0, pricing.mesh, axis, pricing.cluster) for axis in axes)
