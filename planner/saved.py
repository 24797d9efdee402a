"""What autograd keeps of a segment, and what recomputation keeps and runs again.

    saved_tensors(graph, nodes, kind)      storages that autograd keeps for backward, each once
    run_again(graph, nodes)                the nodes that run again in backward: up to the last that autograd keeps anything of
    select(graph, nodes)                   what selective recomputation keeps

Full recomputation keeps the inputs of a segment. Selective recomputation also keeps the results that take longest to
compute by the byte, so that they need not be computed again:

    product      of an activation and a weight (linear, mm, conv, experts): an element takes as many multiplications as the
                 weight has rows
    attention    where a fused kernel computes it
    reduction    a sum over devices (all-reduce, reduce-scatter): what it costs is communication. A product that is only summed
                 is not kept besides: nobody reads it (``shape``)

Everything else (norms, activations, dropout, rotary embeddings, unfused attention, gathers) runs again. Compare
Korthikanti and others, Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodels.memory import Saved, saved_for_backward_bytes
from costmodels.operators import HALF, Hint, Tensor, argument_hint, is_view
from planner.ir.graph import Graph, Node, Value
from planner.ir.layout import Pair, conversion

# Our operators, under the names the cost model knows.
PRICED_AS: Mapping[str, str] = {
    "attention_with_dropout": "aten.scaled_dot_product_attention.default",
    "batch_norm": "aten.batch_norm.default",
    "batch_norm_over": "aten.batch_norm.default",
    "cross_entropy_sum": "aten.cross_entropy_loss.default",
    "vocab_cross_entropy": "aten.cross_entropy_loss.default",
    "vocab_embedding": "aten.embedding.default",
    "dropout": "aten.dropout.default",
}
PRODUCTS = frozenset({
    "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "grouped_mm",
})  # fmt: skip
ATTENTION = frozenset({"scaled_dot_product_attention", "attention_with_dropout"})
PRODUCT, FUSED, REDUCTION, SHAPE = "product", "attention", "reduction", "shape"


def tensor(value: Value) -> Tensor:
    return value.shape, value.dtype


def as_priced(node: Node, values: Mapping[str, Value]) -> tuple[str, tuple[Tensor, ...], tuple[Tensor, ...], Hint]:
    """A node as the cost model knows it: operator, inputs, outputs, further arguments."""
    op = PRICED_AS.get(node.op, node.op)
    inputs = tuple(tensor(values[name]) for name in node.operands)
    return op, inputs, tuple(map(tensor, node.outputs)), argument_hint(op, node.args, node.kwargs)


def is_view_of_first(node: Node, values: Mapping[str, Value]) -> bool:
    return node.op != "convert" and bool(node.operands) and is_view(*as_priced(node, values))


def saved_of(node: Node, values: Mapping[str, Value], kinds: Sequence[str]) -> Saved:
    """What autograd keeps of one call on a device of one of ``kinds`` (costmodels.memory)."""
    if node.op == "convert" or not node.output.differentiable:
        return ()
    op, inputs, outputs, hint = as_priced(node, values)
    needs = tuple(values[name].differentiable for name in node.operands)
    if node.op == "vocab_cross_entropy" and inputs[0][1] in HALF:  # it computes in float32
        inputs = ((inputs[0][0], "float32"), *inputs[1:])
    found = (saved_for_backward_bytes(op, inputs, outputs, needs, hint, kind) for kind in kinds)
    return tuple(dict.fromkeys(item for saved in found for item in saved))


@dataclass(frozen=True)
class SavedTensors:
    """``own``: storage -> bytes, of the segment and what it reads; ``extra``: bytes that are of no tensor of a call;
    ``shared``: bytes of tensors made for all segments (masks). Parameters are held anyway and not among them."""

    own: Mapping[str, int]
    extra: int
    shared: int

    @property
    def own_bytes(self) -> int:
        return sum(self.own.values()) + self.extra


def saved_tensors(graph: Graph, nodes: Sequence[Node], kind: str) -> SavedTensors:
    """What autograd keeps of one micro-batch of ``nodes``. Each storage once, under the name of the first value in it."""
    values, leaves = graph.values, graph.leaf_by_name
    root: dict[str, str] = {}
    kept: dict[str, int] = {}
    extra = 0
    for node in nodes:
        if is_view_of_first(node, values):
            first = root.get(node.operands[0], node.operands[0])
            root.update((value.name, first) for value in node.outputs)
            continue
        for what, which in saved_of(node, values, (kind,)):
            if what == "extra":
                extra += which
                continue
            value = values[node.operands[which]] if what == "input" else node.outputs[which]
            name = root.get(value.name, value.name)
            if name not in leaves:
                kept[name] = values[name].size_bytes
    shared = {value.name for node in graph.nodes if node.segment < 0 for value in node.outputs}
    own = {name: size for name, size in kept.items() if name not in shared}
    return SavedTensors(own, extra, sum(size for name, size in kept.items() if name in shared))


def run_again(graph: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Those of a segment's ``nodes`` that run again when it is recomputed.

    torch.utils.checkpoint stops as soon as it has what autograd keeps; an operator of torch's that keeps only its inputs
    gives them before it computes, so the last one does not run.
    """
    last, runs = -1, False
    for i, node in enumerate(nodes):
        saved = saved_of(node, graph.values, ("gpu", "cpu"))
        if saved:
            last, runs = i, not node.op.startswith("aten.") or any(what != "input" for what, _ in saved)
    return tuple(nodes[: last + runs])


def select(graph: Graph, nodes: Sequence[Node]) -> dict[str, str]:
    """Of what runs again of a segment's ``nodes``, the names of those that need not: how each is kept."""
    again = run_again(graph, nodes)
    weights = _made_of_weights(graph, again)
    found: dict[str, str] = {}
    for node in again:
        if not node.output.differentiable:
            continue
        if node.op == "convert":
            source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
            if conversion(source, target)[0] in ("all_reduce", "reduce_scatter"):
                found[node.name] = REDUCTION
        elif node.base in ATTENTION:
            found[node.name] = FUSED
        elif node.base in PRODUCTS and len({name in weights for name in node.operands}) == 2:
            found[node.name] = PRODUCT
    leaving = {graph.loss, *(value for _, value in graph.writes)}
    inside = {node.name for node in nodes}
    for node in again:
        if found.get(node.name) == PRODUCT and _only_summed(graph, node, found, leaving, inside):
            found[node.name] = SHAPE
    return found


def _only_summed(graph: Graph, node: Node, found: Mapping[str, str], leaving: set[str], inside: set[str]) -> bool:
    """Whether all that reads the result of ``node``, or views of it, are sums that are kept."""
    for value in node.outputs:
        readers = graph.consumers[value.name]
        if not readers or value.name in leaving:
            return False
        for reader in readers:
            if reader.name not in inside:
                return False
            view = is_view_of_first(reader, graph.values) and reader.operands[0] == value.name
            summed = found.get(reader.name) == REDUCTION
            if not summed and not (view and _only_summed(graph, reader, found, leaving, inside)):
                return False
    return True


def _made_of_weights(graph: Graph, nodes: Sequence[Node]) -> frozenset[str]:
    """Parameters and buffers, and what ``nodes`` make of them alone."""
    found = {leaf.name for leaf in graph.leaves if leaf.kind != "input"}
    for node in nodes:
        if node.operands and all(name in found for name in node.operands):
            found.update(value.name for value in node.outputs)
    return frozenset(found)
