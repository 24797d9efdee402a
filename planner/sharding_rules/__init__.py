"""Which rule an operator has.

    rule_of(node, values)   its Rule; an operator without one runs whole (unknown_rule), or by the notation it carries
    has_rule(op)            whether somebody wrote one

A rule is a function of the node and the tensors it reads; one that does not fit the node at hand gives None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from planner.ir.graph import MODULE, Node, Value
from planner.sharding_rules import contractions, elementwise, losses, reductions, selections, views
from planner.sharding_rules.collectives import converted
from planner.sharding_rules.rule import Rule, Special, Strategy, parse_rule, strategies, unknown_rule

RuleOf = Callable[[Node, Mapping[str, Value]], Rule | None]

_RULES: tuple[tuple[RuleOf, str], ...] = (
    (contractions.linear, "linear"),
    (contractions.addmm, "addmm baddbmm"),
    (contractions.mm, "mm"),
    (contractions.bmm, "bmm"),
    (contractions.matmul, "matmul"),
    (contractions.vectors, "mv dot vdot outer"),
    (contractions.einsum, "einsum"),
    (contractions.embedding, "embedding"),
    (contractions.attention, "scaled_dot_product_attention attention_with_dropout"),
    (contractions.convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (contractions.recurrent, "lstm gru rnn_tanh rnn_relu"),
    (contractions.grouped_mm, "grouped_mm"),
    (contractions.cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    (selections.index, "index"),
    (selections.index_select, "index_select"),
    (selections.gather, "gather"),
    (selections.scatter, "scatter scatter_add"),
    (selections.index_add, "index_add"),
    (selections.index_put, "index_put"),
    (selections.slice_scatter, "slice_scatter select_scatter"),
    (selections.sort, "sort argsort topk"),
    (selections.diff, "diff"),
    (selections.halves, "glu"),
    (selections.triangle, "tril triu"),
    (selections.unfold, "unfold"),
    (selections.diagonal, "diagonal"),
    (selections.one_hot, "one_hot"),
    (selections.patches, "im2col col2im"),
    (elementwise.prelu, "prelu"),
    (partial(reductions.reduction, kind="sum"), "sum"),
    (partial(reductions.reduction, kind="mean"), "mean"),
    (
        partial(reductions.reduction, kind="whole"),
        "amax amin max min argmax argmin all any prod std var std_mean var_mean logsumexp nanmean norm median "
        "linalg_vector_norm linalg_norm",
    ),
    (
        reductions.along,
        "softmax _softmax _safe_softmax log_softmax _log_softmax cumsum cumprod logcumsumexp flip roll",
    ),
    (reductions.cosine_similarity, "cosine_similarity"),
    (reductions.layer_norm, "layer_norm rms_norm"),
    (reductions.weight_norm, "_weight_norm"),
    (reductions.fft, "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"),
    (reductions.group_norm, "group_norm"),
    (reductions.instance_norm, "instance_norm"),
    (reductions.batch_norm, "batch_norm batch_norm_over"),
    (
        reductions.pooling,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
        "upsample_trilinear3d",
    ),
    (reductions.pixel_shuffle, "pixel_shuffle pixel_unshuffle"),
    (losses.pointwise_loss, " ".join(losses.LOSS_REDUCTION_ARGUMENT)),
    (losses.cross_entropy_sum, "cross_entropy_sum"),
    (losses.cross_entropy_count, "cross_entropy_count"),
    (losses.token_loss, "cross_entropy_loss nll_loss_nd"),
    (views.view, "view unsqueeze"),
    (views.permute, "transpose permute t"),
    (views.expand, "expand"),
    (views.repeat, "repeat tile"),
    (views.repeat_interleave, "repeat_interleave"),
    (views.last_dim, "view_as_complex view_as_real"),
    (views.slice_dim, "slice"),
    (views.split, "split split_with_sizes chunk"),
    (views.remove_dim, "select unbind"),
    (views.cat, "cat"),
    (views.stack, "stack"),
    (views.pad, "pad constant_pad_nd"),
    (views.filled, "full zeros ones new_full new_zeros new_ones scalar_tensor"),
    (converted, "convert"),
)
BY_NAME: Mapping[str, RuleOf] = {name: rule for rule, names in _RULES for name in names.split()}


def has_rule(node: Node) -> bool:
    return node.base in BY_NAME or node.base in elementwise.OPERATORS


def rule_of(node: Node, values: Mapping[str, Value]) -> Rule:
    base = node.base
    found: Rule | None = None
    if node.rule:
        found = parse_rule(node.rule, tuple(values[name] for name in node.operands), node.outputs)
    if node.op == MODULE:
        # Its backward may be code of the user's that is not linear in the gradient.
        return replace(found or unknown_rule(node), partial_gradient=False)
    if found is not None:
        return found
    if base in ("max", "min") and len(node.operands) == 2:
        found = elementwise.rule(node, values, base)
    elif base in BY_NAME:
        found = BY_NAME[base](node, values)
    elif base in elementwise.OPERATORS:
        found = elementwise.rule(node, values, base)
    return found if found is not None else unknown_rule(node)


__all__ = ["Rule", "Special", "Strategy", "has_rule", "rule_of", "strategies", "unknown_rule"]
