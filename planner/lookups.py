"""Bags of embeddings as the lookups and sums they are.

``embedding_bag(table [v, h], ids [n s], offsets)`` gives the sum or mean of each bag. Where all bags are of one length s,
as of a model that is given ids [n, s], it is ``embedding(table, ids [n, s])`` reduced over s: rows, vocabulary and hidden
dim can then be cut as those of any embedding.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Graph, Node, Ref, Value

SUM, MEAN = 0, 1


def open_bags(graph: Graph) -> Graph:
    """``graph`` with every bag of rows of equal length written out."""
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        nodes.extend(_opened(node, graph, taken) or (node,))
    return replace(graph, nodes=tuple(nodes))


def _opened(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    if node.base != "embedding_bag" or any(graph.consumers[value.name] for value in node.outputs[1:]):
        return ()
    given = (*node.args, *(None,) * (9 - len(node.args)))
    scaled, mode, sparse, weights, last, padding = given[3:9]
    table, ids = (graph.values[given[place].name] for place in (0, 1))
    rows = node.output.shape[0]
    if (
        scaled
        or sparse
        or last
        or (padding is not None and padding >= 0)
        or mode not in (SUM, MEAN)
        or len(ids.shape) != 1
        or node.kwargs
    ):
        return ()
    length, rest = divmod(ids.numel, max(rows, 1))
    if rest or not length or not _is_regular(given[2].name, rows, length, graph):
        return ()
    made: list[Node] = []

    def emit(op: str, arguments: tuple[object, ...], like: Value, shape: tuple[int, ...]) -> Ref:
        name, n = f"{node.name}_{op.split('.')[1]}", 1
        while name in taken:
            name, n = f"{node.name}_{op.split('.')[1]}_{n}", n + 1
        taken.add(name)
        made.append(Node(op, arguments, (replace(like, name=name, shape=shape),), (), node.module))
        return Ref(name)

    out, shape = node.output, (rows, length)
    found = emit(
        "aten.embedding.default",
        (Ref(table.name), emit("aten.view.default", (Ref(ids.name), shape), ids, shape)),
        out,
        (*shape, table.shape[1]),
    )
    if weights is not None:
        scale = graph.values[weights.name]
        thin = emit("aten.view.default", (Ref(scale.name), (*shape, 1)), scale, (*shape, 1))
        found = emit("aten.mul.Tensor", (found, thin), out, (*shape, table.shape[1]))
    op = "aten.sum.dim_IntList" if mode == SUM else "aten.mean.dim"
    return (*made, Node(op, (found, (1,)), (out,), (), node.module))


def _is_regular(name: str, rows: int, length: int, graph: Graph) -> bool:
    """Whether a tensor is 0, length, 2 length, ... of ``rows`` entries."""
    node = graph.producers.get(name)
    if node is None or not node.op.startswith("aten.arange."):
        return False
    numbers = [argument for argument in node.args if isinstance(argument, int)]
    first, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    return len(numbers) == len(node.args) and range(first, end, step) == range(0, rows * length, length)
