"""Prices of the segments of a lowered graph.

    segment_operators(graph, pricing)      what the operators of every segment cost and keep
    segment_costs(graph, pricing, ...)     SegmentCost of every link of the chain: with weights, gradients and optimizer state

What operators and conversions cost: planner.costing; what dp and ZeRO add: planner.states; what is alive: planner.live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels.memory import attention_statistics_bytes
from costmodels.operators import attention_is_fused
from costmodels.views import AnyDevice
from planner.costing import (
    Cost,
    Pricing,
    accumulation_s,
    apart_s,
    conversion_cost,
    made_of_weights,
    node_cost,
    sum_of,
    weight_backward_s,
    whole_bytes,
)
from planner.ir.graph import Graph, Leaf, Node, Value
from planner.ir.layout import WHOLE, Pair
from planner.live import awaited_bytes
from planner.live import temporary_bytes as live_bytes
from planner.saved import FUSED, SHAPE, SavedTensors, as_priced, run_again, saved_tensors, select, tensor
from planner.segment_cost import Recomputation, SegmentCost
from planner.segments import segment_nodes
from planner.states import Weights, states


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
        apart = apart_s(nodes, list(costs.values()), graph, pricing)
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
