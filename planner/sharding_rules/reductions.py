"""Reductions, softmax, normalisations and pooling."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Value
from planner.ir.layout import WHOLE
from planner.sharding_rules.elementwise import broadcast_dims
from planner.sharding_rules.rule import Dim, Rule, Special, option

# Where the reduced dims stand among the arguments, when not second.
DIMS_ARGUMENT = {"roll": 2, "linalg_vector_norm": 2, "linalg_norm": 2, "norm": 2}


def _dims(node: Node, rank: int) -> tuple[int, ...]:
    """The reduced dims, non-negative; all of them when none is given."""
    place = DIMS_ARGUMENT.get(node.base, 1)
    chosen = option(node, place, "dim", None)
    if chosen is None or chosen == () or isinstance(chosen, bool):
        return tuple(range(rank))
    listed = chosen if isinstance(chosen, tuple) else (chosen,)
    return tuple(d % rank for d in listed) if rank else ()


def _letters(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple((f"d{i}",) for i in range(len(shape)))


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(shape)}


def reduction(node: Node, values: Mapping[str, Value], kind: str) -> Rule:
    """sum and mean contract; any other reduction keeps its dims whole. ``kind``: 'sum', 'mean' or 'whole'."""
    shape = values[node.operands[0]].shape
    letters, reduced = _letters(shape), _dims(node, len(shape))
    kept = [dim for i, dim in enumerate(letters) if i not in reduced]
    keeps_dims = len(node.output.shape) == len(shape) and bool(reduced)
    out = tuple(() if i in reduced else dim for i, dim in enumerate(letters)) if keeps_dims else tuple(kept)
    whole = frozenset(f"d{i}" for i in reduced) if kind == "whole" else frozenset()
    linear = () if kind == "whole" else (frozenset({0}),)
    return Rule((letters,), (out,) * len(node.outputs), _sizes(shape), whole, linear=linear, mean=kind == "mean")


LINEAR_ALONG = frozenset({"cumsum", "flip", "roll"})


def along(node: Node, values: Mapping[str, Value]) -> Rule:
    """softmax, log_softmax, cumsum, flip, roll ...: some dims must stay whole; shapes are kept."""
    shape = values[node.operands[0]].shape
    whole = frozenset(f"d{i}" for i in _dims(node, len(shape)))
    linear = (frozenset({0}),) if node.base in LINEAR_ALONG else ()
    return Rule((_letters(shape),), (_letters(shape),) * len(node.outputs), _sizes(shape), whole, linear=linear)


def cosine_similarity(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """cosine_similarity(x, y, dim), broadcasting: the dim stays whole and goes."""
    shapes = [values[name].shape for name in node.operands]
    rank = max(len(shape) for shape in shapes)
    dim = int(option(node, 2, "dim", 1)) % rank
    full = list(node.output.shape)
    full.insert(dim, max(shape[dim - rank] for shape in shapes if len(shape) >= rank - dim))
    left, right = (broadcast_dims(shape, tuple(full)) for shape in shapes)
    if left is None or right is None:
        return None
    sizes = {f"d{n}": size for n, size in zip(range(rank, 0, -1), full, strict=True)}
    out = tuple((f"d{n}",) for n in range(rank, 0, -1) if n != rank - dim)
    return Rule((left, right), (out,), sizes, frozenset({f"d{rank - dim}"}))


def layer_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """layer_norm(x, normalized_shape, weight, bias, eps) and rms_norm: the normalised dims stay whole."""
    shape = values[node.operands[0]].shape
    count = len(node.args[1])
    letters = _letters(shape)
    inner = letters[len(shape) - count :]
    whole = frozenset(dim[0] for dim in inner)
    return Rule((letters, *(inner for _ in node.operands[1:])), (letters,), _sizes(shape), whole)


def weight_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """_weight_norm(v, g, dim): each slice of v along dim is scaled to the length g tells."""
    shape, scale = (values[name].shape for name in node.operands)
    dim = int(option(node, 2, "dim", 0))
    letters = _letters(shape)
    kept = {dim % len(shape)} if dim >= 0 else set[int]()
    along = tuple(letters[d] if d in kept else () for d in range(len(shape))) if len(scale) == len(shape) else ()
    return Rule(
        (letters, along), (letters,), _sizes(shape), frozenset(f"d{d}" for d in range(len(shape)) if d not in kept)
    )


def fft(node: Node, values: Mapping[str, Value]) -> Rule:
    """fft.rfft, irfft, fft, ifft(x, n, dim, norm) and hfft, ihfft: the dim stays whole, the others are free; linear."""
    shape, out = values[node.operands[0]].shape, node.output.shape
    dim = int(option(node, 2, "dim", -1)) % len(shape)
    letters = _letters(shape)
    result = tuple(("t",) if d == dim else letter for d, letter in enumerate(letters))
    sizes = _sizes(shape) | {"t": out[dim]}
    return Rule((letters,), (result,), sizes, frozenset({f"d{dim}", "t"}), linear=(frozenset({0}),))


def group_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """group_norm(x [n, (g r), ..], groups, weight, bias, eps): groups can be cut, and the batch."""
    shape = values[node.operands[0]].shape
    groups = int(node.args[1])
    rest = tuple((f"s{i}",) for i in range(len(shape) - 2))
    sizes = {"n": shape[0], "g": groups, "r": shape[1] // groups} | {f"s{i}": s for i, s in enumerate(shape[2:])}
    channels: Dim = ("g", "r")
    dims = (("n",), channels, *rest)
    whole = frozenset({"r"} | {dim[0] for dim in rest})
    return Rule((dims, *((channels,) for _ in node.operands[1:])), (dims,), sizes, whole)


def instance_norm(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """instance_norm(x [n, c, ..], weight, bias, mean, var, ..): batch and channels are free; no running statistics."""
    if node.args[3] is not None or node.args[4] is not None:
        return None
    shape = values[node.operands[0]].shape
    rest = tuple((f"s{i}",) for i in range(len(shape) - 2))
    sizes = {"n": shape[0], "c": shape[1]} | {f"s{i}": s for i, s in enumerate(shape[2:])}
    dims = (("n",), ("c",), *rest)
    whole = frozenset(dim[0] for dim in rest)
    return Rule((dims, *((("c",),) for _ in node.operands[1:])), (dims,), sizes, whole)


def batch_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """batch_norm(x [n, c, ..], weight, bias, mean, var, training, momentum, eps) -> y, new mean, new var.

    In training the statistics couple n and all spatial dims: their shards exchange sums. Channels are free.
    Without running statistics (aten.batch_norm in training, one result) n and the spatial dims stay whole.
    """
    shape = values[node.operands[0]].shape
    rest = tuple(f"s{i}" for i in range(len(shape) - 2))
    sizes = {"n": shape[0], "c": shape[1]} | dict(zip(rest, shape[2:], strict=True))
    dims = (("n",), ("c",), *((letter,) for letter in rest))
    channel = (("c",),)
    outputs = (dims, *(channel for _ in node.outputs[1:]))
    special: dict[str, Special] = {}
    whole = frozenset[str]()
    if node.args[5] is True and len(node.outputs) > 1:
        statistics = tuple(WHOLE for _ in node.outputs[1:])
        special = {letter: Special("batch_norm_over", (None, *statistics)) for letter in ("n", *rest)}
    elif node.args[5] is True:
        whole = frozenset({"n", *rest})
    return Rule((dims, *(channel for _ in node.operands[1:])), outputs, sizes, whole, special=special)


def pooling(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """Pooling and resizing of [lead.., spatial..] (lead: batch and channels): the leading dims are free."""
    shape, out = values[node.operands[0]].shape, node.output.shape
    count = int(node.base[-2])  # the name ends in 1d, 2d or 3d
    lead = len(shape) - count
    if lead < 1 or len(shape) != len(out) or shape[:lead] != out[:lead] or len(node.operands) != 1:
        return None
    free = tuple((f"b{i}",) for i in range(lead, 0, -1))
    sizes = dict(zip((dim[0] for dim in free), shape, strict=False))
    sizes |= {f"s{i}": shape[lead + i] for i in range(count)} | {f"t{i}": out[lead + i] for i in range(count)}
    inside = (*free, *((f"s{i}",) for i in range(count)))
    result = (*free, *((f"t{i}",) for i in range(count)))
    whole = frozenset({f"s{i}" for i in range(count)} | {f"t{i}" for i in range(count)})
    linear = () if "max" in node.op else (frozenset({0}),)
    return Rule((inside,), (result,) * len(node.outputs), sizes, whole, linear=linear)


def pixel_shuffle(node: Node, values: Mapping[str, Value]) -> Rule:
    """pixel_shuffle(x [b.., (c r r), h, w], r) -> [b.., c, (h r), (w r)]: leading dims and channels are free.

    pixel_unshuffle is its inverse.
    """
    ends = values[node.operands[0]].shape, node.output.shape
    shape, out = ends if ends[0][-3] > ends[1][-3] else ends[::-1]
    lead = tuple((f"b{i}",) for i in range(len(shape) - 3, 0, -1))
    sizes = dict(zip((dim[0] for dim in lead), shape, strict=False))
    sizes |= {"c": out[-3], "r": shape[-3] // out[-3], "h": shape[-2], "w": shape[-1], "x": out[-2], "y": out[-1]}
    inside, result = (*lead, ("c", "r"), ("h",), ("w",)), (*lead, ("c",), ("x",), ("y",))
    if ends[0] is not shape:
        inside, result = result, inside
    return Rule((inside,), (result,), sizes, frozenset("rhwxy"), linear=(frozenset({0}),))
