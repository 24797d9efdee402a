"""Losses: pointwise ones over equal shapes, and those that pick a class for each token.

A mean is split by planner.normalise into a sum over tokens and a count, so tokens may lie unevenly on the devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Value
from planner.ir.layout import WHOLE
from planner.sharding_rules.rule import Dims, Rule, Special, option

MEAN, SUM = 1, 2

LOSS_REDUCTION_ARGUMENT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "soft_margin_loss": 2,
    "binary_cross_entropy_with_logits": 4, "kl_div": 2,
}  # fmt: skip


def _letters(shape: tuple[int, ...]) -> Dims:
    return tuple((f"d{i}",) for i in range(len(shape)))


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(shape)}


def pointwise_loss(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """mse_loss, l1_loss, ... (input, target, .., reduction): 0 none, 1 mean, 2 sum, over equal shapes."""
    shapes = [values[name].shape for name in node.operands]
    if any(shape != shapes[0] for shape in shapes):
        return None
    letters = _letters(shapes[0])
    mean = node.output.shape == () and shapes[0] != () and _reduction(node) == MEAN
    output = letters if node.output.shape == shapes[0] else ()
    return Rule((letters,) * len(shapes), (output,), _sizes(shapes[0]), mean=mean)


def _reduction(node: Node) -> int:
    place = LOSS_REDUCTION_ARGUMENT.get(node.base, 3)
    return int(option(node, place, "reduction", MEAN))


def _class_dims(shape: tuple[int, ...]) -> tuple[Dims, dict[str, int]]:
    """Letters and sizes of logits [n, v, s..] or [v]."""
    dims: Dims = (("v",),) if len(shape) == 1 else (("n",), ("v",), *((f"s{i}",) for i in range(len(shape) - 2)))
    return dims, {dim[0]: size for dim, size in zip(dims, shape, strict=True)}


def _tokens(dims: Dims) -> Dims:
    return tuple(dim for dim in dims if dim != ("v",))


def cross_entropy_sum(node: Node, values: Mapping[str, Value]) -> Rule:
    """cross_entropy_sum(logits [n, v, s..] or [v], target, weight, ignore_index, label_smoothing).

    Tokens add up; the vocabulary is cut with three small all-reduces inside, target and class weights staying whole.
    """
    logits, target = values[node.operands[0]], values[node.operands[1]]
    dims, sizes = _class_dims(logits.shape)
    soft = len(target.shape) == len(logits.shape)
    target_dims = tuple(() if dim == ("v",) else dim for dim in dims) if soft else _tokens(dims)
    weights: tuple[Dims, ...] = tuple(((),) for _ in node.operands[2:])
    return Rule((dims, target_dims, *weights), ((),), sizes, special={"v": Special("vocab_cross_entropy", (WHOLE,))})


def cross_entropy_count(node: Node, values: Mapping[str, Value]) -> Rule:
    """cross_entropy_count(target, classes, weight, ignore_index): the divisor of the mean; tokens add up."""
    target = values[node.operands[0]]
    sizes = _sizes(target.shape)
    weights: tuple[Dims, ...] = tuple((("w",),) for _ in node.operands[1:])
    whole = {"w"}
    if weights:
        sizes["w"] = values[node.operands[1]].shape[0]
    if target.dtype.startswith("float"):  # probabilities [n, v, s..] or [v]
        whole.add("d1" if len(target.shape) > 1 else "d0")
    return Rule((_letters(target.shape), *weights), ((),), sizes, frozenset(whole))


def token_loss(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """cross_entropy_loss (a loss a token), nll_loss (a loss a token, or the sum) of [n, v, s..]: classes stay whole."""
    reduction = _reduction(node)
    if reduction == MEAN:
        return None
    scores, target = values[node.operands[0]], values[node.operands[1]]
    dims, sizes = _class_dims(scores.shape)
    target_dims = dims if len(target.shape) == len(scores.shape) else _tokens(dims)
    weights: tuple[Dims, ...] = tuple((("v",),) for _ in node.operands[2:])
    output = () if reduction == SUM else _tokens(dims)
    return Rule((dims, target_dims, *weights), (output,), sizes, frozenset({"v"}))
