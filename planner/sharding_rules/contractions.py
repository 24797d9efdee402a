"""Matrix products, convolutions, embeddings, attention: the operators that hold the weights and the work."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Ref, Value
from planner.sharding_rules.rule import Rule, Special, parse_rule


def _tensors(node: Node, values: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(values[name] for name in node.operands)


def linear(node: Node, values: Mapping[str, Value]) -> Rule:
    tensors = _tensors(node, values)
    if len(tensors) == 3:
        return parse_rule("b.. i, o i, o -> b.. o", tensors, node.outputs, additive=(2,), linear=((0, 2), (1, 2)))
    return parse_rule("b.. i, o i -> b.. o", tensors, node.outputs, linear=((0,), (1,)))


def addmm(node: Node, values: Mapping[str, Value]) -> Rule | None:
    tensors = _tensors(node, values)
    if dict(node.kwargs).get("beta", 1) != 1 or dict(node.kwargs).get("alpha", 1) != 1:
        return None
    bias = "o" if len(tensors[0].shape) == 1 else "n o"
    if 1 in tensors[0].shape and node.output.shape[-len(tensors[0].shape) :] != tensors[0].shape:
        return None
    return parse_rule(f"{bias}, n i, i o -> n o", tensors, node.outputs, additive=(0,), linear=((0, 1), (0, 2)))


def mm(node: Node, values: Mapping[str, Value]) -> Rule:
    return parse_rule("n i, i o -> n o", _tensors(node, values), node.outputs, linear=((0,), (1,)))


def bmm(node: Node, values: Mapping[str, Value]) -> Rule:
    return parse_rule("b n i, b i o -> b n o", _tensors(node, values), node.outputs, linear=((0,), (1,)))


def matmul(node: Node, values: Mapping[str, Value]) -> Rule | None:
    tensors = _tensors(node, values)
    ranks = tuple(len(value.shape) for value in tensors)
    if min(ranks) >= 2:
        try:
            return parse_rule("b.. n i, b.. i o -> b.. n o", tensors, node.outputs, linear=((0,), (1,)))
        except ValueError:  # leading dims that broadcast
            return None
    notation = {(1, 1): "i, i ->", (2, 1): "n i, i -> n", (1, 2): "i, i o -> o"}.get(ranks)
    return parse_rule(notation, tensors, node.outputs, linear=((0,), (1,))) if notation else None


def embedding(node: Node, values: Mapping[str, Value]) -> Rule:
    return parse_rule(
        "v h, b.. -> b.. h", _tensors(node, values), node.outputs, special={"v": Special("vocab_embedding", (None,))}
    )


def attention(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa).

    Leading dims (batch, heads) are free. Queries may be cut unless the mask is causal by position.
    """
    tensors = _tensors(node, values)
    options = dict(node.kwargs)
    causal = options.get("is_causal", node.args[5] if len(node.args) > 5 else False)
    grouped = options.get("enable_gqa", False)
    mask = tensors[3] if len(tensors) > 3 else None
    query = "[q]" if causal else "q"
    if grouped and tensors[0].shape[-3] != tensors[1].shape[-3]:
        sizes = {"kv": tensors[1].shape[-3]}
        notation = f"b.. (kv g) {query} [d], b.. kv [s] [d], b.. kv [s] [e] -> b.. (kv g) {query} [e]"
        if mask is not None:
            return None
        return parse_rule(notation, tensors, node.outputs, sizes=sizes)
    notation = f"b.. {query} [d], b.. [s] [d], b.. [s] [e]"
    if mask is None:
        return parse_rule(f"{notation} -> b.. {query} [e]", tensors, node.outputs)
    base = parse_rule(f"{notation} -> b.. {query} [e]", tensors[:3], node.outputs)
    full = (*base.operands[0][:-1], ("s",))
    sizes = tuple(base.sizes[dim[0]] for dim in full)
    dims = []
    for size, dim, whole in zip(mask.shape[::-1], full[::-1], sizes[::-1], strict=False):
        if size not in (1, whole):
            return None
        dims.append(dim if size == whole else ())
    operands = (*base.operands, tuple(reversed(dims)))
    return Rule(operands, base.outputs, base.sizes, base.whole)


def convolution(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """conv1d/2d/3d(input, weight, bias, stride, padding, dilation, groups); input [n, c, spatial..]."""
    tensors = _tensors(node, values)
    spatial = len(tensors[0].shape) - 2
    if spatial < 1:
        return None
    groups = dict(node.kwargs).get("groups", node.args[6] if len(node.args) > 6 else 1)
    inside = " ".join(f"[s{i}]" for i in range(spatial))
    kernel = " ".join(f"[k{i}]" for i in range(spatial))
    result = " ".join(f"[t{i}]" for i in range(spatial))
    if groups == 1:
        notation = f"n c {inside}, o c {kernel}{{}} -> n o {result}"
        sizes = {}
        bias = ", o"
    else:
        notation = f"n (g c) {inside}, (g o) [c] {kernel}{{}} -> n (g o) {result}"
        sizes = {"g": groups, "o": tensors[1].shape[0] // groups, "c": tensors[1].shape[1]}
        bias = ", (g o)"
    with_bias = len(tensors) == 3
    found = parse_rule(
        notation.format(bias if with_bias else ""),
        tensors,
        node.outputs,
        additive=(2,) if with_bias else (),
        linear=((0, 2), (1, 2)) if with_bias else ((0,), (1,)),
        sizes=sizes,
    )
    # Only whole groups can be cut: the letters inside a group belong together.
    return found if groups == 1 else Rule(
        found.operands, found.outputs, found.sizes, found.whole | {"o", "c"}, found.additive, found.linear
    )  # fmt: skip


def index(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """index.Tensor(x, indices) with the leading dims of x indexed: x whole there, the index tensors carry letters."""
    indices = node.args[1]
    if not isinstance(indices, tuple) or not all(isinstance(item, Ref) for item in indices):
        return None
    tensors = _tensors(node, values)
    source, index_tensors = tensors[0], tensors[1:]
    if any(value.dtype == "bool" for value in index_tensors):
        return None
    rest = len(source.shape) - len(index_tensors)
    picked = len(node.output.shape) - rest
    full = node.output.shape[:picked]
    sizes: dict[str, int] = {f"i{n}": size for n, size in zip(range(picked, 0, -1), full, strict=True)}
    sizes |= {f"r{n}": source.shape[len(index_tensors) + n] for n in range(rest)}
    sizes |= {f"x{n}": source.shape[n] for n in range(len(index_tensors))}
    operands = [tuple((f"x{n}",) for n in range(len(index_tensors))) + tuple((f"r{n}",) for n in range(rest))]
    for value in index_tensors:
        dims = []
        for n, size in zip(range(len(value.shape), 0, -1), value.shape, strict=True):
            dims.append((f"i{n}",) if size == full[-n] else ())
        operands.append(tuple(dims))
    output = tuple((f"i{n}",) for n in range(picked, 0, -1)) + tuple((f"r{n}",) for n in range(rest))
    whole = frozenset(f"x{n}" for n in range(len(index_tensors)))
    return Rule(tuple(operands), (output,), sizes, whole, linear=(frozenset({0}),))


def index_select(node: Node, values: Mapping[str, Value]) -> Rule:
    """index_select(x, dim, index): x is read whole along dim, the index carries a letter of its own."""
    source, index = _tensors(node, values)
    dim = int(node.args[1]) % len(source.shape)
    letters = [f"d{i}" for i in range(len(source.shape))]
    sizes = dict(zip(letters, source.shape, strict=True)) | {"i": index.numel}
    inside = tuple((letter,) for letter in letters)
    out = tuple(("i",) if d == dim else (letter,) for d, letter in enumerate(letters))
    return Rule((inside, (("i",),)), (out,), sizes, frozenset({letters[dim]}), linear=(frozenset({0}),))
