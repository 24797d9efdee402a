"""What a graph takes without any communication, whatever its letters and stages: for bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.chain_costs import crossing
from planner.costing import Pricing, made_of_weights, node_cost, sum_of, weight_backward_s
from planner.ir.graph import Graph
from planner.segments import segment_nodes


class SegmentWork(NamedTuple):
    """Seconds of one micro-batch; ``weight_backward_s``: of ``backward_s``, what makes gradients of weights only.

    ``forward_host_s`` and ``backward_host_s``: what a GPU's host takes to launch the operators.
    """

    forward_s: float
    backward_s: float
    weight_backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0

    def over(self, devices: int) -> SegmentWork:
        """The least of each of so many devices that share the operators: each host launches all of them."""
        forward_s = max(self.forward_s / devices, self.forward_host_s)
        backward_s = max(self.backward_s / devices, self.backward_host_s)
        others_s = (self.backward_s - self.weight_backward_s) / devices
        return SegmentWork(forward_s, backward_s, backward_s - others_s, self.forward_host_s, self.backward_host_s)


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
        device = pricing.cluster.device
        elapsed = on_device.with_host(device)
        for_weights = sum(weight_backward_s(node, cost, of_weights, graph, pricing) for node, cost in pairs)
        if for_weights:
            for_weights = min(elapsed.backward_s, for_weights * (elapsed.backward_s / on_device.backward_s))
        hosts = (device.host_s(n) for n in (on_device.forward_launches, on_device.backward_launches))
        found.append(SegmentWork(elapsed.forward_s, elapsed.backward_s, for_weights, *hosts))
    return found


def least_of(works: Sequence[Sequence[SegmentWork]]) -> tuple[SegmentWork, ...]:
    """Of every segment the least that any of ``works``, each of the whole chain, gives it: of forward, of backward, and of
    backward without the gradients of weights."""
    if len(works) == 1:
        return tuple(works[0])
    found = []
    for same in zip(*works, strict=True):
        forward_s, backward_s = min(w.forward_s for w in same), min(w.backward_s for w in same)
        inputs_s = min(w.backward_s - w.weight_backward_s for w in same)
        hosts = (min(w.forward_host_s for w in same), min(w.backward_host_s for w in same))
        found.append(SegmentWork(forward_s, backward_s, backward_s - inputs_s, *hosts))
    return tuple(found)


def rate(least: Sequence[SegmentWork], own: Sequence[SegmentWork]) -> float:
    """The largest share of its ``own`` time that ``least`` gives a segment, 1 at most: what takes t where ``own`` holds is
    at most rate t of ``least``."""
    totals = ((a.forward_s + a.backward_s, b.forward_s + b.backward_s) for a, b in zip(least, own, strict=True))
    return min(1.0, max((fast / slow for fast, slow in totals if slow > 0), default=1.0))


def least_crossing_bytes(graph: Graph, cuts: set[int]) -> int:
    """The least that is sent from one stage to the next; ``cuts``: the segments a stage may end with."""
    return min(sum(value.size_bytes for value in crossing(graph, cut)) for cut in sorted(cuts))
