"""The tensors alive while a segment runs, besides what autograd keeps of it for backward.

    temporary_bytes(graph, nodes, ...)     the most at any moment of the forward and the backward of one micro-batch
    awaited_bytes(graph, nodes, ..)        gradients that those of weights are made of, when these are put off

Forward: what the operators make stays until the segment returns, since its variables do. Backward: nodes in reverse; at each,

    kept and not yet released  +  gradients of tensors still to be consumed  +  gradients it makes  +  its own scratch

Gradients follow autograd: a view's gradient is a view, a sum passes its gradient on, the gradients of a tensor with several
readers are added in place, a storage is released with the first of its readers (the last to run backward). Gradients
of weights live until they are added to ``.grad``, which is counted with the states: they take memory of their own where
there is something to add to (``accumulates``).

    scratch of              backward
    cross-entropy           the gradient of its log-probabilities: nll_loss and log_softmax are two operators
    the same over shards    the gradient of the logits in float32, where they are narrower (runtime.operators)
    fused attention         the gradient of the queries, summed in float32, on GPUs (Dao, FlashAttention-2, 2023, algorithm 2)

The result is relative to all that is kept of the segment (planner.saved), so that memory of a stage is what
planner.segment_cost says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodels.operators import HALF
from planner.ir.graph import Graph, Node, Value
from planner.ir.layout import Pair, conversion
from planner.saved import ATTENTION, PRICED_AS, SavedTensors, is_view_of_first, saved_of

_CROSS_ENTROPY, _OVER_SHARDS = "aten.cross_entropy_loss.default", "vocab_cross_entropy"
# Their gradient is that of what they make, where the shape is the same.
_PASSED_ON = frozenset({"add", "add_", "sub", "sub_", "alias", "contiguous"})


@dataclass
class _Storage:
    """A gradient in memory; ``holders``: how many tensors' gradient it is."""

    size_bytes: int
    holders: int = 1


class _Gradients:
    """Of tensors, by name, while backward runs."""

    def __init__(self) -> None:
        self.of: dict[str, _Storage] = {}
        self.alive_bytes = 0

    def make(self, name: str, size_bytes: int) -> None:
        """A new gradient; added in place to one that is there."""
        if name not in self.of:
            self.of[name] = _Storage(size_bytes)
            self.alive_bytes += size_bytes
        elif self.of[name].holders > 1:  # cannot be added to: the sum is a tensor of its own
            self.of[name].holders -= 1
            self.of[name] = _Storage(size_bytes)
            self.alive_bytes += size_bytes

    def pass_on(self, storage: _Storage, name: str) -> None:
        """``storage`` is the gradient of ``name`` too."""
        if name in self.of:
            self.make(name, storage.size_bytes)
        else:
            storage.holders += 1
            self.of[name] = storage

    def drop(self, name: str) -> None:
        storage = self.of.pop(name)
        storage.holders -= 1
        if not storage.holders:
            self.alive_bytes -= storage.size_bytes


def temporary_bytes(
    graph: Graph,
    nodes: Sequence[Node],
    saved: SavedTensors,
    kind: str,
    *,
    accumulates: bool = True,
    loss_in_place: bool = False,
) -> int:
    """Bytes on one device beyond ``saved``, what autograd keeps of ``nodes``, at the worst moment of forward or backward.

    ``kind``: of the device. ``accumulates``: gradients of weights are made before they are added to what is there.
    ``loss_in_place``: cross-entropy overwrites its logits, forward and backward (costmodels.software).
    """
    forward = _made_bytes(graph, nodes, saved, loss_in_place)
    backward = _Backward(graph, nodes, kind, accumulates, loss_in_place).most_bytes()
    return max(0, forward, backward - saved.own_bytes)


def awaited_bytes(graph: Graph, nodes: Sequence[Node], of_weights: frozenset[str]) -> int:
    """Of the gradients of what ``nodes`` make: those that gradients of weights are made of, and others too.

    ``of_weights``: names of weights and what is made of them alone.
    """
    found = 0
    for node in nodes:
        needed = {name in of_weights for name in node.operands if graph.values[name].differentiable}
        if node.op != "convert" and needed == {True, False}:
            found += sum(value.size_bytes for value in node.outputs if value.differentiable)
    return found


def _made_bytes(graph: Graph, nodes: Sequence[Node], saved: SavedTensors, loss_in_place: bool) -> int:
    """What ``nodes`` make and autograd does not keep."""
    overwritten = {node.operands[0] for node in nodes if loss_in_place and _is_cross_entropy(node)}
    roots = _roots(graph, nodes)
    made = {
        value.name: value.size_bytes
        for node in nodes
        for value in node.outputs
        if value.name not in roots and value.name not in saved.own
    }
    gone = {roots.get(name, name) for name in overwritten}
    return sum(size for name, size in made.items() if name not in gone)


def _roots(graph: Graph, nodes: Sequence[Node]) -> dict[str, str]:
    """Of every view the value whose storage it looks at."""
    roots: dict[str, str] = {}
    for node in nodes:
        if is_view_of_first(node, graph.values):
            first = roots.get(node.operands[0], node.operands[0])
            roots.update((value.name, first) for value in node.outputs)
    return roots


class _Backward:
    def __init__(self, graph: Graph, nodes: Sequence[Node], kind: str, accumulates: bool, loss_in_place: bool) -> None:
        self.values: Mapping[str, Value] = graph.values
        self.leaves = graph.leaf_by_name
        self.nodes = [node for node in nodes if any(value.differentiable for value in node.outputs)]
        self.kind, self.accumulates, self.loss_in_place = kind, accumulates, loss_in_place
        self.gradients = _Gradients()
        inside = {value.name for node in nodes for value in node.outputs}
        own = {node.name for node in nodes}
        roots = _roots(graph, nodes)
        shared = {value.name for node in graph.nodes if node.segment < 0 for value in node.outputs}
        self.kept_bytes = 0
        self.released: dict[int, int] = {}  # place of a node -> bytes that nobody needs when its backward is over
        first: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            if is_view_of_first(node, self.values):
                continue
            for what, which in saved_of(node, self.values, (kind,)):
                if what == "extra":
                    self._keep(which, place)
                    continue
                value = node.outputs[which] if what == "output" else self.values[node.operands[which]]
                name = roots.get(value.name, value.name)
                if name not in self.leaves and name not in shared and name not in first:
                    first[name] = place
                    self._keep(self.values[name].size_bytes, place if name in inside else -1)
        for node in nodes:
            for value in node.outputs:
                leaves = any(reader.name not in own for reader in graph.consumers[value.name])
                if value.differentiable and (leaves or value.name == graph.loss):
                    self.gradients.make(value.name, value.size_bytes)

    def _keep(self, size_bytes: int, place: int) -> None:
        self.kept_bytes += size_bytes
        self.released[place] = self.released.get(place, 0) + size_bytes

    def most_bytes(self) -> int:
        most = self.kept_bytes + self.gradients.alive_bytes
        for place in reversed(range(len(self.nodes))):
            node = self.nodes[place]
            if any(value.name in self.gradients.of for value in node.outputs):
                most = max(most, self._step(node))
            self.kept_bytes -= self.released.get(place, 0)
        return most

    def _step(self, node: Node) -> int:
        """Backward of ``node``; the bytes alive meanwhile."""
        gradients = self.gradients
        incoming = [value for value in node.outputs if value.name in gradients.of]
        passed = self._passes_on(node)
        in_place = self.loss_in_place and _is_cross_entropy(node)
        made = 0
        targets = dict.fromkeys(name for name in node.operands if self.values[name].differentiable)
        for name in targets:
            value = self.values[name]
            if name in self.leaves:
                if self.accumulates:
                    made += value.size_bytes
            elif not (passed and value.numel == incoming[0].numel):
                made += value.size_bytes
        alive = self.kept_bytes + gradients.alive_bytes + (0 if in_place else made + self._scratch_bytes(node))
        for name in targets:
            value = self.values[name]
            if name in self.leaves:
                continue
            if passed and value.numel == incoming[0].numel:
                gradients.pass_on(gradients.of[incoming[0].name], name)
            else:
                gradients.make(name, value.size_bytes)
        for value in incoming:
            gradients.drop(value.name)
        return alive

    def _passes_on(self, node: Node) -> bool:
        """Whether the gradient of what it makes is, as it lies in memory, that of what it is made of."""
        if node.op == "convert":
            source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
            return conversion(source, target)[1] == "none"
        return is_view_of_first(node, self.values) or node.base in _PASSED_ON

    def _scratch_bytes(self, node: Node) -> int:
        if node.op == _OVER_SHARDS:
            logits = self.values[node.operands[0]]
            return 4 * logits.numel if logits.dtype in HALF else 0
        if _is_cross_entropy(node):
            return self.values[node.operands[0]].size_bytes
        if node.base in ATTENTION and self.kind == "gpu":
            return 4 * self.values[node.operands[0]].numel
        return 0


def _is_cross_entropy(node: Node) -> bool:
    return PRICED_AS.get(node.op, node.op) == _CROSS_ENTROPY
