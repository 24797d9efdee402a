"""Graph passes that give every operator a form the rules can split.

    one_spelling       operators that torch knows under several names, under one (planner.spellings)
    without_empty      cat(x, y) -> y where x holds no element, as a cache of keys and values does before its first use
    split_means        a token mean (cross-entropy) -> sum over tokens / global count: averaging averages is wrong
    select_columns     x[arange(b), columns] -> columns selected in each row, which any share of the rows can do alone
    count_from_front   x[-4:] -> x[4:8]: a share of x has another end
    added_constants    loss + 1 -> loss + a tensor: a partial sum takes it on one device only
    plain_copies       copy(x, y), left by y written into a part of x -> y in the shape and dtype of x; x.expand_as(y) and
                       x.type_as(y) likewise, x.new_zeros(size) -> full: a tensor that only lends its shape or dtype is
                       not read
    open_bags          embedding_bag of rows of equal length -> embedding, summed or averaged (planner.lookups)
    plain_batch_norm   forms of BatchNorm that write no statistics -> aten.batch_norm with its one result
    share_equal        a gradient-free tensor made twice in the same way -> once

Each gives the same numbers as before.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Argument, Graph, Node, Ref, Symbol, Value, map_refs
from planner.lookups import open_bags
from planner.spellings import one_spelling

MEAN, SUM = 1, 2


def normalise(graph: Graph) -> Graph:
    for step in (
        one_spelling,
        without_empty,
        split_means,
        select_columns,
        count_from_front,
        added_constants,
        plain_copies,
        open_bags,
        plain_batch_norm,
        share_equal,
    ):
        graph = step(graph)
    return without_idle_gradients(prune(graph))


def without_idle_gradients(graph: Graph) -> Graph:
    """Values from which no path of derivatives leads to the loss have no gradient; such parameters are not trained.

    Autograd leaves the gradient of a teacher run under ``no_grad`` None. A plan that made it zero would change the
    parameter all the same: weight decay acts on what has a gradient.
    """
    reached = {graph.loss} if graph.values[graph.loss].differentiable else set[str]()
    for node in reversed(graph.nodes):
        if any(value.name in reached for value in node.outputs):
            reached.update(name for name in node.operands if graph.values[name].differentiable)

    def marked(value: Value) -> Value:
        return value if value.name in reached or not value.differentiable else replace(value, differentiable=False)

    leaves = tuple(
        replace(leaf, value=marked(leaf.value), trainable=leaf.trainable and leaf.name in reached)
        for leaf in graph.leaves
    )
    nodes = tuple(replace(node, outputs=tuple(map(marked, node.outputs))) for node in graph.nodes)
    return replace(graph, leaves=leaves, nodes=nodes)


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


def without_empty(graph: Graph) -> Graph:
    """Parts without elements leave ``cat``; one part alone needs no ``cat`` (unless it were cast by it)."""
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        args, kwargs = (map_refs(x, lambda name: Ref(renamed.get(name, name))) for x in (node.args, node.kwargs))
        node = replace(node, args=args, kwargs=kwargs)
        if node.op == "aten.cat.default" and node.output.numel:
            parts = tuple(part for part in node.args[0] if graph.values[part.name].numel)
            if all(graph.values[part.name].dtype == node.output.dtype for part in parts):
                node = replace(node, args=(parts, *node.args[1:]))
                if len(parts) == 1:
                    renamed[node.name] = parts[0].name
                    continue
        nodes.append(node)
    writes = tuple((buffer, renamed.get(value, value)) for buffer, value in graph.writes)
    return replace(graph, nodes=tuple(nodes), loss=renamed.get(graph.loss, graph.loss), writes=writes)


def split_means(graph: Graph) -> Graph:
    """``cross_entropy_loss`` with mean or sum reduction becomes ``cross_entropy_sum`` (and ``/ cross_entropy_count``).

    The mean of ``nll_loss_nd`` becomes its sum ``/ cross_entropy_count``.

    Mean over tokens t that are not ignored, with class weights w: sum_t w[y_t] l_t / sum_t w[y_t]; label smoothing has
    the same divisor (torch.nn.functional.cross_entropy).
    """
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        is_mean_like = node.op in ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
        nodes.extend(_cross_entropy(node, graph, taken) if is_mean_like else (node,))
    return replace(graph, nodes=tuple(nodes))


def _cross_entropy(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    names = ("logits", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Argument] = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    is_nll = node.op.startswith("aten.nll")
    if given["reduction"] not in (MEAN, SUM) or (is_nll and given["reduction"] == SUM):
        return (node,)
    logits = graph.values[given["logits"].name]
    arguments = (given["logits"], given["target"], given["weight"], given["ignore_index"], given["label_smoothing"])
    if given["reduction"] == SUM:
        return (replace(node, op="cross_entropy_sum", args=arguments, kwargs=()),)
    total, count = (_fresh(node.name + suffix, taken) for suffix in ("_sum", "_count"))
    out = node.output
    op = "cross_entropy_sum"
    if is_nll:
        op, arguments = node.op, (*arguments[:3], SUM, given["ignore_index"])
    summed = Node(op, arguments, (replace(out, name=total),), (), node.module)
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
    """``index(x [b, s, ..], (rows, columns))`` where rows are arange(b) along dim 0.

    Columns that are the same in every row (attention masks are built this way) become an ``index_select``, columns of
    each row (the last token of a text) a ``gather``. As an index it would need all of x to make any row of the result.
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
    full_rows = rows.shape == (source.shape[0],) + (1,) * (len(columns.shape) - 1)
    if not full_rows or not _is_range(rows.name, source.shape[0], graph):
        return ()
    if columns.shape[0] == source.shape[0]:
        return _gathered(node, graph, taken)
    if columns.shape[0] != 1:
        return ()
    flat, picked = (_fresh(node.name + suffix, taken) for suffix in ("_columns", "_picked"))
    count = columns.numel
    line = replace(columns, name=flat, shape=(count,))
    return (
        Node("aten.view.default", (Ref(columns.name), (count,)), (line,), (), node.module),
        Node(
            "aten.index_select.default",
            (Ref(source.name), 1, Ref(flat)),
            (replace(node.output, name=picked, shape=(source.shape[0], count, *source.shape[2:])),),
            (),
            node.module,
        ),
        Node("aten.view.default", (Ref(picked), shape), (node.output,), (), node.module),
    )


def _gathered(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    """Row i of the result is x[i, columns[i]]; a column below zero counts from the end."""
    source, _, columns = (graph.values[name] for name in node.operands)
    batch, length, *rest = source.shape
    count = columns.numel // max(batch, 1)
    made: list[Node] = []

    def emit(op: str, arguments: tuple[Argument, ...], like: Value, shape: tuple[int, ...], dtype: str) -> Ref:
        name = _fresh(f"{node.name}_{op.split('.')[1]}", taken)
        value = Value(name, shape, dtype, like.differentiable)
        made.append(Node(op, arguments, (value,), (), node.module))
        return Ref(name)

    ids = Ref(columns.name)
    negative = emit("aten.lt.Scalar", (ids, 0), columns, columns.shape, "bool")
    counted = emit("aten.add.Tensor", (ids, length), columns, columns.shape, columns.dtype)
    place = emit("aten.where.self", (negative, counted, ids), columns, columns.shape, columns.dtype)
    thin = (batch, count, *(1 for _ in rest))
    seen = emit("aten.view.default", (place, thin), columns, thin, columns.dtype)
    full = (batch, count, *rest)
    wide = emit("aten.expand.default", (seen, full), columns, full, columns.dtype)
    picked = emit("aten.gather.default", (Ref(source.name), 1, wide), source, full, source.dtype)
    return (*made, Node("aten.view.default", (picked, node.output.shape), node.outputs, (), node.module))


def _is_range(name: str, count: int, graph: Graph) -> bool:
    """Whether a tensor is arange(count), seen with further dims of size one."""
    while name in graph.producers:
        node = graph.producers[name]
        if node.op.startswith("aten.arange."):
            return node.args in ((count,), (0, count), (0, count, 1))
        if node.op not in ("aten.unsqueeze.default", "aten.view.default"):
            return False
        name = node.operands[0]
    return False


def count_from_front(graph: Graph) -> Graph:
    """``slice(x, dim, start, end, step)`` with 0 <= start <= end <= size written out."""
    return replace(graph, nodes=tuple(_front_slice(node, graph) for node in graph.nodes))


def _front_slice(node: Node, graph: Graph) -> Node:
    if node.op != "aten.slice.Tensor":
        return node
    source, dim, start, end, *step = node.args + (0, None, None)[len(node.args) - 1 :]
    size = graph.values[source.name].shape[int(dim)]
    first, last, _ = slice(start, end).indices(size)
    return replace(node, args=(source, dim, first, max(first, last), *step))


def added_constants(graph: Graph) -> Graph:
    """``x + 1``, ``x - 1`` and ``1 - x`` of a tensor of shape [] with a gradient: the number becomes a tensor."""
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        nodes.extend(_with_constant(node, graph, taken) or (node,))
    return replace(graph, nodes=tuple(nodes))


def _with_constant(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    forward = ("aten.add.Tensor", "aten.sub.Tensor")
    if node.op not in (*forward, "aten.rsub.Scalar") or node.output.shape or not node.output.differentiable:
        return ()
    if node.kwargs or len(node.args) != 2 or not isinstance(node.args[1], int | float) or not node.args[1]:
        return ()
    dtype = node.output.dtype
    number = Value(_fresh(f"{node.name}_constant", taken), (), dtype)
    made = _filled(number, (), node.args[1], node.module)
    tensor, constant = node.args[0], Ref(number.name)
    if node.op in forward:
        return made, replace(node, args=(tensor, constant))
    return made, replace(node, op="aten.sub.Tensor", args=(constant, tensor))


def plain_copies(graph: Graph) -> Graph:
    """``copy(x, y)`` reads nothing of x but its shape and dtype, and has no derivative in torch.

    ``expand_as(x, y)`` reads of y only the shape, ``type_as(x, y)`` and ``new_full(y, size, value)`` only the dtype;
    ``fill(x, value)`` of x both.
    """
    nodes: list[Node] = []
    taken = set(graph.values)
    for node in graph.nodes:
        if node.op in LENDING:
            nodes.extend(_copied(node, graph, taken))
        elif node.op == "aten.fill.Scalar":
            nodes.append(_filled(node.output, node.output.shape, node.args[1], node.module))
        elif node.op in FILLING:
            nodes.append(_filled(node.output, node.args[1], (*node.args, FILLING[node.op])[2], node.module))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


FILLING = {"aten.new_zeros.default": 0, "aten.new_ones.default": 1, "aten.new_full.default": 0}


def _filled(value: Value, size: Argument, number: Argument, module: str) -> Node:
    options = (("dtype", Symbol(f"torch.{value.dtype}")), ("device", Symbol("device")))
    return Node("aten.full.default", (size, number), (replace(value, differentiable=False),), options, module)


# Which operand is copied; the other lends its shape or dtype.
LENDING = {"aten.copy.default": 1, "aten.expand_as.default": 0, "aten.type_as.default": 0, "aten.fill.Tensor": 1}


def _copied(node: Node, graph: Graph, taken: set[str]) -> tuple[Node, ...]:
    source = graph.values[node.operands[LENDING[node.op]]]
    full = Node("aten.expand.default", (Ref(source.name), node.output.shape), node.outputs, (), node.module)
    if source.dtype == node.output.dtype:
        return (full,)
    cast = replace(source, name=_fresh(node.name + "_cast", taken), dtype=node.output.dtype)
    dtype = (("dtype", Symbol(f"torch.{cast.dtype}")),)
    to = Node("aten._to_copy.default", (Ref(source.name),), (cast,), dtype, node.module)
    if source.shape == node.output.shape:
        return (replace(to, outputs=node.outputs),)
    return to, replace(full, args=(Ref(cast.name), node.output.shape))


def plain_batch_norm(graph: Graph) -> Graph:
    """Statistics that nobody reads are no results."""
    return replace(graph, nodes=tuple(_plain_batch_norm(node, graph) for node in graph.nodes))


def _plain_batch_norm(node: Node, graph: Graph) -> Node:
    written = {value for _, value in graph.writes}
    if any(graph.consumers[value.name] or value.name in written for value in node.outputs[1:]):
        return node
    if node.op == "aten._native_batch_norm_legit_no_training.default":
        x, weight, bias, mean, var, momentum, eps = node.args
        arguments = (x, weight, bias, mean, var, False, momentum, eps, False)
    elif node.op == "aten._native_batch_norm_legit.no_stats":
        x, weight, bias, training, momentum, eps = node.args
        arguments = (x, weight, bias, None, None, training, momentum, eps, False)
    else:
        return node
    return replace(node, op="aten.batch_norm.default", args=arguments, outputs=node.outputs[:1])


def share_equal(graph: Graph) -> Graph:
    """Layers make the same masks and rotary tables again and again; equal layers then read equal tensors."""
    first: dict[object, Node] = {}
    same: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = replace(
            node,
            args=map_refs(node.args, lambda name: Ref(same.get(name, name))),
            kwargs=map_refs(node.kwargs, lambda name: Ref(same.get(name, name))),
        )
        if node.output.differentiable or node.is_random:
            nodes.append(node)
            continue
        known = first.setdefault((node.op, repr(node.args), repr(node.kwargs)), node)
        if known is node:
            nodes.append(node)
        same.update((v.name, k.name) for v, k in zip(node.outputs, known.outputs, strict=True))
    writes = tuple((buffer, same.get(value, value)) for buffer, value in graph.writes)
    return replace(graph, nodes=tuple(nodes), loss=same.get(graph.loss, graph.loss), writes=writes)
