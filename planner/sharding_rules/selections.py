"""Operators that pick, place or order elements along one dim; the other dims are free.

The dim that is searched is read whole. A result that is linear in the values it picks passes partial values.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Ref, Value
from planner.sharding_rules.rule import Dim, Dims, Rule, option


def _letters(rank: int) -> tuple[Dim, ...]:
    return tuple((f"d{i}",) for i in range(rank))


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(shape)}


def index(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """index.Tensor(x, indices): the indexed dims of x, all neighbours, are read whole; the index tensors carry letters.

    x [l.., x.., r..] and indices broadcast to [i..] give [l.., i.., r..].
    """
    indices = node.args[1]
    if not isinstance(indices, tuple):
        return None
    places = [n for n, item in enumerate(indices) if isinstance(item, Ref)]
    tensors = tuple(values[name] for name in node.operands)
    source, index_tensors = tensors[0], tensors[1:]
    if places != list(range(places[0], places[-1] + 1)) or any(value.dtype == "bool" for value in index_tensors):
        return None
    before, count = places[0], len(places)
    after = len(source.shape) - before - count
    out = node.output.shape
    picked = out[before : len(out) - after]
    left, right = tuple((f"l{n}",) for n in range(before)), tuple((f"r{n}",) for n in range(after))
    middle = tuple((f"i{n}",) for n in range(len(picked), 0, -1))
    sizes = dict(zip((dim[0] for dim in (*left, *middle, *right)), out, strict=True))
    read = tuple((f"x{n}",) for n in range(count))
    sizes |= {dim[0]: source.shape[before + n] for n, dim in enumerate(read)}
    operands: list[Dims] = [(*left, *read, *right)]
    for value in index_tensors:
        pairs = zip(range(len(value.shape), 0, -1), value.shape, strict=True)
        operands.append(tuple((f"i{n}",) if size == picked[-n] else () for n, size in pairs))
    whole = frozenset(dim[0] for dim in read)
    return Rule(tuple(operands), ((*left, *middle, *right),), sizes, whole, linear=(frozenset({0}),))


def index_select(node: Node, values: Mapping[str, Value]) -> Rule:
    """index_select(x, dim, index): x is read whole along dim, the index carries a letter of its own."""
    source, chosen = (values[name] for name in node.operands)
    rank = len(source.shape)
    dim = int(node.args[1]) % rank
    inside = _letters(rank)
    sizes = _sizes(source.shape) | {"i": chosen.numel}
    out = tuple(("i",) if d == dim else letter for d, letter in enumerate(inside))
    return Rule((inside, (("i",),)), (out,), sizes, frozenset({f"d{dim}"}), linear=(frozenset({0}),))


def gather(node: Node, values: Mapping[str, Value]) -> Rule:
    """gather(x, dim, index): x is read whole along dim; dims in which the index is shorter than x stay whole too."""
    source, chosen = (values[name] for name in node.operands)
    rank = len(source.shape)
    dim = int(node.args[1]) % rank
    sizes, picked, whole = _sizes(source.shape), list(_letters(rank)), {f"d{dim}"}
    for d, size in enumerate(chosen.shape):
        if d == dim or size != source.shape[d]:
            picked[d] = (f"i{d}",)
            sizes[f"i{d}"] = size
            whole |= {f"d{d}"} if d == dim else {f"d{d}", f"i{d}"}
    index_dims = tuple(picked)
    return Rule((_letters(rank), index_dims), (index_dims,), sizes, frozenset(whole), linear=(frozenset({0}),))


def scatter(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """scatter(x, dim, index, values or number), scatter_add: dims, but for ``dim``, in which all are equal are free.

    What scatter_add adds up may be cut along ``dim``: each share gives a partial sum.
    """
    tensors = [values[name] for name in node.operands]
    shape, rank = tensors[0].shape, len(tensors[0].shape)
    if len(dict(node.kwargs)) or any(len(value.shape) != rank for value in tensors):
        return None
    dim = int(node.args[1]) % rank
    sums = node.base == "scatter_add" and tensors[1].shape[dim] == tensors[2].shape[dim]
    sizes, whole, operands = _sizes(shape), {f"d{dim}"}, []
    for number, value in enumerate(tensors):
        dims: list[Dim] = []
        for d, size in enumerate(value.shape):
            equal = d != dim and all(other.shape[d] == shape[d] for other in tensors)
            added = sums and d == dim and number > 0
            name = "t" if added else f"d{d}" if equal or not number else f"t{number}_{d}"
            sizes[name] = size
            if not equal and not added:
                whole.add(name)
            dims.append((name,))
        operands.append(tuple(dims))
    linear = (frozenset({0, 2}),) if len(tensors) == 3 else ()
    additive = frozenset({0}) if sums else frozenset[int]()
    return Rule(tuple(operands), (operands[0],), sizes, frozenset(whole), additive, linear)


def index_add(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """index_add(x, dim, index, source): x is whole along dim; shares of what is added give partial sums."""
    source = values[node.operands[0]]
    if not source.shape:
        return None
    dim = int(node.args[1]) % len(source.shape)
    letters = _letters(len(source.shape))
    added = tuple(("t",) if d == dim else letter for d, letter in enumerate(letters))
    sizes = _sizes(source.shape) | {"t": values[node.operands[1]].numel}
    index: Dims = (("t",),) if values[node.operands[1]].shape else ()
    whole = {f"d{dim}"} if index else {f"d{dim}", "t"}
    linear = (frozenset({0, 2}),)
    return Rule((letters, index, added), (letters,), sizes, frozenset(whole), frozenset({0}), linear)


def index_put(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """index_put(x [x.., r..], indices [i..], values [i.., r..], accumulate): indexed dims of x, the first ones, are whole.

    Where values are added up (accumulate) shares of them give partial sums; else they stay whole along the indices.
    """
    indices = node.args[1]
    if not isinstance(indices, tuple) or not all(isinstance(item, Ref) for item in indices):
        return None
    source, *rest = (values[name] for name in node.operands)
    index, put = rest[:-1], rest[-1]
    picked = index[0].shape
    if any(value.shape != picked or value.dtype == "bool" for value in index) or not picked:
        return None
    count = len(index)
    free = source.shape[count:]
    if put.shape != (*picked, *free):
        return None
    read, kept = tuple((f"x{n}",) for n in range(count)), tuple((f"r{n}",) for n in range(len(free)))
    chosen = tuple((f"i{n}",) for n in range(len(picked)))
    sizes = dict(zip((d[0] for d in (*read, *kept)), source.shape, strict=True))
    sizes |= {dim[0]: size for dim, size in zip(chosen, picked, strict=True)}
    adds = len(node.args) > 3 and bool(node.args[3])
    whole = {dim[0] for dim in read} | (set() if adds else {dim[0] for dim in chosen})
    operands = ((*read, *kept), *(chosen for _ in index), (*chosen, *kept))
    linear = (frozenset({0, len(operands) - 1}),)
    return Rule(operands, (operands[0],), sizes, frozenset(whole), frozenset({0}) if adds else frozenset(), linear)


def slice_scatter(node: Node, values: Mapping[str, Value]) -> Rule:
    """slice_scatter(x, src, dim, ..) and select_scatter(x, src, dim, index): x with a part of one dim replaced."""
    source, part = (values[name] for name in node.operands)
    rank = len(source.shape)
    dim = int(node.args[2] if len(node.args) > 2 else 0) % rank
    letters = _letters(rank)
    sizes = _sizes(source.shape)
    replaced: list[Dim] = [letter for d, letter in enumerate(letters) if d != dim]
    whole = {f"d{dim}"}
    if len(part.shape) == rank:
        replaced.insert(dim, ("r",))
        sizes["r"] = part.shape[dim]
        whole.add("r")
    linear = (frozenset({0, 1}),)
    return Rule((letters, tuple(replaced)), (letters,), sizes, frozenset(whole), linear=linear)


def sort(node: Node, values: Mapping[str, Value]) -> Rule:
    """sort(x, dim), argsort, and topk(x, k, dim): the dim stays whole; values and positions."""
    shape = values[node.operands[0]].shape
    place = 2 if node.op.startswith("aten.topk") else 1
    is_stable = node.op.endswith(".stable")
    dim = int(option(node, place + is_stable, "dim", -1)) % max(len(shape), 1)
    return _one_dim_whole(node, shape, dim, linear=False)


def diff(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """diff(x, n, dim, prepend, append): linear in all of them together."""
    shape = values[node.operands[0]].shape
    dim = int(option(node, 2, "dim", -1)) % len(shape)
    found = _one_dim_whole(node, shape, dim, linear=True)
    operands, sizes = list(found.operands), dict(found.sizes)
    for number, name in enumerate(node.operands[1:]):
        operands.append(tuple((f"p{number}",) if d == dim else letter for d, letter in enumerate(found.operands[0])))
        sizes[f"p{number}"] = values[name].shape[dim]
    whole = found.whole | {f"p{number}" for number in range(len(node.operands) - 1)}
    return Rule(tuple(operands), found.outputs, sizes, whole, linear=(frozenset(range(len(operands))),))


def _one_dim_whole(node: Node, shape: tuple[int, ...], dim: int, linear: bool) -> Rule:
    """One dim changes its size or its order; the others are free."""
    letters = _letters(len(shape))
    out = tuple(("t",) if d == dim else letter for d, letter in enumerate(letters))
    sizes = _sizes(shape) | ({"t": node.output.shape[dim]} if shape else {})
    passes = (frozenset({0}),) if linear else ()
    return Rule((letters,), (out,) * len(node.outputs), sizes, frozenset({f"d{dim}", "t"}), linear=passes)


def halves(node: Node, values: Mapping[str, Value]) -> Rule:
    """glu(x, dim): both halves of the dim belong together."""
    shape = values[node.operands[0]].shape
    return _one_dim_whole(node, shape, int(option(node, 1, "dim", -1)) % len(shape), linear=False)


def triangle(node: Node, values: Mapping[str, Value]) -> Rule:
    """tril and triu: positions of the last two dims are compared, the leading dims are free."""
    shape = values[node.operands[0]].shape
    rank = len(shape)
    letters, whole = _letters(rank), frozenset({f"d{rank - 1}", f"d{rank - 2}"})
    return Rule((letters,), (letters,), _sizes(shape), whole, linear=(frozenset({0}),))


def unfold(node: Node, values: Mapping[str, Value]) -> Rule:
    """unfold(x, dim, size, step): windows along dim, in a new last dim."""
    shape = values[node.operands[0]].shape
    found = _one_dim_whole(node, shape, int(node.args[1]) % len(shape), linear=True)
    sizes = dict(found.sizes) | {"w": node.output.shape[-1]}
    return Rule(found.operands, ((*found.outputs[0], ("w",)),), sizes, found.whole | {"w"}, linear=found.linear)


def diagonal(node: Node, values: Mapping[str, Value]) -> Rule:
    """diagonal(x, offset, dim1, dim2): both dims become one, the last."""
    shape = values[node.operands[0]].shape
    pair = {int(option(node, 2, "dim1", 0)) % len(shape), int(option(node, 3, "dim2", 1)) % len(shape)}
    letters = _letters(len(shape))
    out = (*(letter for d, letter in enumerate(letters) if d not in pair), ("t",))
    sizes = _sizes(shape) | {"t": node.output.shape[-1]}
    whole = frozenset({"t", *(f"d{d}" for d in pair)})
    return Rule((letters,), (out,), sizes, whole, linear=(frozenset({0}),))


def one_hot(node: Node, values: Mapping[str, Value]) -> Rule:
    """one_hot(ids, classes): a new last dim."""
    shape = values[node.operands[0]].shape
    letters = _letters(len(shape))
    sizes = _sizes(shape) | {"c": node.output.shape[-1]}
    return Rule((letters,), ((*letters, ("c",)),), sizes, frozenset({"c"}))


def patches(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """im2col [n, c, h, w] -> [n, (c k), l] and col2im, the other way: batch and channels are free."""
    shape, out = values[node.operands[0]].shape, node.output.shape
    images, columns = (shape, out) if len(shape) == 4 else (out, shape)
    if (len(images), len(columns)) != (4, 3):  # no batch dim
        return None
    sizes = {"n": images[0], "c": images[1], "h": images[2], "w": images[3]}
    sizes |= {"k": columns[1] // images[1], "l": columns[2]}
    image: Dims = (("n",), ("c",), ("h",), ("w",))
    column: Dims = (("n",), ("c", "k"), ("l",))
    inside, result = (image, column) if images is shape else (column, image)
    return Rule((inside,), (result,), sizes, frozenset("hwkl"), linear=(frozenset({0}),))
