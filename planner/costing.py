"""Prices of a graph on a cluster: operators, conversions, segments.

    node_cost(node, values, pricing)       seconds of one operator or conversion, forward and backward
    conversion_cost(value, f, t, ...)      seconds of a conversion before it is a node
    segment_costs(graph, pricing, ...)     SegmentCost of every link of the chain
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
from costmodels.memory import attention_statistics_bytes
from costmodels.mixed import MixedCluster
from costmodels.operators import attention_is_fused
from costmodels.views import AnyCluster, AnyDevice, Views, picked
from planner.ir.graph import DTYPE_BYTES, Graph, Leaf, Node, Value
from planner.ir.layout import WHOLE, Pair, conversion
from planner.ir.mesh import MICRO, Mesh
from planner.live import awaited_bytes
from planner.live import temporary_bytes as live_bytes
from planner.placement import Boundary
from planner.saved import FUSED, SHAPE, SavedTensors, as_priced, run_again, saved_tensors, select, tensor
from planner.segment_cost import Recomputation, SegmentCost
from planner.segments import segment_nodes
from planner.states import Weights, states


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


def _apart_s(nodes: Sequence[Node], costs: Sequence[Cost], graph: Graph, pricing: Pricing) -> float:
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


# --- segments ---------------------------------------------------------------------------------------------------------


def segment_costs(
    graph: Graph,
    pricing: Pricing,
    pairs: Mapping[str, Pair],
    partial_on_tp: frozenset[str] = frozenset(),
    operators: Sequence[SegmentOperators] = (),
) -> tuple[SegmentCost, ...]:
    """The cost of every segment of a lowered graph.

    ``operators``: ``segment_operators`` of the graph, where they are known.
    ``pairs``: the pair on tp of every value that may cross a cut. ``partial_on_tp``: parameters (leaf names) whose gradient
    is summed over tp once a step. Work shared by segments (masks,
    positions) is priced with the first segment. A parameter used by several segments is held by each when there are
    several stages, else by the first.
    """
    owners = parameter_owners(graph, pricing.mesh.pp > 1)
    costs = []
    for number, own in enumerate(operators or segment_operators(graph, pricing)):
        parameters = [graph.leaf_by_name[name] for name in owners.get(number, ())]
        transfer = _transfer(graph, number, pricing, pairs)
        costs.append(_segment_cost(graph, number, own, parameters, pricing, partial_on_tp, *transfer))
    return tuple(costs)


@dataclass(frozen=True)
class SegmentOperators:
    """What the operators of a segment cost and keep, however weights, gradients and optimizer state are held.

    ``on_device``: of all together; ``for_weights_s``: the part of backward that makes gradients of weights only;
    ``apart_s``: what backward takes more where that part is done later. ``inputs``: name -> bytes received.
    ``live_bytes``: alive besides what is kept; ``awaited_bytes``: gradients that wait where that part is done later.
    ``selective``, ``full``: with temporary bytes beyond those of the segment.
    """

    on_device: Cost
    for_weights_s: float
    apart_s: float
    saved: SavedTensors
    inputs: Mapping[str, int]
    live_bytes: int
    awaited_bytes: int
    selective: Recomputation
    full: Recomputation


def segment_operators(graph: Graph, pricing: Pricing) -> tuple[SegmentOperators, ...]:
    """Of every segment of a lowered graph, whatever the ZeRO stage, the optimizer and the way to other ranks."""
    chain = segment_nodes(graph)
    shared = [node for node in graph.nodes if node.segment < 0]
    return tuple(
        _operators(graph, number, [*shared, *nodes] if number == 0 else list(nodes), pricing)
        for number, nodes in enumerate(chain)
    )


def _operators(graph: Graph, number: int, nodes: Sequence[Node], pricing: Pricing) -> SegmentOperators:
    costs = {node.name: node_cost(node, graph.values, pricing) for node in nodes}
    for_weights = apart = 0.0
    awaited = 0
    if pricing.mesh.pp > 1:
        of_weights = made_of_weights(graph, nodes)
        for_weights = sum(weight_backward_s(node, costs[node.name], of_weights, graph, pricing) for node in nodes)
        apart = _apart_s(nodes, list(costs.values()), graph, pricing)
        awaited = awaited_bytes(graph, nodes, of_weights)
    saved = saved_tensors(graph, nodes, pricing.cluster.device.kind)
    inputs = _inputs(graph, number, nodes)
    own_nodes = [node for node in nodes if node.segment >= 0]
    selective, full = _recomputations(graph, own_nodes, costs, saved, inputs, pricing.cluster.device)
    live = _live_bytes(graph, nodes, saved, pricing)
    return SegmentOperators(sum_of(costs.values()), for_weights, apart, saved, inputs, live, awaited, selective, full)


def parameter_owners(graph: Graph, copies: bool) -> dict[int, tuple[str, ...]]:
    """Segment -> the parameters it holds; with ``copies`` a shared parameter is held by every segment that uses it."""
    parameters = {leaf.name for leaf in graph.leaves if leaf.kind == "parameter"}
    taken: set[str] = set()
    owners: dict[int, dict[str, None]] = {}
    for node in graph.nodes:
        for name in node.operands:
            if name in parameters and (copies or name not in taken):
                owners.setdefault(max(node.segment, 0), {})[name] = None
                taken.add(name)
    return {number: tuple(names) for number, names in owners.items()}


def _segment_cost(
    graph: Graph,
    number: int,
    own: SegmentOperators,
    parameters: Sequence[Leaf],
    pricing: Pricing,
    partial_on_tp: frozenset[str],
    transfer_s: float,
    transfer_bytes: int,
) -> SegmentCost:
    adding_s = accumulation_s(parameters, pricing)
    for_weights = own.for_weights_s + (adding_s if pricing.mesh.pp > 1 else 0.0)
    apart_s = 0.0 if pricing.reduces_in_backward else own.apart_s
    on_device = own.on_device.plus(Cost(backward_s=adding_s + apart_s))
    elapsed = on_device.with_host(pricing.cluster.device)
    forward, backward = elapsed.forward_s, elapsed.backward_s
    if for_weights:  # the host's share of either part is as large as the device's
        for_weights = min(backward, for_weights * (backward / on_device.backward_s))
    shared = frozenset(leaf.name for leaf in parameters if _is_shared(graph, leaf.name))
    held = states(
        Weights(parameters, shared, partial_on_tp, number == 0),
        forward,
        backward,
        pricing.mesh,
        pricing.cluster,
        pricing.optimizer,
        pricing.zero,
        pricing.reduces_in_backward,
        pricing.to_the_end,
    )
    software = pricing.cluster.software
    stays = 0 if software.frees_exchanged else transfer_bytes
    pending = 0 if pricing.reduces_in_backward or software.frees_put_off else own.awaited_bytes
    temporary = own.live_bytes + held.temporary_bytes + own.saved.shared
    selective, full = (replace(r, temporary_bytes=temporary + r.temporary_bytes) for r in (own.selective, own.full))
    return SegmentCost(
        forward_s=forward + held.ahead_s,
        backward_s=backward + held.behind_s,
        forward_communication_s=elapsed.forward_communication_s + held.ahead_s,
        backward_communication_s=elapsed.backward_communication_s + held.behind_s,
        activations_bytes=own.saved.own_bytes,
        input_bytes=sum(own.inputs.values()),
        weights_bytes=held.weights_bytes,
        gradients_bytes=held.gradients_bytes,
        optimizer_bytes=held.optimizer_bytes,
        temporary_bytes=temporary,
        gradient_sync_per_step_s=held.sync_per_step_s,
        unhidden_per_step_s=held.unhidden_s,
        optimizer_per_step_s=held.update_per_step_s,
        transfer_s=transfer_s,
        weight_backward_s=for_weights,
        pending_bytes=pending,
        crossing_bytes=stays,
        buffers_bytes=pricing.micro_batches * stays,
        selective=selective,
        full=full,
    )


def _is_shared(graph: Graph, name: str) -> bool:
    return len({node.segment for node in graph.consumers[name]}) > 1


def _transfer(graph: Graph, number: int, pricing: Pricing, pairs: Mapping[str, Pair]) -> tuple[float, int]:
    """Seconds of sending what crosses the cut behind segment ``number`` to the next stage, one way, and its bytes.

    Tensors travel whole on tp: made whole before, cut again after; half of that conversion is charged each way.
    """
    mesh = pricing.mesh
    if mesh.pp == 1:
        return 0.0, 0
    total, size = 0.0, 0
    for value in crossing(graph, number):
        pair = pairs[value.name]
        whole = whole_bytes(value, pair, mesh.tp)
        size += whole
        if mesh.tp > 1:
            kept = WHOLE if pair.gradient is not None else WHOLE.without_gradient()
            out, back = (conversion_cost(whole, *way, "tp", pricing) for way in ((pair, kept), (kept, pair)))
            total += (out.total_s + back.total_s) / 2
    return total + pricing.send_s(size), size


def crossing(graph: Graph, number: int) -> tuple[Value, ...]:
    """The main tensors made in segments up to ``number`` and read behind it."""
    return tuple(
        value
        for node in graph.nodes
        if 0 <= node.segment <= number
        for value in node.outputs
        if any(reader.segment > number for reader in graph.consumers[value.name])
    )


def _inputs(graph: Graph, number: int, nodes: Sequence[Node]) -> dict[str, int]:
    """Name -> bytes of what earlier segments made and this one reads."""
    read = dict.fromkeys(name for node in nodes for name in node.operands)
    producers = graph.producers
    return {
        name: graph.values[name].size_bytes
        for name in read
        if name in producers and 0 <= producers[name].segment < number
    }


def _live_bytes(graph: Graph, nodes: Sequence[Node], saved: SavedTensors, pricing: Pricing) -> int:
    """What is alive besides what is kept. Gradients of weights of a single micro-batch are those that stay."""
    software = pricing.cluster.software
    workspace = software.workspace_bytes
    return workspace + live_bytes(
        graph,
        nodes,
        saved,
        pricing.cluster.device.kind,
        accumulates=pricing.micro_batches > 1 and not software.gradients_in_place,
        loss_in_place=software.loss_in_place,
    )


def _recomputations(
    graph: Graph,
    nodes: Sequence[Node],
    costs: Mapping[str, Cost],
    saved: SavedTensors,
    inputs: Mapping[str, int],
    device: AnyDevice,
) -> tuple[Recomputation, Recomputation]:
    """Selective and full recomputation of a segment with these ``nodes``, of these ``costs``; ``inputs``: name -> bytes of what
    it receives. Temporary bytes are those beyond what it holds when nothing is recomputed."""
    again = run_again(graph, nodes)
    how = select(graph, nodes)
    stored: dict[str, int] = {}  # what selective recomputation keeps besides the inputs
    held_anyway = 0
    full, selective = Cost(), Cost()
    for node in again:
        cost = costs[node.name]
        full = full.plus(cost)
        way = how.get(node.name)
        if way == FUSED and not _is_fused(node, graph.values, device.kind):
            way = None
        if way is None:
            selective = selective.plus(cost)
        elif way != SHAPE:
            stored[node.name] = node.output.size_bytes
            if way == FUSED:
                extra = attention_statistics_bytes(tensor(graph.values[node.operands[0]]))
                stored[f"{node.name}, statistics"], held_anyway = extra, held_anyway + extra
    full, selective = full.with_host(device), selective.with_host(device)
    own = sum(size for name, size in saved.own.items() if name not in inputs) + saved.extra
    kept = sum(inputs.values())
    held_anyway += sum(size for name, size in saved.own.items() if name in stored and name not in inputs)
    return (
        Recomputation(
            selective.forward_s,
            selective.forward_communication_s,
            kept + sum(stored.values()),
            own - held_anyway,
        ),
        Recomputation(full.forward_s, full.forward_communication_s, kept, own),
    )


def _is_fused(node: Node, values: Mapping[str, Value], kind: str) -> bool:
    op, inputs, _, hint = as_priced(node, values)
    mask_needs_grad = len(node.operands) > 3 and values[node.operands[3]].differentiable
    return attention_is_fused(inputs[0][1], kind, hint, mask_needs_grad)
