"""The pass that splits a graph over one mesh axis: Graph x strategies -> Graph of what one device runs.

    shard(graph, axis, k, strategies, leaves, share)

Every value gets its producer's pair; every operand whose strategy asks for another pair gets one ``convert`` node, made
once per (value, target pair, segment); those of inputs and of values made from inputs alone once for all segments. Shapes
in the result are local. Axes are applied one after another: dp, then micro (the micro-batches, an axis of time), then tp;
a conversion of one axis is an ordinary operator for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.ir.graph import Graph, Leaf, Node, Ref, Value, map_refs
from planner.ir.layout import PARTIAL, WHOLE, Pair, conversion
from planner.sharding_rules.localise import localise
from planner.sharding_rules.rule import Strategy

SHARED = -1


@dataclass(frozen=True)
class Sharded:
    """``pairs``: the pair each original value has on the axis. ``loss``: that of the loss, P:R or R:R."""

    graph: Graph
    pairs: Mapping[str, Pair]
    loss: Pair


def is_shared(graph: Graph, name: str) -> bool:
    """Whether a tensor is an input or made from inputs alone."""
    if name in graph.producers:
        return graph.producers[name].segment == SHARED
    return graph.leaf_by_name[name].kind in ("input", "constant")


def target_pair(pair: Pair, differentiable: bool) -> Pair:
    return pair if differentiable else pair.without_gradient()


def shard(
    graph: Graph,
    axis: str,
    k: int,
    strategies: Mapping[str, Strategy],
    leaves: Mapping[str, Pair],
    share: int = 1,
) -> Sharded:
    """The graph of one device of ``axis`` (k devices).

    ``strategies``: of each node, by node name. ``leaves``: how each leaf is stored, by leaf name. ``share``: where the
    devices hold unequal parts, k is the number of equal units they share out, and this device has ``share`` of them.
    """
    builder = _Builder(graph, axis, k, share)
    for leaf in graph.leaves:
        builder.leaf(leaf, leaves[leaf.name])
    for node in graph.nodes:
        builder.node(node, strategies[node.name])
    return builder.finish()


class _Builder:
    def __init__(self, graph: Graph, axis: str, k: int, share: int) -> None:
        self.graph, self.axis, self.k, self.share = graph, axis, k, share
        self.pairs: dict[str, Pair] = {}
        self.local: dict[str, Value] = {}
        self.leaves: list[Leaf] = []
        self.nodes: list[Node] = []
        self.converted: dict[tuple[str, Pair, int], str] = {}
        self.names = set(graph.values)

    def local_shape(self, pair: Pair, value: Value) -> tuple[int, ...]:
        return pair.value.local_shape(value.shape, self.k, self.share)

    def leaf(self, leaf: Leaf, pair: Pair) -> None:
        value = replace(leaf.value, shape=self.local_shape(pair, leaf.value))
        self.pairs[leaf.name] = pair
        self.local[leaf.name] = value
        self.leaves.append(replace(leaf, value=value))

    def node(self, node: Node, strategy: Strategy) -> None:
        operands = [self.convert(name, pair, node) for name, pair in zip(node.operands, strategy.operands, strict=True)]
        in_order = iter(operands)
        renamed = replace(
            node,
            args=map_refs(node.args, lambda _: Ref(next(in_order))),
            kwargs=map_refs(node.kwargs, lambda _: Ref(next(in_order))),
        )
        outputs = []
        for value, pair in zip(node.outputs, strategy.outputs, strict=True):
            self.pairs[value.name] = pair
            local = replace(value, shape=self.local_shape(pair, value))
            self.local[value.name] = local
            outputs.append(local)
        self.nodes.extend(localise(renamed, node, tuple(outputs), strategy, self.axis, self.k, self.share))

    def convert(self, name: str, target: Pair, node: Node) -> str:
        """The name under which ``node`` finds value ``name`` in pair ``target``."""
        source = self.pairs[name]
        target = target_pair(target, source.gradient is not None)
        if source == target:
            return name
        segment = SHARED if is_shared(self.graph, name) else node.segment
        key = (name, target, segment)
        if key not in self.converted:
            value = self.graph.values[name]
            local = Value(
                self.fresh(f"{name}_{self.axis}"),
                self.local_shape(target, value),
                value.dtype,
                value.differentiable,
            )
            text = f"{source} -> {target}"
            self.nodes.append(Node("convert", (Ref(name), self.axis, text), (local,), (), node.module, segment))
            self.converted[key] = local.name
        return self.converted[key]

    def fresh(self, name: str) -> str:
        candidate, n = name, 1
        while candidate in self.names:
            candidate, n = f"{name}_{n}", n + 1
        self.names.add(candidate)
        return candidate

    def finish(self) -> Sharded:
        graph = self.graph
        loss, pair = graph.loss, self.pairs[graph.loss]
        producer = graph.producers[loss]
        if pair not in (PARTIAL, WHOLE):
            loss, pair = self.convert(loss, WHOLE, producer), WHOLE
        writes = []
        for buffer, value in graph.writes:
            stored = self.pairs[buffer]
            writes.append((buffer, self.convert(value, stored, graph.producers[value])))
        nodes = sorted(self.nodes, key=lambda node: node.segment)
        result = Graph(tuple(self.leaves), tuple(nodes), loss, tuple(writes), graph.batch_size, graph.notes)
        return Sharded(result, self.pairs, pair)


def conversion_moves(node: Node) -> tuple[str, str, str]:
    """(axis, forward move, backward move) of a ``convert`` node."""
    source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
    return str(node.args[1]), *conversion(source, target)
