"""Graph passes that give every operator a form the rules can split.

    split_means        a token mean (cross-entropy) -> sum over tokens / global count: averaging averages is wrong
    select_columns     x[arange(b), columns] -> a selection of columns, which any share of the rows can do alone
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Argument, Graph, Node, Ref, Symbol, Value

MEAN, SUM = 1, 2


def normalise(graph: Graph) -> Graph:
    return prune(select_columns(split_means(graph)))


def prune(graph: Graph) -> Graph:
    """Without the nodes and leaves that neither the loss nor a buffer write needs."""
    needed = {graph.loss, *(value for _, value in graph.writes), *(buffer for buffer, _ in graph.writes)}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(value.name in needed for value in node.outputs):
            needed.update(node.operands)
            kept.append(node)
    leaves = tuple(leaf for leaf in graph.leaves if leaf.name in needed)
    return replace(graph, leaves=leaves, nodes=tuple(reversed(kept)))


def split_means(graph: Graph) -> Graph:
    """``cross_entropy_loss`` with mean or sum reduction becomes ``cross_entropy_sum`` (and ``/ cross_entropy_count``).

    Mean over tokens t that are not ignored, with class weights w: sum_t w[y_t] l_t / sum_t w[y_t]; label smoothing has the
    same divisor (torch.nn.functional.cross_entropy).
    """
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        nodes.extend(_cross_entropy(node, graph, taken) if node.op == "aten.cross_entropy_loss.default" else (node,))
    return replace(graph, nodes=tuple(nodes))


def _cross_entropy(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    names = ("logits", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Argument] = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given["reduction"] not in (MEAN, SUM):
        return (node,)
    logits = graph.values[given["logits"].name]
    arguments = (given["logits"], given["target"], given["weight"], given["ignore_index"], given["label_smoothing"])
    if given["reduction"] == SUM:
        return (replace(node, op="cross_entropy_sum", args=arguments, kwargs=()),)
    total, count = (_fresh(node.name + suffix, taken) for suffix in ("_sum", "_count"))
    out = node.output
    summed = Node("cross_entropy_sum", arguments, (replace(out, name=total),), (), node.module)
    classes = logits.shape[1] if len(logits.shape) > 1 else logits.shape[0]
    counted = Node(
        "cross_entropy_count",
        (given["target"], classes, given["weight"], given["ignore_index"], Symbol(f"torch.{logits.dtype}")),
        (Value(count, (), logits.dtype),),
        (),
        node.module,
    )
    quotient = Node("aten.div.Tensor", (Ref(total), Ref(count)), (out,), (), node.module)
    return summed, counted, quotient


def _fresh(name: str, taken: set[str]) -> str:
    candidate, n = name, 1
    while candidate in taken:
        candidate, n = f"{name}_{n}", n + 1
    taken.add(candidate)
    return candidate


def select_columns(graph: Graph) -> Graph:
    """``index(x [b, s, ..], (rows, columns))`` where rows are arange(b) along dim 0 and columns do not depend on it.

    Attention masks are built this way; as an index it would need all of x to make any row of the result.
    """
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        nodes.extend(_selected(node, graph, taken) or (node,))
    return replace(graph, nodes=tuple(nodes))


def _selected(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    if node.op != "aten.index.Tensor" or len(node.operands) != 3:
        return ()
    source, rows, columns = (graph.values[name] for name in node.operands)
    shape = node.output.shape
    full_rows = rows.shape == (source.shape[0],) + (1,) * (len(rows.shape) - 1) and len(rows.shape) == len(columns.shape)
    if not full_rows or columns.shape[:1] != (1,) or not _is_range(rows.name, source.shape[0], graph):
        return ()
    flat, picked = (_fresh(node.name + suffix, taken) for suffix in ("_columns", "_picked"))
    count = columns.numel
    return (
        Node("aten.view.default", (Ref(columns.name), (count,)), (replace(columns, name=flat, shape=(count,)),), (), node.module),
        Node(
            "aten.index_select.default",
            (Ref(source.name), 1, Ref(flat)),
            (replace(node.output, name=picked, shape=(source.shape[0], count, *source.shape[2:])),),
            (),
            node.module,
        ),
        Node("aten.view.default", (Ref(picked), shape), (node.output,), (), node.module),
    )


def _is_range(name: str, count: int, graph: Graph) -> bool:
    """Whether a tensor is arange(count), seen with further dims of size one."""
    while name in graph.producers:
        node = graph.producers[name]
        if node.op == "aten.arange.default":
            return node.args == (count,)
        if node.op not in ("aten.unsqueeze.default", "aten.view.default"):
            return False
        name = node.operands[0]
    return False
