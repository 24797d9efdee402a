"""Cutting the batch: over the devices of ``dp`` and over the micro-batches of a step.

Both are the same propagation. Inputs are cut on dim 0; going forward, an operator that reads a cut tensor runs the strategy
that matches it without communication, else the one with the fewest collectives. Operators that do not depend on the batch
run afterwards, in reverse: on the cut their consumers ask for, else whole with partial gradients (RP), so that a
parameter's gradient is a partial sum everywhere and is reduced once, at the parameter.

A batch of B rows is dealt as evenly as can be, over the dp ranks and then over a rank's micro-batches (mesh.deal), so the
pieces differ by one row at most. A cut into unequal shares is the cut into B equal units of which each share has its
number: every operator runs the same strategy on all of them, and only sizes differ between the pieces.

Micro-batches follow one another in time, so nothing can be exchanged between them except sums known before the loop:
gradient-free counts (the number of tokens). Anything else couples the batch and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.errors import BadInput
from planner.ir.graph import MODULE, Graph, Node
from planner.ir.layout import COMMUNICATING, REPLICATED, Pair, conversion, shard
from planner.ir.mesh import MICRO, deal, in_lowest_terms
from planner.segments import main_nodes
from planner.shard import Sharded, conversion_moves, is_shared, target_pair
from planner.shard import shard as shard_graph
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts


@dataclass(frozen=True)
class Piece:
    """``graph``: one micro-batch of ``rows`` rows on a dp rank whose micro-batches have ``rank_rows`` together."""

    rank_rows: int
    rows: int
    graph: Graph


@dataclass(frozen=True)
class BatchSplit:
    """``pieces``: one of each kind there is, the largest first. ``dp``: the strategy each operator runs on the dp axis.

    ``loss_is_partial``: the loss is a share of the global one (sum over dp ranks and micro-batches).
    """

    pieces: tuple[Piece, ...]
    dp: Mapping[str, Strategy]
    loss_is_partial_on_dp: bool
    loss_is_partial_on_micro: bool

    @property
    def graph(self) -> Graph:
        """Of the largest piece."""
        return self.pieces[0].graph


def split_batch(graph: Graph, dp: int, micro_batches: int) -> BatchSplit:
    """One dp rank's micro-batch of ``graph``, for every size of micro-batch there is.

    Raises BadInput when there are fewer rows than pieces, or when micro-batches would have to communicate (the operator is
    named).
    """
    check_count(graph.batch_size, dp, micro_batches)
    while True:
        try:
            return _split(graph, dp, micro_batches)
        except _Coupled as error:
            graph = _without_false_batches(graph, error, micro_batches)


def check_count(rows: int, dp: int, micro_batches: int) -> None:
    """Raise BadInput, naming what works, when ``rows`` rows are too few for ``dp`` shards of ``micro_batches`` each."""
    if rows < dp * micro_batches:
        most = rows // dp
        remedy = f"use at least {dp * micro_batches} rows"
        if most:
            remedy += f", or plan with at most {most} micro-batch{'es' if most > 1 else ''} (mb={most})"
        raise BadInput(
            f"a batch of {rows} cannot be cut into {dp} data-parallel shards (dp) of {micro_batches} micro-batches (mb); {remedy}"
        )


def _split(graph: Graph, dp: int, micro_batches: int) -> BatchSplit:
    shares = deal(graph.batch_size, dp)
    over_dp: Mapping[str, Strategy] = {}
    dp_partial = micro_partial = False
    ranks = {graph.batch_size: graph}
    if dp > 1:
        over_dp = batch_strategies(graph, sum(in_lowest_terms(shares)), time=False)
        done = {rows: _shard(graph, "dp", shares, rows, over_dp) for rows in dict.fromkeys(shares)}
        ranks = {rows: each.graph for rows, each in done.items()}
        dp_partial = done[shares[0]].loss.value.kind == "P"
        whole = _without(graph, _inputs_read_whole(done[shares[0]].graph))
        if whole is not graph and _apart(whole, shares) > _apart(graph, shares):
            return _split(whole, dp, micro_batches)
    if micro_batches == 1:
        pieces = tuple(Piece(rows, rows, local) for rows, local in ranks.items())
        return BatchSplit(pieces, over_dp, dp_partial, micro_partial)
    if graph.writes:
        buffer = graph.leaf_by_name[graph.writes[0][0]]
        raise BadInput(
            f"buffer {buffer.target!r} is written in every forward pass, so the batch cannot be cut into "
            f"micro-batches without changing the result; use 1 micro-batch (mb=1), or a model without it "
            "(for BatchNorm: GroupNorm or LayerNorm)"
        )
    found = []
    for rank_rows, local in ranks.items():
        parts = deal(rank_rows, micro_batches)
        over_time = batch_strategies(local, sum(in_lowest_terms(parts)), time=True)
        for rows in dict.fromkeys(parts):
            one = _shard(local, MICRO, parts, rows, over_time)
            _check_time(one.graph)
            micro_partial = one.loss.value.kind == "P"
            found.append(Piece(rank_rows, rows, one.graph))
    return BatchSplit(tuple(found), over_dp, dp_partial, micro_partial)


def _shard(graph: Graph, axis: str, parts: tuple[int, ...], rows: int, chosen: Mapping[str, Strategy]) -> Sharded:
    """One of ``parts`` of the rows of ``graph``, with ``rows`` of them."""
    units = in_lowest_terms(parts)
    leaves = {leaf.name: leaf_pair(graph, leaf.name) for leaf in graph.leaves}
    return shard_graph(graph, axis, sum(units), chosen, leaves, units[parts.index(rows)])


class _Coupled(BadInput):
    """Micro-batches would have to communicate. ``inputs``: those of the batch that are read whole, if that is why."""

    def __init__(self, message: str, inputs: frozenset[str]) -> None:
        super().__init__(message)
        self.inputs = inputs


def _without_false_batches(graph: Graph, error: _Coupled, micro_batches: int) -> Graph:
    """``graph`` whose inputs that are read whole are not cut, such as a mask [T, T] where the batch is as long as T.

    Raises ``error`` where there are none, or where cutting them is what lets the samples be worked on apart.
    """
    changed = _without(graph, error.inputs)
    parts = deal(graph.batch_size, micro_batches)
    after = _apart(changed, parts)
    if changed is graph or not after or after < _apart(graph, parts):
        raise BadInput(str(error))
    return changed


def _without(graph: Graph, inputs: frozenset[str]) -> Graph:
    """``graph`` whose ``inputs`` are not cut."""
    if not inputs:
        return graph
    leaves = tuple(replace(leaf, batched=leaf.batched and leaf.name not in inputs) for leaf in graph.leaves)
    return replace(graph, leaves=leaves)


def _inputs_read_whole(graph: Graph) -> frozenset[str]:
    """Inputs cut on dp that are put together again, or padded, before they meet a weight."""
    found: frozenset[str] = frozenset()
    for node in graph.nodes:
        if node.op == "convert" and node.args[1] == "dp" and is_shared(graph, node.operands[0]):
            _, forward, _ = conversion_moves(node)
            if forward in ("all_gather", "all_to_all", "pad"):
                found |= _inputs_behind(graph, node)
    return found


def _apart(graph: Graph, parts: tuple[int, ...]) -> int:
    """How many operators with a gradient work on one of ``parts`` of the batch."""
    chosen = batch_strategies(graph, sum(in_lowest_terms(parts)), time=False)
    return sum(node.output.differentiable and bool(chosen[node.name].letter) for node in graph.nodes)


def leaf_pair(graph: Graph, name: str) -> Pair:
    """How a leaf is stored on a batch axis: batched inputs cut, parameters whole with partial gradients."""
    leaf = graph.leaf_by_name[name]
    if leaf.kind == "input" and leaf.batched:
        return shard(0).without_gradient()
    return REPLICATED if leaf.value.differentiable else REPLICATED.without_gradient()


def batch_strategies(graph: Graph, k: int, time: bool) -> dict[str, Strategy]:
    """A strategy for each node on a batch axis of ``k``; ``time``: the axis is the sequence of micro-batches."""
    cuts = find_cuts(graph)
    options: dict[str, tuple[Strategy, ...]] = {}
    pairs = {leaf.name: leaf_pair(graph, leaf.name) for leaf in graph.leaves if leaf.kind == "input" and leaf.batched}
    chosen: dict[str, Strategy] = {}
    for node in graph.nodes:
        found = strategies(rule_of(node, graph.values), node, graph.values, k, cuts[node.name])
        options[node.name] = tuple(s for s in found if not (time and s.local))
        if any(name in pairs for name in node.operands):
            best = min(options[node.name], key=lambda s, node=node: _collectives(node, s, pairs))  # type: ignore[misc]
            chosen[node.name] = best
            pairs.update(_left(graph, node, best, pairs))
    demands: dict[str, set[Pair]] = {}
    for node in reversed(graph.nodes):
        if node.name not in chosen:
            chosen[node.name] = _demanded(node, options[node.name], demands)
        for name, pair in zip(node.operands, chosen[node.name].operands, strict=True):
            demands.setdefault(name, set()).add(pair)
    return chosen


def _left(graph: Graph, node: Node, strategy: Strategy, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The pairs in which readers of a node should look for its results.

    A module that runs whole on the batch gives whole results; what reads them is cut again, or all behind it would run
    whole as well.
    """
    found = dict(zip((value.name for value in node.outputs), strategy.outputs, strict=True))
    if node.op == MODULE and not strategy.letter:
        rows = {graph.values[n].shape[0] for n in node.operands if n in pairs and pairs[n].value == shard(0).value}
        cut = [value for value in node.outputs if value.shape and value.shape[0] in rows]
        found.update((value.name, target_pair(shard(0), value.differentiable)) for value in cut)
    return found


def _collectives(node: Node, strategy: Strategy, pairs: Mapping[str, Pair]) -> tuple[int, int, int]:
    """Collectives the operands need, operands converted at all, and whether the work is not cut."""
    communicating = converted = 0
    for name, target in zip(node.operands, strategy.operands, strict=True):
        source = pairs.get(name)
        if source is None:
            continue
        moves = conversion(source, target_pair(target, source.gradient is not None))
        communicating += sum(move in COMMUNICATING for move in moves)
        converted += source != target
    return communicating + bool(strategy.local), converted, not strategy.letter


def _demanded(node: Node, options: tuple[Strategy, ...], demands: Mapping[str, set[Pair]]) -> Strategy:
    for strategy in options:
        wanted = [demands.get(value.name, set()) for value in node.outputs]
        if strategy.letter and all(not w or w == {pair} for w, pair in zip(wanted, strategy.outputs, strict=True)):
            if any(wanted):
                return strategy
    by_name = {strategy.name: strategy for strategy in options}
    return by_name.get("RP", by_name["R"])


def _check_time(graph: Graph) -> None:
    """Refuse what cannot be done between micro-batches, naming the operator.

    A sum can be made before the first of them when it depends on inputs alone and on no other such sum. Every result of a
    micro-batch has to be made from its own samples: one that is padded to the whole batch stands for rows at other places.
    """
    weighted = main_nodes(graph)
    summed: set[str] = set()
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    coupling: list[Node] = []
    inputs: frozenset[str] = frozenset()
    for node in graph.nodes:
        if node.op != "convert" or node.args[1] != MICRO:
            if any(name in summed for name in node.operands):
                summed.update(value.name for value in node.outputs)
            continue
        source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
        forward, backward = conversion(source, target)
        if forward == "all_reduce" and node.name not in weighted and node.operands[0] not in summed:
            summed.add(node.name)
            continue
        if node.operands[0] in summed:
            summed.add(node.name)
        if forward in (*COMMUNICATING, "pad") or backward in COMMUNICATING:
            coupling.append(_reader(graph, node))
            if is_shared(graph, node.operands[0]):
                inputs |= _inputs_behind(graph, node)
    if coupling:
        reader = min(coupling, key=lambda node: places[node.name])
        if reader.op == MODULE:
            path = reader.args[0]
            vouch = f"samplewise=({path!r},)" if path else "samplewise=True"
            raise _Coupled(
                f"module {path or 'model'!r} runs whole on the batch, which cannot be cut into micro-batches then; use 1 "
                f"micro-batch (mb=1), or pass {vouch} where it treats each row of the batch alone",
                inputs,
            )
        raise _Coupled(
            f"operator {reader.op} in {reader.module or 'the model'} couples the samples of a batch, so the batch "
            "cannot be cut into micro-batches without changing the result; use 1 micro-batch (mb=1)",
            inputs,
        )


def _inputs_behind(graph: Graph, node: Node) -> frozenset[str]:
    """The inputs cut with the batch that ``node`` is made from."""
    wanted = set(node.operands)
    for earlier in reversed(graph.nodes):
        if any(value.name in wanted for value in earlier.outputs):
            wanted.update(earlier.operands)
    return frozenset(leaf.name for leaf in graph.leaves_of("input") if leaf.batched and leaf.name in wanted)


def _reader(graph: Graph, node: Node) -> Node:
    """The first operator that reads what ``node`` makes, behind further conversions."""
    while node.op == "convert" and graph.consumers[node.name]:
        node = graph.consumers[node.name][0]
    return node


__all__ = ["BatchSplit", "Piece", "batch_strategies", "check_count", "leaf_pair", "split_batch"]
