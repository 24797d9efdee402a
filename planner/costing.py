"""Prices of operators and conversions on a cluster.

    node_cost(node, values, pricing)       seconds of one operator or conversion, forward and backward
    conversion_cost(value, f, t, ...)      seconds of a conversion before it is a node
    weight_backward_s(node, cost, ...)     the part of an operator's backward that a zero-bubble schedule may do later

A graph is priced as it is lowered: local shapes, explicit conversions. So the price of a strategy inside the search and the
price of the finished program come from the same lines.

Conversions on tp are all exposed: the next operator needs them. What dp and ZeRO add: planner.states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from costmodels.collectives import LOCAL_MOVES, collective_time_s
from costmodels.compute import OperatorTime, copy_s
from costmodels.hardware import Cluster
from costmodels.measured import MEASURED, MODELLED, SCALED, OperatorCall, operator_price
from costmodels.mixed import MixedCluster
from costmodels.views import AnyCluster, AnyDevice, Views, picked
from planner.ir.graph import DTYPE_BYTES, Graph, Leaf, Node, Value
from planner.ir.layout import Pair, conversion
from planner.ir.mesh import MICRO, Mesh
from planner.placement import Boundary
from planner.saved import as_priced, tensor


@dataclass(frozen=True)
class Pricing:
    """What prices depend on besides the graph.

    ``cluster``: of the devices that are priced; of unequal ones those of one pipeline rank, and then ``onward`` is the way to
    the next rank and ``to_the_end`` that to the other end of the pipeline (planner.placement). ``reduces_in_backward``:
    gradients are reduced as backward makes them; under zero-bubble they are when it is over.
    """

    cluster: AnyCluster
    mesh: Mesh
    optimizer: str = "adamw"
    zero: int = 0
    micro_batches: int = 1
    reduces_in_backward: bool = True
    onward: Boundary | None = None
    to_the_end: Boundary | None = None

    def send_s(self, size_bytes: float) -> float:
        """Seconds until ``size_bytes`` have come to the next pipeline rank."""
        if self.onward is not None:
            return self.onward.send_s(size_bytes)
        return collective_time_s("send", size_bytes, self.mesh.pp, self.mesh.stride("pp"), self.cluster)


@dataclass(frozen=True)
class Cost:
    """Seconds of one call on the device; ``*_communication_s`` are part of ``forward_s`` and ``backward_s``.

    ``*_launches``: kernels that a GPU's host launches meanwhile.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    forward_launches: int = 0
    backward_launches: int = 0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    def plus(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def with_host(self, device: AnyDevice) -> Cost:
        """Of a sequence: as long as the device and the host take for it."""
        return replace(
            self,
            forward_s=device.elapsed_s(self.forward_s, self.forward_launches),
            backward_s=device.elapsed_s(self.backward_s, self.backward_launches),
        )


FREE = Cost()


def sum_of(costs: Iterable[Cost]) -> Cost:
    total = FREE
    for cost in costs:
        total = total.plus(cost)
    return total


def node_cost(node: Node, values: Mapping[str, Value], pricing: Pricing) -> Cost:
    """Seconds of ``node`` on one device, its tensors local."""
    if node.op == "convert":
        source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
        axis = str(node.args[1])
        whole = whole_bytes(values[node.operands[0]], source, 1 if axis == MICRO else pricing.mesh.degree(axis))
        return conversion_cost(whole, source, target, axis, pricing)
    inputs = tuple(values[name] for name in node.operands)
    time = call_time(called(node, values), pricing.cluster)
    inner = _inner_collectives(node, inputs, pricing)
    return Cost(
        time.forward_s + inner.forward_s,
        time.backward_s + inner.backward_s,
        inner.forward_s,
        inner.backward_s,
        time.forward_launches + inner.forward_launches,
        time.backward_launches + inner.backward_launches,
    )


def called(node: Node, values: Mapping[str, Value]) -> OperatorCall:
    """``node`` as the cost model is asked about it."""
    needs = tuple(values[name].differentiable and node.output.differentiable for name in node.operands)
    op, read, made, hint = as_priced(node, values)
    return OperatorCall(op, read, made, needs, hint)


def call_time(call: OperatorCall, cluster: AnyCluster) -> OperatorTime:
    if isinstance(cluster, Views):
        return picked((call_time(call, view) for view in cluster.clusters), cluster.slowest)
    return operator_price(call, cluster.device, cluster.measured)[0]


def priced_by(graph: Graph, cluster: Cluster | MixedCluster) -> tuple[str, ...]:
    """In words, how many of the distinct operator calls of a lowered graph were measured, where ``cluster`` has tables."""
    if isinstance(cluster, MixedCluster) or cluster.measured is None:
        return ()
    calls = {called(node, graph.values) for node in graph.nodes if node.op != "convert"}
    hows = [operator_price(call, cluster.device, cluster.measured)[1] for call in calls]
    count = {how: hows.count(how) for how in (MEASURED, SCALED, MODELLED)}
    text = f"prices: {count[MEASURED]} of {sum(count.values())} operator calls measured on this machine"
    text += f", {count[SCALED]} scaled from like ones" if count[SCALED] else ""
    text += f", {count[MODELLED]} modelled" if count[MODELLED] else ""
    runs = cluster.measured.corrections.runs
    return (text + (f"; corrected by {runs} run{'s' * (runs > 1)}" if runs else ""),)


def weight_backward_s(node: Node, cost: Cost, of_weights: frozenset[str], graph: Graph, pricing: Pricing) -> float:
    """The part of ``cost.backward_s`` that makes gradients of weights only: all of it, none, or what the operator takes
    when nothing else needs gradients. ``of_weights``: names of what is made of weights alone."""
    values = graph.values
    needed = [name in of_weights for name in node.operands if values[name].differentiable]
    if not node.output.differentiable or not any(needed):
        return 0.0
    if all(needed) or node.op == "convert":
        return cost.backward_s
    needs = tuple(name in of_weights for name in node.operands)
    call = called(node, values)._replace(needs_grad=needs)
    time = call_time(call, pricing.cluster)
    return min(cost.backward_s, time.backward_s)


def accumulating(leaf: Leaf) -> OperatorCall:
    """Adding a micro-batch's gradient of a weight to that of the micro-batches before."""
    held = tensor(leaf.value)
    return OperatorCall("aten.add_.Tensor", (held, held), (held,), (False, False))


def accumulation_s(parameters: Iterable[Leaf], pricing: Pricing) -> float:
    """Seconds of that, a micro-batch; the first finds nothing to add to. Counted where times were measured: elsewhere it is part
    of what kernels of products reach."""
    if pricing.cluster.measured is None or pricing.micro_batches == 1:
        return 0.0
    device, tables = pricing.cluster.device, pricing.cluster.measured
    times = [operator_price(accumulating(leaf), device, tables)[0] for leaf in parameters if leaf.trainable]
    return sum(time.forward_s for time in times) * (1 - 1 / pricing.micro_batches)


def apart_s(nodes: Sequence[Node], costs: Sequence[Cost], graph: Graph, pricing: Pricing) -> float:
    """What backward takes more where gradients of weights are made apart from the others, as measured."""
    if pricing.cluster.measured is None:
        return 0.0
    device, tables, of_weights = pricing.cluster.device, pricing.cluster.measured, made_of_weights(graph, nodes)
    more_s = 0.0
    for node, cost in zip(nodes, costs, strict=True):
        if node.op == "convert":
            continue
        call = called(node, graph.values)
        mine = tuple(a and name in of_weights for a, name in zip(call.needs_grad, node.operands, strict=True))
        rest = tuple(a and not b for a, b in zip(call.needs_grad, mine, strict=True))
        if any(mine) and any(rest):
            times = [operator_price(call._replace(needs_grad=part), device, tables)[0] for part in (mine, rest)]
            together_s = cost.backward_s - cost.backward_communication_s
            more_s += max(0.0, sum(time.backward_s for time in times) - together_s)
    return more_s


def made_of_weights(graph: Graph, nodes: Iterable[Node]) -> frozenset[str]:
    """Trainable parameters, and what ``nodes`` make of them and tensors without gradients alone."""
    found = {leaf.name for leaf in graph.leaves if leaf.trainable}
    values = graph.values
    for node in nodes:
        sources = [name for name in node.operands if values[name].differentiable]
        if sources and all(name in found for name in sources):
            found.update(value.name for value in node.outputs)
    return frozenset(found)


def _inner_collectives(node: Node, inputs: Sequence[Value], pricing: Pricing) -> Cost:
    """Collectives inside operators that act over axes: statistics (2 c numbers each way), or max, sum and logit a token."""
    axes = dict(node.kwargs).get("axes", ())
    forward = backward = 0.0
    launches = [0, 0]
    for axis in axes:
        degree, stride = pricing.mesh.degree(axis), pricing.mesh.stride(axis)
        if node.op == "batch_norm_over":
            size = 2 * inputs[0].shape[1] * DTYPE_BYTES[inputs[0].dtype]
            one = collective_time_s("all_reduce", size, degree, stride, pricing.cluster)
            forward, backward = forward + one, backward + one
            launches = [launches[0] + 1, launches[1] + 1]
        elif node.op == "vocab_cross_entropy":
            size = inputs[1].numel * DTYPE_BYTES[inputs[0].dtype]
            forward += 3 * collective_time_s("all_reduce", size, degree, stride, pricing.cluster)
            launches[0] += 3
    return Cost(forward, backward, 0.0, 0.0, *launches)


def whole_bytes(local: Value, pair: Pair, k: int) -> int:
    """Bytes of the tensor as a whole on the axis, given what one of ``k`` devices holds of it."""
    return local.size_bytes * (k if pair.value.kind == "S" else 1)


def conversion_cost(whole: int, source: Pair, target: Pair, axis: str, pricing: Pricing) -> Cost:
    """Seconds of a conversion of a tensor of ``whole`` bytes on ``axis``; local moves are copies of one device's share.

    Slicing out a micro-batch is a view and free.
    """
    if axis == MICRO:
        return FREE
    forward, backward = _conversion_s(
        whole, source, target, pricing.mesh.degree(axis), pricing.mesh.stride(axis), pricing.cluster
    )
    return (
        Cost(forward, backward, forward, backward, int(forward > 0), int(backward > 0)) if forward or backward else FREE
    )


@lru_cache(maxsize=65536)
def _conversion_s(
    whole: int, source: Pair, target: Pair, degree: int, stride: int, cluster: AnyCluster
) -> tuple[float, float]:
    forward, backward = (_move_s(move, whole, degree, stride, cluster) for move in conversion(source, target))
    return forward, backward


def _move_s(move: str, whole: int, degree: int, stride: int, cluster: AnyCluster) -> float:
    if move == "none":
        return 0.0
    if move in LOCAL_MOVES:
        copied = whole // degree if move == "slice" else whole
        return copy_s(copied, cluster.device)
    return collective_time_s(move, whole, degree, stride, cluster)


def graph_cost_s(graph: Graph, pricing: Pricing) -> float:
    """Seconds of one forward and backward of all nodes of a lowered graph, segment by segment."""
    costs: dict[int, Cost] = {}
    for node in graph.nodes:
        number = max(node.segment, 0)
        costs[number] = costs.get(number, FREE).plus(node_cost(node, graph.values, pricing))
    return sum(cost.with_host(pricing.cluster.device).total_s for cost in costs.values())
