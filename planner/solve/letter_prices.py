"""Prices of the letters program: of an operator under a strategy, and of a parameter once a step."""

from __future__ import annotations

from dataclasses import replace

from costmodels.collectives import collective_time_s
from costmodels.compute import optimizer_step_s
from costmodels.hardware import Cluster
from planner.costing import Pricing, node_cost
from planner.ir.graph import Graph, Leaf, Node, Ref, Value, map_refs
from planner.ir.layout import REPLICATED, Pair
from planner.sharding_rules import Strategy
from planner.sharding_rules.localise import localise

MICROSECONDS_PER_S = 1e6


def operator_cost_us(node: Node, strategy: Strategy, graph: Graph, pricing: Pricing, us_per_byte: float = 0.0) -> float:
    """Microseconds of an operator under a strategy: the price of the local nodes it becomes, and of what they hold."""
    k = pricing.mesh.degree("tp")
    values = dict(graph.values)
    names = iter(f"{node.name}.{i}" for i in range(len(node.operands)))
    local_node = node
    renamed = []
    for name, pair in zip(node.operands, strategy.operands, strict=True):
        own = next(names)
        values[own] = replace(values[name], name=own, shape=pair.value.local_shape(values[name].shape, k))
        renamed.append(own)
    local_node = _with_operands(node, renamed)
    outputs = tuple(
        replace(value, shape=pair.value.local_shape(value.shape, k))
        for value, pair in zip(node.outputs, strategy.outputs, strict=True)
    )
    nodes = localise(local_node, node, outputs, strategy, "tp", k)
    values.update((value.name, value) for made in nodes for value in made.outputs)
    cost = sum(node_cost(made, values, pricing).total_s for made in nodes)
    held = sum(value.size_bytes for value in outputs) if node.output.differentiable else 0
    return cost * MICROSECONDS_PER_S + us_per_byte * held


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
    total = optimizer_step_s(updated, pricing.optimizer, cluster.device) - cluster.device.kernel_launch_s
    if pair == REPLICATED and mesh.tp > 1:
        total += reduction_s(updated, mesh.tp, mesh.stride("tp"), cluster)
    if mesh.dp > 1 and cluster.device.kind == "cpu":  # elsewhere backward hides it
        total += reduction_s(size, mesh.dp, mesh.stride("dp"), cluster)
    return max(total, 0.0)


def reduction_s(size: int, degree: int, stride: int, cluster: Cluster) -> float:
    return collective_time_s("all_reduce", size, degree, stride, cluster)
