"""What there is to measure for a model: the operator calls, at local shapes, of the strategies that a search tries.

    calls_of(evaluator)      every distinct call, those that most strategies share first, with its line of source

A call is one local node (planner.solve.letter_prices.local_nodes) under a strategy on tp of each degree, for each size of
micro-batch, and for zero-bubble schedules the same with gradients of its weights, or of the others, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from costmodels.measured import OperatorCall
from costmodels.operators import METADATA, base_name, is_view
from planner.costing import accumulating, called, made_of_weights
from planner.errors import BadInput
from planner.ir.graph import MODULE, Graph, Node, Value
from planner.lower.source import expression
from planner.sharding_rules import rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.solve.configuration import Evaluator
from planner.solve.letter_prices import local_nodes
from planner.solve.space import Space, micro_batch_counts

# More micro-batches than this for each rank are left to scaling.
MICRO_BATCHES_A_RANK = 4
INTEGERS_BELOW = {"embedding": 0, "vocab_embedding": 0, "cross_entropy_sum": 1, "vocab_cross_entropy": 1}


@dataclass(frozen=True)
class TimedCall:
    """``source``: the call as a line of Python over x0, x1, ...; ``below``: of each operand, what its integers stay below."""

    call: OperatorCall
    source: str
    below: tuple[int, ...]


def calls_of(evaluator: Evaluator) -> tuple[TimedCall, ...]:
    """The calls of all meshes of the cluster's devices, each once; modules that run as they are are not among them."""
    found: dict[OperatorCall, TimedCall] = {}
    for graph, tp in _pieces(evaluator):
        for node, values, needs in _local(graph, tp):
            call = called(node, values)
            if node.op in (MODULE, "convert") or is_view(*call[:3], call.hint) or base_name(call.op) in METADATA:
                continue
            if call not in found:
                timed = _timed(node, values, call)
                found[call] = timed
                for part in needs:
                    only = call._replace(needs_grad=part)
                    found.setdefault(only, TimedCall(only, timed.source, timed.below))
    for graph, _ in _pieces(evaluator):
        for leaf in graph.leaves:
            if leaf.trainable:
                call = accumulating(leaf)
                found.setdefault(call, TimedCall(call, "x0.add_(x1)", (1, 1)))
    return tuple(found.values())


def _pieces(evaluator: Evaluator) -> Iterator[tuple[Graph, int]]:
    """Micro-batches of all sizes with each degree of tp, the largest first; each once."""
    gpus, rows = evaluator.problem.cluster.gpus, evaluator.problem.graph.batch_size
    seen: set[tuple[int, int]] = set()
    space = Space(evaluator.problem.cluster, rows, evaluator.segments)
    shapes = [
        (m, region.mesh)
        for wide in space.regions()
        for region in space.narrower(wide)
        if region.mesh is not None
        for m in micro_batch_counts(rows, region.mesh.dp)
        if m <= MICRO_BATCHES_A_RANK * gpus
    ]
    for m, mesh in sorted(shapes, key=lambda shape: (shape[0] * shape[1].dp, shape[1].tp)):
        try:
            pieces = evaluator.split(mesh.dp, m).pieces
        except BadInput:
            continue
        for piece in pieces:
            if (piece.rows, mesh.tp) not in seen:
                seen.add((piece.rows, mesh.tp))
                yield piece.graph, mesh.tp


def _local(graph: Graph, tp: int) -> Iterator[tuple[Node, Mapping[str, Value], tuple[tuple[bool, ...], ...]]]:
    """Every node that one device runs under any strategy, the values around it, and the parts its backward is split into."""
    weights, values = made_of_weights(graph, graph.nodes), graph.values
    cuts = find_cuts(graph)
    for node in graph.nodes:
        if node.op == "convert":
            continue
        of_weights = tuple(name in weights for name in node.operands)
        needs = called(node, values).needs_grad
        split = tuple(a and b for a, b in zip(of_weights, needs, strict=True))
        rest = tuple(b and not a for a, b in zip(of_weights, needs, strict=True))
        parts = (split, rest) if any(split) and any(rest) else ()
        if tp == 1:
            yield node, values, parts
            continue
        for strategy in strategies(rule_of(node, values), node, values, tp, cuts[node.name]):
            made, around, _ = local_nodes(node, strategy, graph, tp)
            for local in made:
                same = len(made) == 1 and local.op == node.op and len(local.operands) == len(needs)
                yield local, around, parts if same else ()


def _timed(node: Node, values: Mapping[str, Value], call: OperatorCall) -> TimedCall:
    place: dict[str, str] = {}
    for number, name in enumerate(node.operands):
        place.setdefault(name, f"x{number}")
    whose = INTEGERS_BELOW.get(node.base)
    below = 1
    if whose is not None:
        shape = values[node.operands[0]].shape
        below = shape[min(whose, len(shape) - 1)]
    return TimedCall(call, expression(node, lambda name: place[name], "0"), (below,) * len(node.operands))
