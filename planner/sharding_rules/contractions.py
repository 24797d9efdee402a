"""Matrix products, convolutions, embeddings, attention: the operators that hold the weights and the work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.ir.graph import Node, Value
from planner.sharding_rules.elementwise import broadcast_dims
from planner.sharding_rules.rule import Dim, Dims, Rule, Special, option, parse_rule


def _tensors(node: Node, values: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(values[name] for name in node.operands)


def linear(node: Node, values: Mapping[str, Value]) -> Rule:
    tensors = _tensors(node, values)
    if len(tensors) == 3:
        return parse_rule("b.. i, o i, o -> b.. o", tensors, node.outputs, additive=(2,), linear=((0, 2), (1, 2)))
    return parse_rule("b.. i, o i -> b.. o", tensors, node.outputs, linear=((0,), (1,)))


def addmm(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """addmm(b, x, y) and baddbmm: a product, and a summand that broadcasts; factors of either change nothing."""
    tensors = _tensors(node, values)
    batch = "b " if len(node.output.shape) == 3 else ""
    product = parse_rule(f"{batch}n i, {batch}i o -> {batch}n o", tensors[1:], node.outputs)
    result = product.outputs[0]
    summand = broadcast_dims(tensors[0].shape, node.output.shape)
    if summand is None:
        return None
    place = {f"d{n}": dim for n, dim in zip(range(len(result), 0, -1), result, strict=True)}
    added: Dims = tuple(place[dim[0]] if dim else () for dim in summand)
    linear = (frozenset({0, 1}), frozenset({0, 2}))
    return Rule((added, *product.operands), product.outputs, product.sizes, additive=frozenset({0}), linear=linear)


def mm(node: Node, values: Mapping[str, Value]) -> Rule:
    return parse_rule("n i, i o -> n o", _tensors(node, values), node.outputs, linear=((0,), (1,)))


def bmm(node: Node, values: Mapping[str, Value]) -> Rule:
    return parse_rule("b n i, b i o -> b n o", _tensors(node, values), node.outputs, linear=((0,), (1,)))


def vectors(node: Node, values: Mapping[str, Value]) -> Rule:
    """mv, dot and outer."""
    notation = {"mv": "n i, i -> n", "dot": "i, i ->", "vdot": "i, i ->", "outer": "n, o -> n o"}[node.base]
    return parse_rule(notation, _tensors(node, values), node.outputs, linear=((0,), (1,)))


def matmul(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """``b.. n i, b.. i o -> b.. n o`` with leading dims that broadcast; a vector has no n or o."""
    left, right = _tensors(node, values)
    rows, columns = len(left.shape) > 1, len(right.shape) > 1
    out = node.output.shape
    lead = out[: len(out) - rows - columns]
    inner: tuple[Dim, Dim] = (("n",), ("o",))
    leading = [broadcast_dims(shape, lead) for shape in (left.shape[:-2], right.shape[:-2])]
    if leading[0] is None or leading[1] is None:
        return None
    a, b = (tuple(tuple(f"b{x[1:]}" for x in dim) for dim in dims) for dims in leading if dims is not None)
    sizes = {f"b{n}": size for n, size in zip(range(len(lead), 0, -1), lead, strict=True)} | {"i": left.shape[-1]}
    sizes |= ({"n": left.shape[-2]} if rows else {}) | ({"o": right.shape[-1]} if columns else {})
    operands = ((*a, *inner[:rows], ("i",)), (*b, ("i",), *inner[1 : 1 + columns]))
    result = (*((f"b{n}",) for n in range(len(lead), 0, -1)), *inner[:rows], *inner[1 : 1 + columns])
    return Rule(operands, (result,), sizes, linear=(frozenset({0}), frozenset({1})))


def einsum(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """einsum(equation, tensors): the equation is the rule. Repeated letters (diagonals) have none.

    The dims of an ellipsis are letters counted from the right; dims of size one that are stretched have none.
    """
    equation = str(node.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        found = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(found)
    if any(len(set(term.replace("...", ""))) != len(term.replace("...", "")) for term in (*terms, right)):
        return None
    tensors = _tensors(node, values)
    sizes: dict[str, int] = {}
    shapes = [(term, value.shape) for term, value in zip(terms, tensors, strict=True)]
    listed = [_spelled_out(term, len(shape)) for term, shape in shapes]
    for letters, (_, shape) in zip(listed, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    operands = tuple(
        tuple((letter,) if size == sizes[letter] else () for letter, size in zip(letters, shape, strict=True))
        for letters, (_, shape) in zip(listed, shapes, strict=True)
    )
    result = _spelled_out(right, len(node.output.shape))
    linear = tuple(frozenset({n}) for n in range(len(terms)))
    return Rule(operands, (tuple((letter,) for letter in result),), sizes, linear=linear)


def _spelled_out(term: str, rank: int) -> list[str]:
    """The letters of a term of an equation, those of an ellipsis as ``.2``, ``.1``."""
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after)
    return [*before, *(f".{n}" for n in range(count, 0, -1)), *after] if dots else list(term)


def embedding(node: Node, values: Mapping[str, Value]) -> Rule:
    """embedding(table, ids, padding_idx, scale_grad_by_freq, sparse).

    A gradient scaled by how often an id occurs needs all ids at once, and so the whole table and all ids.
    """
    tensors = _tensors(node, values)
    if option(node, 3, "scale_grad_by_freq", False):
        found = parse_rule("[v] h, b.. -> b.. h", tensors, node.outputs)
        return replace(found, whole=frozenset(found.letters()) - {"h"})
    return parse_rule("v h, b.. -> b.. h", tensors, node.outputs, special={"v": Special("vocab_embedding", (None,))})


def attention(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa).

    Leading dims (batch, heads) are free. Queries may be cut unless the mask is causal by position.
    """
    tensors = _tensors(node, values)
    causal = option(node, 5, "is_causal", False)
    grouped = dict(node.kwargs).get("enable_gqa", False)
    mask = tensors[3] if len(tensors) > 3 else None
    query = "[q]" if causal else "q"
    heads = "h"
    sizes: dict[str, int] = {}
    if grouped and tensors[0].shape[-3] != tensors[1].shape[-3]:
        heads, sizes = "(kv g)", {"kv": tensors[1].shape[-3]}
    parts = (f"b.. {heads}", "b.. kv") if sizes else ("b..", "b..")
    notation = f"{parts[0]} {query} [d], {parts[1]} [s] [d], {parts[1]} [s] [e] -> {parts[0]} {query} [e]"
    try:
        base = parse_rule(notation, tensors[:3], node.outputs, sizes=sizes)
    except ValueError:  # leading dims that broadcast
        return None
    if mask is None:
        return base
    full: Dims = (*base.operands[0][:-1], ("s",))
    dims: list[Dim] = []
    for size, dim in zip(mask.shape[::-1], full[::-1], strict=False):
        if size not in (1, math.prod(base.sizes[letter] for letter in dim)):
            return None
        dims.append(dim if size != 1 else ())
    return Rule((*base.operands, tuple(reversed(dims))), base.outputs, base.sizes, base.whole)


def convolution(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """conv1d/2d/3d(input, weight, bias, stride, padding, dilation, groups); input [n, c, spatial..].

    conv_transpose1d/2d/3d(input, weight, bias, stride, padding, output_padding, groups, dilation); weight [c, o, ..].
    """
    tensors = _tensors(node, values)
    spatial = len(tensors[1].shape) - 2
    if len(tensors[0].shape) != spatial + 2:  # no batch dim
        return None
    groups = int(option(node, 6, "groups", 1))
    inside, kernel, result = (" ".join(f"[{x}{i}]" for i in range(spatial)) for x in "skt")
    transposed = "transpose" in node.op
    if groups == 1:
        weight = "c o" if transposed else "o c"
        notation, bias, sizes = f"n c {inside}, {weight} {kernel}{{}} -> n o {result}", ", o", {}
    else:
        # Only whole groups can be cut: the letters inside a group belong together.
        weight = "(g c) [o]" if transposed else "(g o) [c]"
        notation, bias = f"n (g c) {inside}, {weight} {kernel}{{}} -> n (g o) {result}", ", (g o)"
        sizes = {"g": groups, "c": tensors[0].shape[1] // groups, "o": node.output.shape[1] // groups}
    with_bias = len(tensors) == 3
    found = parse_rule(
        notation.format(bias if with_bias else ""),
        tensors,
        node.outputs,
        additive=(2,) if with_bias else (),
        linear=((0, 2), (1, 2)) if with_bias else ((0,), (1,)),
        sizes=sizes,
    )
    return found if groups == 1 else replace(found, whole=found.whole | {"c", "o"})


def recurrent(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """lstm, gru, rnn(x, states, weights, biases, layers, dropout, train, bidirectional, batch_first): the batch is free.

    x [b, t, i] or [t, b, i]; states [layers, b, h]; results: outputs like x, then states.
    """
    x = values[node.operands[0]]
    if len(x.shape) != 3 or len(node.args) != 9 or (node.args[5] and node.args[6]):
        return None
    states = len(node.outputs) - 1
    sequence: Dims = (("n",), (), ()) if node.args[8] else ((), ("n",), ())
    state: Dims = ((), ("n",), ())
    weights = tuple(tuple(() for _ in values[name].shape) for name in node.operands[1 + states :])
    sizes = {"n": x.shape[0 if node.args[8] else 1]}
    return Rule((sequence, *(state,) * states, *weights), (sequence, *(state,) * states), sizes)


def grouped_mm(node: Node, values: Mapping[str, Value]) -> Rule:
    """grouped_mm(x [t, i], weight [e, i, o], ends [e]): which rows belong to which matrix needs all rows and all ends."""
    return parse_rule("[t] i, [e] i o, [e] -> [t] o", _tensors(node, values), node.outputs, linear=((0,), (1,)))


def cell(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell(x [n, i], states [n, h], weights, biases): the batch is free."""
    rows = values[node.operands[0]].shape
    states = 2 if node.base == "lstm_cell" else 1
    if len(rows) != 2:
        return None
    row: Dims = (("n",), ())
    weights = tuple(tuple(() for _ in values[name].shape) for name in node.operands[1 + states :])
    return Rule((row, *(row,) * states, *weights), (row,) * len(node.outputs), {"n": rows[0]})
