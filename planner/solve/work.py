"""What a graph takes without any communication, whatever its letters and stages: for bounds."""

from __future__ import annotations

from typing import NamedTuple

from planner.costing import Pricing, crossing, made_of_weights, node_cost, sum_of, weight_backward_s
from planner.ir.graph import Graph
from planner.segments import segment_nodes


class SegmentWork(NamedTuple):
    """Seconds of one micro-batch; ``weight_backward_s``: of ``backward_s``, what makes gradients of weights only."""

    forward_s: float
    backward_s: float
    weight_backward_s: float

    def over(self, devices: int) -> SegmentWork:
        """An even share."""
        return SegmentWork(*(seconds / devices for seconds in self))


def work_of_segments(graph: Graph, pricing: Pricing) -> list[SegmentWork]:
    """The operators of every segment, on one device; those that segments share are counted with the first."""
    found = []
    shared = [node for node in graph.nodes if node.segment < 0]
    for number, own in enumerate(segment_nodes(graph)):
        nodes = [node for node in (*(shared if number == 0 else ()), *own) if node.op != "convert"]
        of_weights = made_of_weights(graph, nodes)
        costs = [node_cost(node, graph.values, pricing) for node in nodes]
        pairs = zip(nodes, costs, strict=True)
        on_device = sum_of(costs)
        elapsed = on_device.with_host(pricing.cluster.device)
        for_weights = sum(weight_backward_s(node, cost, of_weights, graph, pricing) for node, cost in pairs)
        if for_weights:
            for_weights = min(elapsed.backward_s, for_weights * (elapsed.backward_s / on_device.backward_s))
        found.append(SegmentWork(elapsed.forward_s, elapsed.backward_s, for_weights))
    return found


def least_crossing_bytes(graph: Graph, cuts: set[int]) -> int:
    """The least that is sent from one stage to the next; ``cuts``: the segments a stage may end with."""
    return min(sum(value.size_bytes for value in crossing(graph, cut)) for cut in sorted(cuts))
