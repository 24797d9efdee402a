"""Calls of single operators, each with the letters it is known to split on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.operator_graphs import Case, Function


def _r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(*shape: int) -> Tensor:
    return _r(*shape).abs() + 0.5


def _ids(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape)


def _mask(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return mask


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def contractions() -> dict[str, Case]:
    x, heads = _r(8, 4, 8), (_r(4, 8, 8, 4), _r(4, 8, 8, 4), _r(4, 8, 8, 4))
    grouped = (_r(4, 8, 8, 4), _r(4, 4, 8, 4), _r(4, 4, 8, 4))

    def lstm(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return torch.lstm(x, (state, state * 2), (a, b, c, d), True, 1, 0.0, True, False, True)

    def gru(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return torch.gru(x, state, (a, b, c, d), True, 1, 0.0, True, False, False)

    return {
        "linear": Case("linear", "b2 b1 i o", F.linear, (x, _r(16, 8))),
        "linear_bias": Case("linear", "b2 b1 i o", F.linear, (x, _r(16, 8), _r(16))),
        "linear_vector": Case("linear", "i o", F.linear, (_r(8), _r(16, 8), _r(16))),
        "addmm": Case("addmm", "n i o", torch.addmm, (_r(16), _r(8, 4), _r(4, 16))),
        "addmm_full": Case("addmm", "n i o", torch.addmm, (_r(8, 16), _r(8, 4), _r(4, 16))),
        "mm": Case("mm", "n i o", torch.mm, (_r(8, 4), _r(4, 16))),
        "mv": Case("mv", "n i", torch.mv, (_r(8, 4), _r(4))),
        "dot": Case("dot", "i", torch.dot, (_r(8), _r(8))),
        "outer": Case("outer", "n o", torch.outer, (_r(8), _r(4))),
        "bmm": Case("bmm", "b n i o", torch.bmm, (_r(4, 8, 4), _r(4, 4, 16))),
        "baddbmm": Case("baddbmm", "b n i o", torch.baddbmm, (_r(4, 8, 16), _r(4, 8, 4), _r(4, 4, 16))),
        "baddbmm_scaled": Case(
            "baddbmm",
            "b n i o",
            lambda z, x, y: torch.baddbmm(z, x, y, beta=0.5, alpha=2.0),
            (_r(4, 1, 16), _r(4, 8, 4), _r(4, 4, 16)),
        ),
        "addmm_scaled": Case(
            "addmm", "n i o", lambda z, x, y: torch.addmm(z, x, y, beta=-1, alpha=0.5), (_r(16), _r(8, 4), _r(4, 16))
        ),
        "baddbmm_broadcast": Case("baddbmm", "b n i o", torch.baddbmm, (_r(1, 16), _r(4, 8, 4), _r(4, 4, 16))),
        "matmul": Case("matmul", "b2 b1 n i o", torch.matmul, (_r(4, 8, 8, 4), _r(4, 8, 4, 8))),
        "matmul_broadcast": Case("matmul", "b2 b1 n i o", torch.matmul, (_r(4, 8, 8, 4), _r(8, 4, 8))),
        "matmul_stretch": Case("matmul", "b2 b1 n i o", torch.matmul, (_r(4, 1, 8, 4), _r(1, 8, 4, 8))),
        "matmul_2d": Case("matmul", "b1 n i o", torch.matmul, (_r(4, 8, 4), _r(4, 8))),
        "matmul_vector": Case("matmul", "b1 n i", torch.matmul, (_r(4, 8, 4), _r(4))),
        "matmul_row": Case("matmul", "b1 i o", torch.matmul, (_r(4), _r(8, 4, 8))),
        "einsum": Case("einsum", "b h q d k", lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), heads[:2]),
        "einsum_summed": Case("einsum", "b i j", lambda x, y: torch.einsum("bi,j->b", x, y), (_r(8, 4), _r(4))),
        "einsum_dots": Case("einsum", ".2 .1 d e", lambda x, w: torch.einsum("...d,de->...e", x, w), (x, _r(8, 4))),
        "einsum_stretched": Case(
            "einsum", ".2 .1 i j", lambda x, y: torch.einsum("...i,...j->...ij", x, y), (_r(8, 1, 4), _r(4, 8))
        ),
        "einsum_implied": Case("einsum", "i j k", lambda x, y: torch.einsum("kj,ij", x, y), (_r(8, 4), _r(2, 4))),
        "embedding": Case("embedding", "v h b2 b1", lambda w, i: F.embedding(i, w), (_r(16, 8),), (_ids(16, 8, 4),)),
        "embedding_padding": Case(
            "embedding", "v h b1", lambda w, i: F.embedding(i, w, padding_idx=3), (_r(16, 8),), (_ids(4, 8),)
        ),
        "embedding_scaled": Case(
            "embedding", "h", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (_r(16, 8),), (_ids(4, 8),)
        ),
        "attention": Case("scaled_dot_product_attention", "b2 b1 q", _attention, heads),
        "attention_scale": Case(
            "scaled_dot_product_attention", "b2 b1 q", lambda q, k, v: _attention(q, k, v, scale=0.3), heads
        ),
        "attention_causal": Case(
            "scaled_dot_product_attention", "b2 b1", lambda q, k, v: _attention(q, k, v, is_causal=True), heads
        ),
        "attention_mask": Case("scaled_dot_product_attention", "b2 b1 q", _attention, heads, (_mask(4, 8, 8, 8),)),
        "attention_mask_row": Case("scaled_dot_product_attention", "b2 b1 q", _attention, heads, (_mask(4, 1, 1, 8),)),
        "attention_mask_2d": Case("scaled_dot_product_attention", "b2 b1 q", _attention, heads, (_mask(8, 8),)),
        "attention_bias": Case("scaled_dot_product_attention", "b2 b1 q", _attention, (*heads, _r(1, 8, 8, 8))),
        "attention_grouped": Case(
            "scaled_dot_product_attention", "b1 kv g q", lambda q, k, v: _attention(q, k, v, enable_gqa=True), grouped
        ),
        "attention_grouped_mask": Case(
            "scaled_dot_product_attention",
            "b1 kv g q",
            lambda q, k, v, m: _attention(q, k, v, m, enable_gqa=True),
            grouped,
            (_mask(4, 1, 8, 8),),
        ),
        "conv1d": Case(
            "conv1d", "n c o", lambda x, w, b: F.conv1d(x, w, b, padding=1), (_r(4, 8, 6), _r(16, 8, 3), _r(16))
        ),
        "conv2d": Case("conv2d", "n c o", F.conv2d, (_r(4, 8, 4, 4), _r(16, 8, 3, 3))),
        "conv2d_grouped": Case(
            "conv2d", "n g", lambda x, w, b: F.conv2d(x, w, b, groups=4), (_r(4, 8, 4, 4), _r(8, 2, 3, 3), _r(8))
        ),
        "conv2d_depthwise": Case(
            "conv2d", "n g", lambda x, w: F.conv2d(x, w, groups=8), (_r(4, 8, 4, 4), _r(8, 1, 3, 3))
        ),
        "conv_transpose2d": Case(
            "conv_transpose2d",
            "n c o",
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2),
            (_r(4, 8, 4, 4), _r(8, 4, 2, 2), _r(4)),
        ),
        "conv_transpose1d_grouped": Case(
            "conv_transpose1d", "n g", lambda x, w: F.conv_transpose1d(x, w, groups=4), (_r(4, 8, 4), _r(8, 2, 2))
        ),
        "conv2d_one_image": Case("conv2d", "", F.conv2d, (_r(8, 4, 4), _r(16, 8, 3, 3))),
        "conv2d_same": Case(
            "conv2d", "n c o", lambda x, w: F.conv2d(x, w, padding="same"), (_r(4, 8, 4, 4), _r(8, 8, 3, 3))
        ),
        "lstm": Case("lstm", "n", lstm, (_r(8, 3, 4), _r(12, 4), _r(12, 3), _r(12), _r(12), _r(1, 8, 3))),
        "gru": Case("gru", "n", gru, (_r(3, 8, 4), _r(9, 4), _r(9, 3), _r(9), _r(9), _r(1, 8, 3))),
        "bilinear": Case("bilinear", "", F.bilinear, (_r(8, 4), _r(8, 4), _r(8, 4, 4))),
    }


def reductions() -> dict[str, Case]:
    x, image = _r(8, 4, 8), _r(8, 4, 4, 8)
    return {
        "sum": Case("sum", "d0 d1 d2", torch.sum, (x,)),
        "sum_dim": Case("sum", "d0 d1 d2", lambda x: x.sum(1), (x,)),
        "sum_dims_keep": Case("sum", "d0 d1 d2", lambda x: x.sum((0, -1), keepdim=True), (x,)),
        "mean": Case("mean", "d0 d1 d2", torch.mean, (x,)),
        "mean_dim": Case("mean", "d0 d1 d2", lambda x: x.mean(-1), (x,)),
        "mean_keep": Case("mean", "d0 d1 d2", lambda x: x.mean((1, 2), True), (x,)),
        "amax": Case("amax", "d0 d2", lambda x: x.amax(1), (x,)),
        "amax_all": Case("amax", "", lambda x: x.amax(), (x,)),
        "max_dim": Case("max", "d0 d2", lambda x: x.max(1)[0], (x,)),
        "max_all": Case("max", "", lambda x: x.max(), (x,)),
        "logsumexp": Case("logsumexp", "d0 d1", lambda x: x.logsumexp(-1, keepdim=True), (x,)),
        "var": Case("var", "d0 d1", lambda x: x.var(-1, unbiased=False), (x,)),
        "var_mean": Case("var_mean", "d0 d1", lambda x: torch.var_mean(x, -1), (x,)),
        "linalg_norm": Case("linalg_norm", "d0 d1", lambda x: torch.linalg.norm(x, dim=-1, keepdim=True), (x,)),
        "argsort": Case("argsort", "d0 d1", lambda x: x.argsort(-1) * x, (x,)),
        "cosine": Case("cosine_similarity", "d3 d2", lambda x, y: F.cosine_similarity(x, y, -1), (x, _r(4, 8))),
        "std_all": Case("std", "", lambda x: x.std(), (x,)),
        "prod": Case("prod", "d0 d1", lambda x: x.prod(-1), (x,)),
        "norm": Case("linalg_vector_norm", "d0 d1", lambda x: x.norm(dim=-1), (x,)),
        "normalize": Case("linalg_vector_norm", "d0 d1", lambda x: F.normalize(x, dim=-1), (x,)),
        "softmax": Case("softmax", "d0 d1", lambda x: F.softmax(x, -1), (x,)),
        "softmax_middle": Case("softmax", "d0 d2", lambda x: F.softmax(x, 1), (x,)),
        "log_softmax": Case("log_softmax", "d0 d1", lambda x: F.log_softmax(x, -1), (x,)),
        "cumsum": Case("cumsum", "d0 d2", lambda x: x.cumsum(1), (x,)),
        "cumprod": Case("cumprod", "d0 d2", lambda x: x.cumprod(1), (x,)),
        "flip": Case("flip", "d0", lambda x: x.flip(1, 2), (x,)),
        "roll": Case("roll", "d0 d2", lambda x: x.roll(1, 1), (x,)),
        "roll_two": Case("roll", "d0", lambda x: x.roll((1, 2), (1, 2)), (x,)),
        "roll_flat": Case("roll", "", lambda x: x.roll(1), (x,)),
        "sort": Case("sort", "d0 d1", lambda x: x.sort(-1)[0], (x,)),
        "sort_first": Case("sort", "d1 d2", lambda x: x.sort(dim=0, descending=True)[0], (x,)),
        "topk": Case("topk", "d0 d1", lambda x: x.topk(2)[0], (x,)),
        "topk_dim": Case("topk", "d0 d2", lambda x: x.topk(2, 1)[0], (x,)),
        "layer_norm": Case("layer_norm", "d0 d1", lambda x, w, b: F.layer_norm(x, (8,), w, b), (x, _r(8), _r(8))),
        "layer_norm_2": Case("layer_norm", "d0", lambda x: F.layer_norm(x, (4, 8)), (x,)),
        "rms_norm": Case("rms_norm", "d0 d1", lambda x, w: F.rms_norm(x, (8,), w), (x, _r(8))),
        "group_norm": Case("group_norm", "n g", lambda x, w, b: F.group_norm(x, 4, w, b), (_r(4, 8, 4), _r(8), _r(8))),
        "instance_norm": Case(
            "instance_norm", "n c", lambda x, w, b: F.instance_norm(x, None, None, w, b), (_r(4, 8, 4), _r(8), _r(8))
        ),
        "batch_norm_statless": Case(
            "batch_norm", "c", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, _r(4), _r(4))
        ),
        "batch_norm_eval": Case(
            "batch_norm",
            "n c s0 s1",
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False),
            (image, _r(4), _r(4)),
            (_r(4), _positive(4)),
        ),
        "max_pool2d": Case("max_pool2d", "b2 b1", lambda x: F.max_pool2d(x, 2), (image,)),
        "avg_pool2d": Case("avg_pool2d", "b2 b1", lambda x: F.avg_pool2d(x, 2), (image,)),
        "adaptive_avg_pool2d": Case("adaptive_avg_pool2d", "b2 b1", lambda x: F.adaptive_avg_pool2d(x, 2), (image,)),
        "max_pool2d_one_image": Case("max_pool2d", "b1", lambda x: F.max_pool2d(x, 3, 1, 1), (_r(4, 8, 8),)),
        "max_pool1d": Case("max_pool1d", "b2 b1", lambda x: F.max_pool1d(x, 2), (x,)),
        "interpolate": Case("upsample_nearest2d", "b2 b1", lambda x: F.interpolate(x, scale_factor=2.0), (image,)),
        "bilinear_resize": Case(
            "upsample_bilinear2d", "b2 b1", lambda x: F.interpolate(x, (3, 5), mode="bilinear"), (image,)
        ),
        "pixel_shuffle": Case("pixel_shuffle", "b1 c", lambda x: F.pixel_shuffle(x, 2), (_r(4, 16, 2, 2),)),
    }


def losses() -> dict[str, Case]:
    z, classes, weight = _r(8, 16), _ids(16, 8), _positive(16)
    deep, deep_classes = _r(8, 16, 4), _ids(16, 8, 4)
    ignored = torch.where(torch.arange(8) < 5, -100, classes)
    soft = torch.softmax(_r(8, 16), -1)

    def mean(z: Tensor, y: Tensor, w: Tensor | None = None, **options: Any) -> Tensor:
        return F.cross_entropy(z, y, w, **options)

    return {
        "ce_sum": Case("cross_entropy_sum", "n v", lambda z, y: mean(z, y, reduction="sum"), (z,), (classes,)),
        "ce_mean": Case("cross_entropy_sum", "n v", mean, (z,), (ignored,)),
        "ce_count": Case("cross_entropy_count", "d0", mean, (z,), (ignored,)),
        "ce_weight": Case("cross_entropy_sum", "n v", mean, (z,), (ignored, weight)),
        "ce_count_weight": Case("cross_entropy_count", "d0", mean, (z,), (ignored, weight)),
        "ce_smooth": Case("cross_entropy_sum", "n v", lambda z, y: mean(z, y, label_smoothing=0.1), (z,), (ignored,)),
        "ce_smooth_weight": Case(
            "cross_entropy_sum",
            "n v",
            lambda z, y, w: mean(z, y, w, label_smoothing=0.1, ignore_index=3),
            (z,),
            (classes, weight),
        ),
        "ce_soft": Case("cross_entropy_sum", "n v", mean, (z,), (soft,)),
        "ce_soft_weight": Case(
            "cross_entropy_sum", "n v", lambda z, y, w: mean(z, y, w, label_smoothing=0.1), (z,), (soft, weight)
        ),
        "ce_soft_count": Case("cross_entropy_count", "d0", mean, (z,), (soft,)),
        "ce_deep": Case("cross_entropy_sum", "n v s0", mean, (deep,), (deep_classes,)),
        "ce_deep_soft": Case("cross_entropy_sum", "n v s0", mean, (deep,), (torch.softmax(_r(8, 16, 4), 1),)),
        "ce_deep_count": Case("cross_entropy_count", "d0 d1", mean, (deep,), (deep_classes,)),
        "ce_deep_soft_count": Case("cross_entropy_count", "d0 d2", mean, (deep,), (torch.softmax(_r(8, 16, 4), 1),)),
        "ce_one": Case("cross_entropy_sum", "v", mean, (_r(16),), (_ids(16),)),
        "ce_one_soft": Case("cross_entropy_sum", "v", mean, (_r(16),), (torch.softmax(_r(16), -1),)),
        "ce_one_soft_count": Case("cross_entropy_count", "", mean, (_r(16),), (torch.softmax(_r(16), -1),)),
        "ce_none": Case("cross_entropy_loss", "n", lambda z, y: mean(z, y, reduction="none"), (z,), (ignored,)),
        "ce_none_deep": Case(
            "cross_entropy_loss",
            "n s0",
            lambda z, y, w: mean(z, y, w, reduction="none"),
            (deep,),
            (deep_classes, weight),
        ),
        "nll_mean": Case("nll_loss_nd", "n", F.nll_loss, (z,), (ignored,)),
        "nll_sum": Case(
            "nll_loss_nd", "n s0", lambda z, y, w: F.nll_loss(z, y, w, reduction="sum"), (deep,), (deep_classes, weight)
        ),
        "nll_none": Case(
            "nll_loss_nd", "n s0", lambda z, y: F.nll_loss(z, y, reduction="none"), (deep,), (deep_classes,)
        ),
        "mse": Case("mse_loss", "d0 d1", F.mse_loss, (z, _r(8, 16))),
        "mse_sum": Case("mse_loss", "d0 d1", lambda x, y: F.mse_loss(x, y, reduction="sum"), (z,), (_r(8, 16),)),
        "mse_none": Case("mse_loss", "d0 d1", lambda x, y: F.mse_loss(x, y, reduction="none"), (z,), (_r(8, 16),)),
        "l1": Case("l1_loss", "d0 d1", F.l1_loss, (z,), (_r(8, 16),)),
        "smooth_l1": Case("smooth_l1_loss", "d0 d1", F.smooth_l1_loss, (z,), (_r(8, 16),)),
        "huber": Case("huber_loss", "d0 d1", F.huber_loss, (z,), (_r(8, 16),)),
        "bce": Case(
            "binary_cross_entropy", "d0 d1", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), (z,), (soft,)
        ),
        "bce_logits": Case(
            "binary_cross_entropy_with_logits", "d0 d1", F.binary_cross_entropy_with_logits, (z,), (soft,)
        ),
        "bce_weight": Case(
            "binary_cross_entropy_with_logits",
            "",
            lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
            (z,),
            (soft, weight),
        ),
        "kl_div": Case("kl_div", "d0 d1", lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="sum"), (z,), (soft,)),
    }


def elementwise() -> dict[str, Case]:
    x, y, row, column = _r(4, 8), _r(4, 8), _r(8), _r(4, 1)
    unary: dict[str, Function] = {
        "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp,
        "sin": torch.sin, "abs": torch.abs, "leaky_relu": F.leaky_relu, "elu": F.elu, "softplus": F.softplus,
        "hardswish": F.hardswish, "mish": F.mish, "square": torch.square, "neg": torch.neg, "erf": torch.erf,
        "logsigmoid": F.logsigmoid, "glu_gate": lambda x: x.sigmoid() * x,
    }  # fmt: skip
    names = {"logsigmoid": "log_sigmoid", "glu_gate": "sigmoid"}
    found = {n: Case(names.get(n, n), "d2 d1", function, (x,)) for n, function in unary.items()}
    return found | {
        "rsqrt": Case("rsqrt", "d2", lambda x: (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * x, (x,)),
        "clamp": Case("clamp", "d2 d1", lambda x: x.clamp(-0.5, 0.5), (x,)),
        "add": Case("add", "d2 d1", torch.add, (x, y)),
        "add_alpha": Case("add", "d2 d1", lambda x, y: torch.add(x, y, alpha=0.5), (x, row)),
        "add_row": Case("add", "d2 d1", torch.add, (x, row)),
        "add_outer": Case("add", "d2 d1", torch.add, (row, column)),
        "add_scalar": Case("add", "d2 d1", lambda x: x + 1.5, (x,)),
        "add_number": Case("add", "d2 d1", torch.add, (x, _r())),
        "sub": Case("sub", "d2 d1", torch.sub, (column, x)),
        "rsub": Case("rsub", "d2 d1", lambda x: 1.5 - x, (x,)),
        "mul": Case("mul", "d2 d1", torch.mul, (x, y)),
        "mul_column": Case("mul", "d2 d1", torch.mul, (x, column)),
        "mul_scalar": Case("mul", "d2 d1", lambda x: x * 1.5, (x,)),
        "mul_itself": Case("mul", "d2 d1", lambda x: x * x, (x,)),
        "div": Case("div", "d2 d1", torch.div, (x, _positive(8))),
        "div_scalar": Case("div", "d2 d1", lambda x: x / 3, (x,)),
        "div_floor": Case("div", "d2 d1", lambda x: torch.div(x, 0.3, rounding_mode="floor") * x, (x,)),
        "pow": Case("pow", "d2 d1", lambda x: x.pow(3), (x,)),
        "pow_tensor": Case("pow", "d2 d1", torch.pow, (_positive(4, 8), row)),
        "max_other": Case("max", "d2 d1", torch.max, (x, row)),
        "reciprocal": Case("reciprocal", "d2 d1", lambda x: 2 / x, (_positive(4, 8),)),
        "maximum": Case("maximum", "d2 d1", torch.maximum, (x, row)),
        "lerp": Case("lerp", "d2 d1", lambda x, y: torch.lerp(x, y, 0.3), (x, y)),
        "addcmul": Case("addcmul", "d2 d1", torch.addcmul, (x, y, row)),
        "where": Case("where", "d2 d1", lambda x, y, m: torch.where(m, x, y), (x, row), (_mask(4, 1),)),
        "where_scalar": Case("where", "d2 d1", lambda x, m: torch.where(m, x, 2.0), (x,), (_mask(8),)),
        "masked_fill": Case("masked_fill", "d2 d1", lambda x, m: x.masked_fill(m, 2.0), (x,), (_mask(4, 8),)),
        "masked_fill_row": Case("masked_fill", "d2 d1", lambda x, m: x.masked_fill(m, 0.0), (x,), (_mask(8),)),
        "masked_fill_tensor": Case("masked_fill", "d2 d1", lambda x, v, m: x.masked_fill(m, v), (x, _r()), (_mask(8),)),
        "compare": Case("gt", "d2 d1", lambda x, y: (x > y) * x, (x, row)),
        "logical": Case(
            "logical_and", "d2 d1", lambda x, m, n: torch.logical_and(m, n) * x, (x,), (_mask(4, 8), _mask(8))
        ),
        "and": Case("__and__", "d2 d1", lambda x, m, n: (m & n) * x, (x,), (_mask(4, 8), _mask(8))),
        "not": Case("logical_not", "d2 d1", lambda x, m: torch.logical_not(m) * x, (x,), (_mask(4, 8),)),
        "to": Case("_to_copy", "d2 d1", lambda x: x.to(torch.complex128).real, (x,)),
        "detach": Case("detach", "d2 d1", lambda x: x.detach() * x, (x,)),
        "prelu": Case("prelu", "d0 d1 d2", F.prelu, (_r(4, 8, 8), _r(8))),
        "ones_like": Case("ones_like", "d2 d1", lambda x: torch.ones_like(x) * 2 * x, (x,)),
        "zeros_like": Case("zeros_like", "d2 d1", lambda x: torch.zeros_like(x) + x, (x,)),
        "full_like": Case("full_like", "d2 d1", lambda x: torch.full_like(x, 2) * x, (x,)),
        "new_ones": Case("full", "d0 d1", lambda x: x.new_ones((4, 8)) * x, (x,)),
        "full": Case("full", "d0 d1", lambda x: torch.full((4, 8), 2.0, dtype=torch.float64) * x, (x,)),
        "glu": Case("glu", "d0", lambda x: F.glu(x, -1), (x,)),
    }


def views() -> dict[str, Case]:
    x, fused, heads = _r(8, 4, 8), _r(8, 24), _r(4, 8, 8, 4)
    two = (_r(8, 4), _r(8, 4))

    def rotary(x: Tensor) -> Tensor:
        left, right = x[..., :4], x[..., 4:]
        return torch.cat((-right, left), -1)

    return {
        "view_merge": Case("view", "v0 v1 v2", lambda x: x.view(32, 8), (x,)),
        "view_split": Case("view", "v0 v1 v2 v3", lambda x: x.view(8, 4, 2, 4), (x,)),
        "view_fused": Case("view", "v0 v2 v3", lambda x: x.view(8, 3, 2, 4), (fused,)),
        "view_not_nesting": Case("view", "v0", lambda x: x.view(8, 6, 4), (_r(8, 4, 6),)),
        "view_ones": Case("view", "v0 v1", lambda x: x.view(1, 8, 1, 4), (_r(8, 1, 4),)),
        "view_flat": Case("view", "v0 v1 v2", lambda x: x.reshape(-1), (x,)),
        "unsqueeze": Case("unsqueeze", "v0 v1 v2", lambda x: x[:, None], (x,)),
        "squeeze": Case("view", "v0 v1", lambda x: x.squeeze(1), (_r(8, 1, 4),)),
        "transpose": Case("transpose", "d0 d1 d2", lambda x: x.transpose(1, -1), (x,)),
        "permute": Case("permute", "d0 d1 d2", lambda x: x.permute(2, 0, 1), (x,)),
        "t": Case("t", "d0 d1", lambda x: x.t(), (fused,)),
        "movedim": Case("permute", "d0 d1 d2", lambda x: x.movedim(0, -1), (x,)),
        "expand": Case("expand", "d0 d1 d2", lambda x: x.expand(4, 8, 8), (_r(8, 1),)),
        "expand_minus": Case("expand", "d0 d1 d2", lambda x: x[:, None].expand(-1, 4, -1), (_r(8, 8),)),
        "repeat": Case("repeat", "d0 d1", lambda x: x.repeat(2, 3), (_r(8, 4),)),
        "repeat_more": Case("repeat", "d1 d2", lambda x: x.repeat(2, 1, 3), (_r(8, 4),)),
        "tile": Case("tile", "d0 d1", lambda x: x.tile(3), (_r(8, 4),)),
        "repeat_each": Case("repeat_interleave", "d0 d1 d2", lambda x: x.repeat_interleave(2, 1), (x,)),
        "repeat_heads": Case(
            "view", "v0 v1 v2 v3", lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(8, 8, 8), (x,)
        ),
        "slice_half": Case("slice", "d0 d1 r", lambda x: x[..., 4:], (x,)),
        "slice_fused": Case("slice", "d0 r", lambda x: x[:, 8:16], (fused,)),
        "slice_from_end": Case("slice", "d0 r", lambda x: x[:, -8:], (fused,)),
        "slice_before_end": Case("slice", "d0 r", lambda x: x[:, -16:-8], (fused,)),
        "slice_uneven": Case("slice", "d0 d1", lambda x: x[..., 1:7], (x,)),
        "slice_step": Case("slice", "d0 d1", lambda x: x[..., ::2], (x,)),
        "slice_first": Case("slice", "d1 d2 r", lambda x: x[:4], (x,)),
        "rotate_half": Case("cat", "d0 d1 r", rotary, (x,)),
        "narrow": Case("slice", "d0 r", lambda x: x.narrow(1, 8, 8), (fused,)),
        "select": Case("select", "d0 d2", lambda x: x[:, 1], (x,)),
        "select_last": Case("select", "d0 d1", lambda x: x[..., -1], (x,)),
        "select_first": Case("select", "d1 d2", lambda x: x[0], (x,)),
        "unbind": Case("unbind", "d0 d2", lambda x: x.unbind(1), (x,)),
        "split": Case("split", "d0 r", lambda x: x.split(8, -1), (fused,)),
        "split_first": Case("split", "d1 r", lambda x: x.split(4), (fused,)),
        "split_uneven": Case("split", "d0", lambda x: x.split(10, -1), (fused,)),
        "split_sizes": Case("split_with_sizes", "d0 r", lambda x: x.split([8, 8, 8], -1), (fused,)),
        "split_sizes_uneven": Case("split_with_sizes", "d0", lambda x: x.split([16, 4, 4], -1), (fused,)),
        "chunk": Case("split_with_sizes", "d0 r", lambda x: x.chunk(3, 1), (fused,)),
        "cat": Case("cat", "r d1", lambda x, y: torch.cat((x, y)), two),
        "cat_last": Case("cat", "d0 r", lambda x, y: torch.cat((x, y), -1), two),
        "cat_itself": Case("cat", "d0 r", lambda x: torch.cat((x, x), -1), (_r(8, 4),)),
        "cat_uneven": Case("cat", "d0", lambda x, y: torch.cat((x, y), -1), (_r(8, 4), _r(8, 8))),
        "stack": Case("stack", "d0 d1", lambda x, y: torch.stack((x, y), 1), two),
        "stack_last": Case("stack", "d0 d1", lambda x, y: torch.stack((x, y), -1), two),
        "pad": Case("pad", "d0 d1", lambda x: F.pad(x, (1, 2)), (x,)),
        "pad_value": Case("pad", "d0 d1", lambda x: F.pad(x, (1, 2), value=1.5), (x,)),
        "pad_reflect": Case("pad", "d0 d1", lambda x: F.pad(x, (1, 2), mode="reflect"), (x,)),
        "pad_shift": Case("pad", "d0 d1", lambda x: F.pad(x, (1, -1)), (x,)),
        "index": Case("index", "i2 i1 r0", lambda w, i: w[i], (_r(16, 8),), (_ids(16, 8, 4),)),
        "index_pair": Case("index", "i1 r0", lambda w, i, j: w[i, j], (_r(16, 8, 4),), (_ids(16, 8), _ids(8, 8))),
        "index_broadcast": Case(
            "index", "i2 i1 r0", lambda w, i, j: w[i, j], (_r(8, 8, 4),), (_ids(8, 8, 1), _ids(8, 4))
        ),
        "index_middle": Case("index", "l0 i1 r0", lambda w, i: w[:, i], (_r(8, 16, 4),), (_ids(16, 8),)),
        "index_mask": Case("where", "d2 d1", lambda w, m: torch.where(m, w, 0.0), (_r(8, 4),), (_mask(8, 4),)),
        "index_rows": Case("gather", "d0 d2", lambda w, i: w[torch.arange(8), i - 4], (x,), (_ids(8, 8),)),
        "index_some_rows": Case(
            "gather", "d0 i1 d2", lambda w, i: w[torch.arange(8)[:, None], i], (x,), (_ids(4, 8, 2),)
        ),
        "index_columns": Case(
            "index_select", "d0 i d2", lambda w, i: w[torch.arange(8)[:, None], i], (x,), (_ids(4, 1, 8),)
        ),
        "one_hot": Case("one_hot", "d0", lambda w, i: w * F.one_hot(i, 4), (_r(8, 4),), (_ids(4, 8),)),
        "im2col": Case("im2col", "n c", lambda x: F.unfold(x, 2), (_r(4, 8, 3, 3),)),
        "col2im": Case("col2im", "n c", lambda x: F.fold(x, (3, 3), 2), (_r(4, 32, 4),)),
        "expand_as": Case("expand", "d0 d1 d2", lambda x, y: x.expand_as(y) * y, (_r(8, 1), _r(4, 8, 8))),
        "index_select": Case("index_select", "d0 i d2", lambda w, i: w.index_select(1, i), (x,), (_ids(4, 8),)),
        "gather": Case("gather", "d0 i1 d2", lambda w, i: w.gather(1, i), (x,), (_ids(4, 8, 2, 8),)),
        "gather_last": Case("gather", "d0", lambda w, i: w.gather(-1, i), (_r(8, 16),), (_ids(16, 8, 1),)),
        "gather_narrow": Case("gather", "d0 i2", lambda w, i: w.gather(2, i), (x,), (_ids(8, 8, 2, 4),)),
        "scatter": Case("scatter", "d0", lambda w, i: w.scatter(1, i, w[:, :1]), (_r(8, 4),), (_ids(4, 8, 1),)),
        "scatter_value": Case("scatter", "d0 d2", lambda w, i: w.scatter(1, i, 2.0), (x,), (_ids(4, 8, 2, 8),)),
        "scatter_add": Case(
            "scatter_add", "d0 d2 t", lambda w, v, i: w.scatter_add(1, i, v), (x, _r(8, 4, 8)), (_ids(4, 8, 4, 8),)
        ),
        "slice_scatter": Case("slice_scatter", "d0 d2", lambda w, v: w.slice_scatter(v, 1, 1, 3), (x, _r(8, 2, 8))),
        "select_scatter": Case("select_scatter", "d0 d2", lambda w, v: w.select_scatter(v, 1, 2), (x, _r(8, 8))),
        "complex": Case(
            "view_as_complex",
            "d0 d1",
            lambda x: torch.view_as_complex(x) * torch.view_as_complex(x + 1),
            (_r(8, 4, 2),),
        ),
        "diff_more": Case("diff", "d0", lambda x, y: x.diff(dim=1, prepend=y), (fused, _r(8, 2))),
        "diff": Case("diff", "d0 d1", lambda x: x.diff(), (x,)),
        "tril": Case("tril", "d0", lambda x: x.tril(), (x,)),
        "triu": Case("triu", "", lambda x: x.triu(1), (fused,)),
        "unfold": Case("unfold", "d0 d1", lambda x: x.unfold(-1, 4, 2), (x,)),
        "diagonal": Case("diagonal", "d0", lambda x: x.diagonal(dim1=1, dim2=2), (x,)),
        "head_transpose": Case("view", "v0 v1 v2 v3", lambda x: x.transpose(1, 2).reshape(4, 8, 32), (heads,)),
    }


def writes() -> dict[str, Case]:
    """Functions that write in place: tracing takes them apart into operators that do not."""

    def write_part(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 1:3] += 1
        return y

    def write_row(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = y[:, 1, :1]
        return y

    def write_dtype(x: Tensor) -> Tensor:
        y = x.float()
        y[:, 0] = x[:, 1]
        return y

    x = _r(8, 4, 8)
    return {
        "write_part": Case("slice_scatter", "d0 d2", write_part, (x,)),
        "write_row": Case("select_scatter", "d0 d2", write_row, (x,)),
        "write_dtype": Case("select_scatter", "d0 d2", write_dtype, (x,)),
        "constant": Case("mul", "d1 d2 d3", lambda x: x * torch.tensor([1.0, -2.0, 3.0, 0.5] * 2).double(), (x,)),
        "add_in_place": Case("add", "d1 d2 d3", lambda x: (x * 2).add_(1), (x,)),
        "relu_in_place": Case("relu", "d1 d2 d3", lambda x: F.relu(x * 2, inplace=True), (x,)),
    }


def spellings() -> dict[str, Case]:
    """Other names of operators that have a rule."""
    x, y = _r(8, 4, 8), _r(8, 4, 8)
    whole, last = "d0 d1 d2", "d0 d1"
    return {
        "mT": Case("permute", whole, lambda x: x.mT, (x,)),
        "T": Case("permute", "d0 d1", lambda x: x.T, (_r(8, 4),)),
        "adjoint": Case("permute", whole, lambda x: x.adjoint(), (x,)),
        "swapaxes": Case("permute", whole, lambda x: x.swapaxes(0, -1), (x,)),
        "movedim_pair": Case("permute", whole, lambda x: x.movedim((0, 1), (-1, 0)), (x,)),
        "ravel": Case("view", "v0 v1 v2", lambda x: x.ravel(), (x,)),
        "view_as": Case("view", "v0 v1 v2", lambda x, y: x.view_as(y) * y, (x, _r(32, 8))),
        "broadcast_to": Case("expand", "d1 d0", lambda x: x.broadcast_to(4, 8), (_r(8),)),
        "narrow": Case("slice", "d0 d1 r", lambda x: x.narrow(-1, 4, 4), (x,)),
        "narrow_from_end": Case("slice", "d0 d1 r", lambda x: x.narrow(2, -4, 4), (x,)),
        "tensor_split": Case("split_with_sizes", "d0 d1", lambda x: x.tensor_split((2, 4), -1), (x,)),
        "chunk_uneven": Case("split_with_sizes", "d0 d1", lambda x: x.chunk(3, -1), (x,)),
        "hsplit": Case("split_with_sizes", "d0 d2 r", lambda x: x.hsplit(2), (x,)),
        "vsplit": Case("split_with_sizes", "r d1 d2", lambda x: x.vsplit(2), (x,)),
        "dsplit": Case("split_with_sizes", "d0 d1 r", lambda x: x.dsplit(2), (x,)),
        "concat": Case("cat", "d0 d1 r", lambda x, y: torch.concat((x, y), -1), (x, y)),
        "vstack": Case("cat", "r d1 d2", lambda x, y: torch.vstack((x, y)), (x, y)),
        "hstack": Case("cat", "d0 r d2", lambda x, y: torch.hstack((x, y)), (x, y)),
        "dstack": Case("cat", "d0 d1 r", lambda x, y: torch.dstack((x, y)), (x, y)),
        "take_along": Case("gather", "d0 d1", lambda x: x.take_along_dim(x.argmax(-1, True), -1), (x,)),
        "clip": Case("clip", "d1 d2 d3", lambda x: x.clip(-0.5, 0.5), (x,)),
        "greater": Case("greater", "d1 d2 d3", lambda x, y: torch.greater(x, y) * x, (x, y)),
        "norm_all": Case("linalg_vector_norm", "", lambda x: x.norm(), (x,)),
        "norm_dim": Case("linalg_vector_norm", last, lambda x: torch.norm(x, p=3, dim=-1), (x,)),
        "pixel_unshuffle": Case("pixel_unshuffle", "b1 c", lambda x: F.pixel_unshuffle(x, 2), (_r(4, 8, 4, 4),)),
        "real": Case("real", "d1 d2", lambda x: torch.view_as_complex(x).real, (_r(8, 4, 2),)),
        "median": Case("median", last, lambda x: x.median(-1)[0], (x,)),
    }
