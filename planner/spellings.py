"""Operators that torch knows under several names, under the one that has a rule.

A traced graph holds what the model called: ``x.mT``, ``x.swapaxes(0, 1)`` and ``x.movedim(0, 1)`` are permutations,
``x.ravel()`` and ``x.view_as(y)`` are views. With the shapes at hand each is written in its general form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from planner.ir.graph import Argument, Graph, Node, Ref


def one_spelling(graph: Graph) -> Graph:
    """``graph`` with every operator under one name. The numbers it computes are the same."""
    return replace(graph, nodes=tuple(_spelled(node, graph) for node in graph.nodes))


def _spelled(node: Node, graph: Graph) -> Node:
    change = SPELLINGS.get(node.base)
    return node if change is None else change(node, graph)


def _first(node: Node) -> Argument:
    return node.args[0]


def _rank(node: Node, graph: Graph) -> int:
    return len(graph.values[node.operands[0]].shape)


def _as_view(node: Node, graph: Graph) -> Node:
    """Everything that keeps elements and their order."""
    if len(node.outputs) != 1 or not isinstance(_first(node), Ref):
        return node
    return replace(node, op="aten.view.default", args=(_first(node), node.output.shape), kwargs=())


def _as_expand(node: Node, graph: Graph) -> Node:
    return replace(node, op="aten.expand.default", args=(_first(node), node.output.shape), kwargs=())


def _permuted(node: Node, order: list[int]) -> Node:
    return replace(node, op="aten.permute.default", args=(_first(node), tuple(order)), kwargs=())


def _swap(node: Node, graph: Graph) -> Node:
    rank = _rank(node, graph)
    order = list(range(rank))
    a, b = (int(d) % rank for d in node.args[1:3])
    order[a], order[b] = b, a
    return _permuted(node, order)


def _reverse(node: Node, graph: Graph) -> Node:
    return _permuted(node, list(range(_rank(node, graph)))[::-1])


def _transpose_matrix(node: Node, graph: Graph) -> Node:
    """mT, and the adjoint of what is not complex."""
    if node.output.dtype.startswith("complex") and not node.op.startswith("aten.mT"):
        return node
    *lead, a, b = range(_rank(node, graph))
    return _permuted(node, [*lead, b, a])


def _move(node: Node, graph: Graph) -> Node:
    """movedim(x, source, destination): the moved dims at their destinations, the others in order around them."""
    rank = _rank(node, graph)
    source, target = (
        [int(d) % rank for d in (dims if isinstance(dims, tuple) else (dims,))] for dims in node.args[1:3]
    )
    placed = dict(zip(target, source, strict=True))
    rest = iter(d for d in range(rank) if d not in source)
    return _permuted(node, [placed[d] if d in placed else next(rest) for d in range(rank)])


def _narrow(node: Node, graph: Graph) -> Node:
    tensor, dim, start, length = node.args
    size = graph.values[tensor.name].shape[int(dim)]
    if not isinstance(start, int):
        return node
    first = start % size if size else 0
    return replace(node, op="aten.slice.Tensor", args=(tensor, dim, first, first + int(length)), kwargs=())


def _split_at(dim_of: Callable[[Node, int], int]) -> Callable[[Node, Graph], Node]:
    def change(node: Node, graph: Graph) -> Node:
        dim = dim_of(node, _rank(node, graph))
        sizes = tuple(value.shape[dim] for value in node.outputs)
        if sum(sizes) != graph.values[node.operands[0]].shape[dim]:
            return node
        return replace(node, op="aten.split_with_sizes.default", args=(_first(node), sizes, dim), kwargs=())

    return change


def _dim_at(place: int) -> Callable[[Node, int], int]:
    def dim(node: Node, rank: int) -> int:
        chosen: Argument = dict(node.kwargs).get("dim", node.args[place] if len(node.args) > place else 0)
        return int(chosen) % rank

    return dim


def _cat_at(dim_of: Callable[[Node, int], int]) -> Callable[[Node, Graph], Node]:
    def change(node: Node, graph: Graph) -> Node:
        ranks = {len(graph.values[name].shape) for name in node.operands}
        rank = len(node.output.shape)
        dim = dim_of(node, rank)
        if ranks != {rank} or dim >= rank:
            return node
        return replace(node, op="aten.cat.default", args=(_first(node), dim), kwargs=())

    return change


def _take_along(node: Node, graph: Graph) -> Node:
    """take_along_dim(x, index, dim) is a gather where no dim broadcasts."""
    dim = dict(node.kwargs).get("dim", node.args[2] if len(node.args) > 2 else None)
    x, index = (graph.values[name].shape for name in node.operands)
    if dim is None or len(x) != len(index):
        return node
    along = int(dim) % len(x)
    if any(a != b for d, (a, b) in enumerate(zip(x, index, strict=True)) if d != along):
        return node
    return replace(node, op="aten.gather.default", args=(_first(node), along, node.args[1]), kwargs=())


def _grouped_mm(node: Node, graph: Graph) -> Node:
    """torch._grouped_mm and its stand-in in transformers: rows sorted by group, each times the matrix of its group."""
    shapes = [graph.values[name].shape for name in node.operands]
    plain = len(node.args) == 3 or not any(node.args[3:])
    if [len(shape) for shape in shapes] != [2, 3, 1] or not plain or any(dict(node.kwargs).values()):
        return node
    return replace(node, op="grouped_mm", args=tuple(map(Ref, node.operands)), kwargs=())


def _empty(node: Node, graph: Graph) -> Node:
    """What nobody reads before it is written may as well be zero, and then equal everywhere."""
    return replace(node, op="aten.zeros_like.default", args=node.args[:1], kwargs=())


SPELLINGS: Mapping[str, Callable[[Node, Graph], Node]] = {
    **dict.fromkeys(("ravel", "view_as", "reshape_as", "atleast_1d", "atleast_2d", "atleast_3d"), _as_view),
    "broadcast_to": _as_expand,
    **dict.fromkeys(("swapaxes", "swapdims"), _swap),
    "numpy_T": _reverse,
    **dict.fromkeys(("mT", "mH", "matrix_H", "adjoint"), _transpose_matrix),
    **dict.fromkeys(("movedim", "moveaxis"), _move),
    "narrow": _narrow,
    **dict.fromkeys(("chunk", "tensor_split", "unsafe_chunk", "unsafe_split"), _split_at(_dim_at(2))),
    "hsplit": _split_at(lambda node, rank: min(1, rank - 1)),
    "vsplit": _split_at(lambda node, rank: 0),
    "dsplit": _split_at(lambda node, rank: 2),
    **dict.fromkeys(("concat", "concatenate"), _cat_at(_dim_at(1))),
    "vstack": _cat_at(lambda node, rank: 0),
    "hstack": _cat_at(lambda node, rank: min(1, rank - 1)),
    "dstack": _cat_at(lambda node, rank: 2),
    "column_stack": _cat_at(lambda node, rank: 1),
    "take_along_dim": _take_along,
    **dict.fromkeys(("_grouped_mm", "transformers.grouped_mm_fallback"), _grouped_mm),
    "empty_like": _empty,
}
