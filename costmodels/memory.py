"""What a device has to hold: tensors that autograd keeps for backward, and weights, gradients and optimizer state.

**Saved tensors.** ``saved_for_backward_bytes`` names them, so that a caller counts each storage once, however many
operators save it: ``("input", i)`` and ``("output", i)`` are tensors of the call, ``("extra", b)`` is ``b`` bytes
that exist only for backward (statistics of a norm, a dropout mask, log-probabilities). Parameters are named like any
input; it is the caller who knows that they are held anyway. Source: the derivative formulas of PyTorch
(tools/autograd/derivatives.yaml); the tests compare with what autograd really packs.

**State.** With P bytes of parameters on a device before ZeRO, and N data-parallel ranks:

                    weights     gradients   adamw      sgd-momentum   sgd
    ZeRO 0          P           P           2 P        P              0
    ZeRO 1          P           P           2 P / N    P / N          0
    ZeRO 2          P           P / N       2 P / N    P / N          0
    ZeRO 3          P / N       P / N       2 P / N    P / N          0

(Rajbhandari et al., ZeRO, 2020; moments in the dtype of the parameters; other software may
hold other bytes of an element, costmodels.software.) With ZeRO 3 segments are gathered one by
one, the next one while one computes: the two largest exist whole at the worst moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.operators import (
    DROPOUTS,
    DTYPE_BYTES,
    HALF,
    METADATA,
    Hint,
    Tensor,
    attention_is_fused,
    base_name,
    hinted,
    is_floating,
    is_view,
    numel,
    size_bytes,
)
from costmodels.software import OURS, Software

Saved = tuple[tuple[str, int], ...]
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")

_NOTHING = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "concat", "clone", "contiguous", "_to_copy", "to",
    "type_as", "repeat", "cumsum", "roll", "flip", "rot90", "constant_pad_nd", "pad", "lerp", "zeros_like", "ones_like",
    "full_like", "empty_like", "upsample_nearest2d", "upsample_bilinear2d", "copy", "ceil", "floor", "round", "trunc",
    "sign", "detach", "triu", "tril", "select_scatter", "slice_scatter", "pixel_shuffle", "pixel_unshuffle", "fill",
    "zero", "tile", "repeat_interleave", "col2im", "im2col", "trace", "diag", "bernoulli", "affine_grid_generator",
    "slice_backward", "new_zeros", "new_ones",
})  # fmt: skip
_OUTPUT = frozenset({
    "relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "exp2", "expm1", "sqrt",
    "rsqrt", "reciprocal", "tan", "_safe_softmax",
})  # fmt: skip
_INPUT = frozenset({
    "gelu", "glu", "silu", "log", "log2", "log10", "log1p", "sin", "cos", "abs", "square", "softplus", "mish",
    "hardswish", "hardsigmoid", "hardtanh", "relu6", "elu", "selu", "celu", "leaky_relu", "clamp", "clamp_min",
    "clamp_max", "var", "erf", "erfinv", "sinh", "cosh", "atan", "asin", "acos", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool3d", "threshold", "hardshrink",
    "softshrink", "logit", "lgamma", "digamma",
})  # fmt: skip
_INPUT_AND_OUTPUT = frozenset({
    "logsumexp", "norm", "linalg_vector_norm", "amax", "amin", "prod", "std", "cumprod", "logcumsumexp",
})  # fmt: skip
_BOTH_OPERANDS = frozenset({
    "maximum", "minimum", "fmax", "fmin", "mse_loss", "smooth_l1_loss", "huber_loss", "atan2",
    "binary_cross_entropy_with_logits", "binary_cross_entropy", "soft_margin_loss", "prelu",
    "_prelu_kernel", "convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
_INDICES = frozenset({
    "embedding", "embedding_bag", "index", "index_select", "take_along_dim", "scatter", "scatter_add",
    "index_put", "masked_fill", "where", "index_fill", "masked_scatter", "index_copy", "take",
})  # fmt: skip
_POOLS = frozenset({
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_max_pool2d",
})  # fmt: skip
_LAYER_NORMS = frozenset({"layer_norm", "native_layer_norm"})
_RMS_NORMS = frozenset({"rms_norm", "_fused_rms_norm"})
_GROUP_NORMS = frozenset({"group_norm", "native_group_norm"})
_INDEX_OUTPUTS = frozenset({"max", "min", "topk", "sort", "median", "kthvalue", "mode", "cummax", "cummin"})
# Products of two factors and where these stand: each is kept for the gradient of the other.
_PRODUCTS = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul", "linalg_matmul", "mv", "dot", "inner", "outer", "mul"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm", "addcmul"), (1, 2)),
    "einsum": (0, 1),
}


@lru_cache(maxsize=65536)
def saved_for_backward_bytes(
    op: str,
    input_tensors: tuple[Tensor, ...],
    output_tensors: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    hint: Hint = (),
    kind: str = "gpu",
) -> Saved:
    """What autograd keeps of one call: ("input", i), ("output", i) and at most one ("extra", bytes).

    Tensors are (shape, dtype name); ``needs_grad[i]``: input i needs a gradient; ``kind`` of the device, 'gpu' or
    'cpu'. An operator not known here is taken to save its floating inputs and outputs.
    """
    name = base_name(op)
    differentiable = any(needs_grad) and any(is_floating(dtype) for _, dtype in output_tensors)
    if not differentiable or name in METADATA or is_view(op, input_tensors, output_tensors, hint):
        return ()
    extra = _extra_bytes(name, input_tensors, output_tensors, needs_grad, hint, kind)
    inputs, outputs = _kept(name, input_tensors, output_tensors, needs_grad, hint, kind)
    saved = [("input", i) for i in inputs if i < len(input_tensors)]
    saved += [("output", i) for i in outputs if i < len(output_tensors)]
    return (*saved, ("extra", extra)) if extra else tuple(saved)


def _kept(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    hint: Hint,
    kind: str,
) -> tuple[Iterable[int], Iterable[int]]:
    """Positions of the inputs and outputs that are kept."""
    floating = [i for i, (_, dtype) in enumerate(inputs) if is_floating(dtype)]
    others = [i for i, (_, dtype) in enumerate(inputs) if not is_floating(dtype)]
    indices = [i for i, (_, dtype) in enumerate(outputs) if not is_floating(dtype)]
    statistics = range(1, len(outputs))
    if name in _NOTHING or name == "l1_loss":
        return (), ()
    if name in DROPOUTS:
        return (), statistics
    if name in _OUTPUT:
        return (), (0,)
    if name in _INPUT:
        pooled_whole = name == "adaptive_avg_pool2d" and math.prod(outputs[0][0][-2:]) == 1  # a mean
        return ((), ()) if pooled_whole else ((0,), ())
    if name in _INPUT_AND_OUTPUT:
        return (0,), (0,)
    if name == "pow":
        return floating, (0,) if len(floating) > 1 else ()
    if name in _PRODUCTS:
        left, right = _PRODUCTS[name]
        if right >= len(inputs):
            return (), ()  # the other factor is a number
        if name == "einsum" and len(inputs) > 2:
            return floating, ()
        return [i for i, other in ((left, right), (right, left)) if needs_grad[other]], ()
    if name == "div":
        return ([0, 1] if needs_grad[1] else [1], ()) if len(inputs) > 1 else ((), ())
    if name in _BOTH_OPERANDS or name in ("max", "min") and len(inputs) > 1:
        return (0, 1), ()
    if name in ("max", "min") and not indices:
        return (0,), (0,)
    if name in _INDEX_OUTPUTS:
        return (), indices
    if name in _POOLS:
        return (0,), indices
    if name in _INDICES:
        return others, indices
    if name == "kl_div":
        return (1,), ()
    if name in ("gather", "index_add"):
        return (*others, 0 if name == "gather" else 2), ()
    if name in _RMS_NORMS and kind == "cpu" and inputs[0][1] in HALF:
        return floating[1:], statistics
    if name in _LAYER_NORMS or name in _RMS_NORMS:
        return floating, statistics
    if name in _GROUP_NORMS:
        return floating[:2], statistics
    if name == "instance_norm":
        return (0,), ()
    if "batch_norm" in name:
        return [i for i in floating if i != 2], range(1, min(3, len(outputs)))  # the others are the running ones
    if name == "cross_entropy_loss":
        return range(1, len(inputs)), ()
    if name.startswith("nll_loss"):
        return range(len(inputs)), statistics
    if name == "scaled_dot_product_attention":
        if not _fused(inputs, needs_grad, hint, kind):
            return (2,), ()
        return [i for i in range(len(inputs)) if is_floating(inputs[i][1])], (0,)
    return floating, [i for i in range(len(outputs)) if i not in indices]


def _extra_bytes(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    hint: Hint,
    kind: str,
) -> int:
    """Bytes that exist only for backward: of no tensor of the call."""
    shape, dtype = inputs[0]
    count, element = numel(shape), DTYPE_BYTES[dtype]
    # Statistics of half-precision tensors are float32 on GPUs.
    statistic = max(4, element) if kind == "gpu" else element
    if name in DROPOUTS and len(outputs) == 1:
        # GPUs keep a mask of bytes, CPUs a noise tensor of the input's dtype.
        return count * (1 if kind == "gpu" else element)
    if name in _LAYER_NORMS and len(outputs) == 1:
        return 2 * count // _normalised(inputs, hint) * statistic
    if name == "rms_norm":
        rows = count // _normalised(inputs, hint)
        if kind == "gpu":
            return rows * statistic
        # CPUs have no fused kernel: the normalised tensor is kept too, and both in float32.
        wide = max(4, element)
        return (rows + (2 if dtype in HALF else 1) * count) * wide
    if name == "group_norm":
        groups = hinted(hint, "num_groups", 1)
        return 2 * shape[0] * (groups if isinstance(groups, int) else 1) * statistic
    if name == "instance_norm":
        return (3 if len(inputs) > 1 else 2) * math.prod(shape[:2]) * statistic
    if name == "batch_norm":
        return 2 * shape[1] * statistic if hinted(hint, "training", True) is True else 0
    if name in ("cross_entropy_loss", "l1_loss"):
        return max(size_bytes(tensor) for tensor in inputs if is_floating(tensor[1]))
    if name in _POOLS and len(outputs) == 1:
        return numel(outputs[0][0]) * DTYPE_BYTES["int64"]
    if name == "scaled_dot_product_attention" and len(inputs) > 2:
        return _attention_bytes(inputs, needs_grad, hint, kind)
    return 0


def _normalised(inputs: tuple[Tensor, ...], hint: Hint) -> int:
    """Elements that one statistic of a layer norm covers."""
    shape = hinted(hint, "normalized_shape")
    if isinstance(shape, tuple):
        return math.prod(shape)
    return math.prod(inputs[1][0]) if len(inputs) > 1 else inputs[0][0][-1]


def _fused(inputs: tuple[Tensor, ...], needs_grad: tuple[bool, ...], hint: Hint, kind: str) -> bool:
    return attention_is_fused(inputs[0][1], kind, hint, len(needs_grad) > 3 and needs_grad[3])


def attention_statistics_bytes(queries: Tensor) -> int:
    """Bytes of the log of each query's sum, which fused attention makes for its backward."""
    shape, dtype = queries
    return math.prod(shape[:-1]) * max(4, DTYPE_BYTES[dtype])


def _attention_bytes(inputs: tuple[Tensor, ...], needs_grad: tuple[bool, ...], hint: Hint, kind: str) -> int:
    """Fused: the log of each query's sum, and a boolean mask as numbers.

    Unfused: scaled queries and keys and the probabilities, with dropout also those it leaves and its mask.
    """
    (q, dtype), (k, _) = inputs[0], inputs[1]
    rows, element = math.prod(q[:-1]), DTYPE_BYTES[dtype]
    mask = sum(numel(shape) * element for shape, mask_dtype in inputs[3:] if mask_dtype == "bool")
    if _fused(inputs, needs_grad, hint, kind):
        return attention_statistics_bytes(inputs[0]) + mask
    scaled = size_bytes(inputs[0]) + size_bytes(inputs[1])
    matrix = rows * k[-2]
    if not hinted(hint, "dropout_p", 0.0):
        return scaled + matrix * element
    return scaled + matrix * (2 * element + (1 if kind == "gpu" else element))


@dataclass(frozen=True)
class StateBytes:
    """Bytes one device holds all step long."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def state_bytes(
    parameter_bytes: int,
    dtype: str,
    optimizer: str = "adamw",
    zero: int = 0,
    dp: int = 1,
    *,
    trainable_bytes: int | None = None,
    software: Software = OURS,
) -> StateBytes:
    """Weights, gradients and optimizer state of a device that holds ``parameter_bytes`` of ``dtype`` before ZeRO.

    ``zero``: 0; 1 to shard the optimizer state over ``dp`` ranks (rounded up), 2 the gradients too, 3 the weights too.
    ``trainable_bytes``: the part that is trained
    (default: all). ``software``: what it holds of an element of a weight, gradient and state, if not its dtype.
    Raises ValueError for an unknown optimizer, dtype or ZeRO stage.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; the memory model knows {', '.join(OPTIMIZERS)}")
    if zero not in range(4):
        raise ValueError(f"there is no ZeRO stage {zero}; choose 0, 1, 2 or 3")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; the memory model knows {', '.join(DTYPE_BYTES)}")
    if dp < 1 or parameter_bytes < 0:
        raise ValueError(f"cannot place {parameter_bytes} bytes of parameters on {dp} data-parallel ranks")
    ranks = [dp if zero >= stage else 1 for stage in (3, 2, 1)]
    trained = parameter_bytes if trainable_bytes is None else trainable_bytes
    element = DTYPE_BYTES[dtype]
    elements = trained // element
    moments = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}[optimizer] * trained
    sizes = (
        parameter_bytes // element * software.weight_bytes if software.weight_bytes else parameter_bytes,
        elements * software.gradient_bytes if software.gradient_bytes else trained,
        elements * software.optimizer_bytes if software.optimizer_bytes else moments,
    )
    return StateBytes(*(-(-size // n) for size, n in zip(sizes, ranks, strict=True)))


def gathered_bytes(segment_weight_bytes: Sequence[int]) -> int:
    """Whole weights that exist at once with ZeRO 3: those of the two largest segments (one computing, one prefetched).

    ``segment_weight_bytes``: bytes of each segment's weights on a device before ZeRO.
    """
    return sum(sorted(segment_weight_bytes)[-2:])
