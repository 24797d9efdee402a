"""Reductions, softmax, normalisations, pooling and losses."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Value
from planner.ir.layout import WHOLE
from planner.sharding_rules.rule import Dim, Rule, Special


def _dims(node: Node, rank: int) -> tuple[int, ...]:
    """The reduced dims, non-negative; all of them when none is given."""
    chosen = dict(node.kwargs).get("dim", node.args[1] if len(node.args) > 1 else None)
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


def along(node: Node, values: Mapping[str, Value]) -> Rule:
    """softmax, log_softmax, cumsum, flip, sort ...: args[1] names dims that must stay whole; shapes are kept."""
    shape = values[node.operands[0]].shape
    whole = frozenset(f"d{i}" for i in _dims(node, len(shape)))
    linear = (frozenset({0}),) if node.op.split(".")[1] in ("cumsum", "flip", "roll") else ()
    return Rule((_letters(shape),), (_letters(shape),) * len(node.outputs), _sizes(shape), whole, linear=linear)


def layer_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """layer_norm(x, normalized_shape, weight, bias, eps) and rms_norm: the normalised dims stay whole."""
    shape = values[node.operands[0]].shape
    count = len(node.args[1])
    letters = _letters(shape)
    inner = letters[len(shape) - count :]
    whole = frozenset(dim[0] for dim in inner)
    return Rule((letters, *(inner for _ in node.operands[1:])), (letters,), _sizes(shape), whole)


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


def batch_norm(node: Node, values: Mapping[str, Value]) -> Rule:
    """batch_norm(x [n, c, ..], weight, bias, mean, var, training, momentum, eps) -> y, new mean, new var.

    The statistics couple n and all spatial dims: their shards exchange sums. Channels are free.
    """
    shape = values[node.operands[0]].shape
    rest = tuple(f"s{i}" for i in range(len(shape) - 2))
    sizes = {"n": shape[0], "c": shape[1]} | dict(zip(rest, shape[2:], strict=True))
    dims = (("n",), ("c",), *((letter,) for letter in rest))
    channel = (("c",),)
    outputs = (dims, *(channel for _ in node.outputs[1:]))
    special = {}
    if node.args[5] is True:
        statistics = tuple(WHOLE for _ in node.outputs[1:])
        special = {letter: Special("batch_norm_over", (None, *statistics)) for letter in ("n", *rest)}
    return Rule((dims, *(channel for _ in node.operands[1:])), outputs, sizes, special=special)


def pooling(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """Pooling and resizing of [n, c, spatial..]: batch and channels are free."""
    shape, out = values[node.operands[0]].shape, node.output.shape
    if len(shape) < 3 or len(shape) != len(out) or shape[:2] != out[:2] or len(node.operands) != 1:
        return None
    count = len(shape) - 2
    sizes = {"n": shape[0], "c": shape[1]}
    sizes |= {f"s{i}": shape[2 + i] for i in range(count)} | {f"t{i}": out[2 + i] for i in range(count)}
    inside = (("n",), ("c",), *((f"s{i}",) for i in range(count)))
    result = (("n",), ("c",), *((f"t{i}",) for i in range(count)))
    whole = frozenset({f"s{i}" for i in range(count)} | {f"t{i}" for i in range(count)})
    linear = () if "max" in node.op else (frozenset({0}),)
    return Rule((inside,), (result,) * len(node.outputs), sizes, whole, linear=linear)


def pointwise_loss(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """mse_loss, l1_loss, ... (input, target, .., reduction): 0 none, 1 mean, 2 sum, over equal shapes."""
    shapes = [values[name].shape for name in node.operands]
    if any(shape != shapes[0] for shape in shapes):
        return None
    letters = _letters(shapes[0])
    mean = node.output.shape == () and shapes[0] != () and _mean_reduction(node)
    output = letters if node.output.shape == shapes[0] else ()
    return Rule((letters,) * len(shapes), (output,), _sizes(shapes[0]), mean=mean)


LOSS_REDUCTION_ARGUMENT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "soft_margin_loss": 2,
    "binary_cross_entropy_with_logits": 4, "kl_div": 2,
}  # fmt: skip


def _mean_reduction(node: Node) -> bool:
    place = LOSS_REDUCTION_ARGUMENT[node.op.split(".")[1]]
    return bool(dict(node.kwargs).get("reduction", node.args[place] if len(node.args) > place else 1) == 1)


def cross_entropy_sum(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """cross_entropy_sum(logits [n, v, s..] or [v], target, weight, ignore_index, label_smoothing).

    Tokens add up; the vocabulary is cut with three small all-reduces inside.
    """
    logits, target = values[node.operands[0]], values[node.operands[1]]
    special = {"v": Special("vocab_cross_entropy", (WHOLE,))}
    tokens = tuple((f"s{i}",) for i in range(len(logits.shape) - 2))
    dims = (("v",),) if len(logits.shape) == 1 else (("n",), ("v",), *tokens)
    sizes = {dim[0]: size for dim, size in zip(dims, logits.shape, strict=True)}
    classes = len(target.shape) < len(logits.shape)
    target_dims = tuple(dim for dim in dims if not classes or dim != ("v",))
    weights = tuple((("v",),) for _ in node.operands[2:])
    whole = frozenset() if classes and not weights else frozenset({"v"})
    return Rule((dims, target_dims, *weights), ((),), sizes, whole, special=special)


def cross_entropy_count(node: Node, values: Mapping[str, Value]) -> Rule:
    """cross_entropy_count(target, classes, weight, ignore_index): the divisor of the mean; tokens add up."""
    target = values[node.operands[0]]
    letters = _letters(target.shape)
    sizes = _sizes(target.shape)
    weights = tuple((("w",),) for _ in node.operands[1:])
    if weights:
        sizes["w"] = values[node.operands[1]].shape[0]
    whole = frozenset({"w"} | ({"d1"} if target.dtype.startswith("float") and len(target.shape) > 1 else set()))
    return Rule((letters, *weights), ((),), sizes, whole)
