"""Which rule an operator has.

    rule_of(node, values)   its Rule; an operator without one runs whole (unknown_rule)
    has_rule(op)            whether somebody wrote one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from planner.ir.graph import Node, Value
from planner.sharding_rules import contractions, elementwise, reductions, views
from planner.sharding_rules.collectives import converted
from planner.sharding_rules.rule import Rule, Special, Strategy, strategies, unknown_rule

RuleOf = Callable[[Node, Mapping[str, Value]], Rule | None]

BY_NAME: Mapping[str, RuleOf] = {
    "linear": contractions.linear,
    "addmm": contractions.addmm,
    "mm": contractions.mm,
    "bmm": contractions.bmm,
    "matmul": contractions.matmul,
    "embedding": contractions.embedding,
    "scaled_dot_product_attention": contractions.attention,
    "attention_with_dropout": contractions.attention,
    "conv1d": contractions.convolution,
    "conv2d": contractions.convolution,
    "conv3d": contractions.convolution,
    "index": contractions.index,
    "index_select": contractions.index_select,
    "sum": partial(reductions.reduction, kind="sum"),
    "mean": partial(reductions.reduction, kind="mean"),
    **{name: partial(reductions.reduction, kind="whole") for name in ("amax", "amin", "logsumexp", "argmax", "argmin", "all", "any", "prod", "std", "var")},
    **{name: reductions.along for name in ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "flip", "roll")},
    "layer_norm": reductions.layer_norm,
    "rms_norm": reductions.layer_norm,
    "group_norm": reductions.group_norm,
    "batch_norm": reductions.batch_norm,
    "batch_norm_over": reductions.batch_norm,
    **{
        name: reductions.pooling
        for name in (
            "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
            "upsample_bicubic2d",
        )
    },
    **{name: reductions.pointwise_loss for name in reductions.LOSS_REDUCTION_ARGUMENT},
    "cross_entropy_sum": reductions.cross_entropy_sum,
    "cross_entropy_count": reductions.cross_entropy_count,
    "view": views.view,
    "unsqueeze": views.view,
    **{name: views.permute for name in ("transpose", "permute", "t")},
    "expand": views.expand,
    "repeat": views.repeat,
    "slice": views.slice_dim,
    **{name: views.split for name in ("split", "split_with_sizes", "chunk")},
    **{name: views.remove_dim for name in ("select", "unbind")},
    "cat": views.cat,
    "stack": views.stack,
    "pad": views.pad,
    "constant_pad_nd": views.pad,
    **{
        name: views.filled
        for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "scalar_tensor")
    },
    "convert": converted,
}  # fmt: skip


def base_name(op: str) -> str:
    """'aten.add.Tensor' -> 'add'; our own operators have no dots."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def has_rule(op: str) -> bool:
    return base_name(op) in BY_NAME or base_name(op) in elementwise.OPERATORS


def rule_of(node: Node, values: Mapping[str, Value]) -> Rule:
    base = base_name(node.op)
    found: Rule | None = None
    if base in BY_NAME:
        found = BY_NAME[base](node, values)
    elif base in elementwise.OPERATORS:
        found = elementwise.rule(node, values, base)
    return found if found is not None else unknown_rule(node)


__all__ = ["Rule", "Special", "Strategy", "base_name", "has_rule", "rule_of", "strategies", "unknown_rule"]
