"""Floating-point operations, memory traffic and time of one operator on one device, forward and backward.

A roofline: an operator takes the longer of computing and moving.

    work = max(flops / (peak x matmul_efficiency), bytes / (bandwidth x memory_efficiency))

A CPU launches operators itself (``on_device_s``); a GPU works them off while the host launches further ones, so that a
sequence takes as long as the slower of both (``Device.host_s``):

    sum(work + kernel_launch)   CPU            max(sum work, sum kernel_launch)   GPU

A matrix product (m x k by k x n, ``batch`` of them) is cut into tiles that the device's c multiprocessors work off in
rounds. The library picks the fastest of a few tiles (_TILES): large ones, of T x T (``matmul_tile``) and twice as many
elements, run at ``matmul_efficiency``; small ones, of which more fit, at _SMALL_TILES of that. Lost are:

    quantisation    edge tiles are computed whole: m and n count as their multiples of the tile's sides
    waves           the last round is not full. Blocks of one round start as others of it end, so part of the loss is
                    made up for: t tiles take  w ceil(t / c) + (1 - w) max(t / c, 1)  rounds, w = _WHOLE_ROUNDS
    alignment       where rows of the operands (k and n elements) are no multiple of ``alignment_bytes``, loads are narrower:
                    _UNALIGNED by how many elements are loaded at once

so a shard of a small product gains less than its share of the work. Source of the effects: NVIDIA, Matrix
Multiplication Background User's Guide. The three constants and A100's efficiency are fitted to the 655 products in
half precision that EleutherAI's cookbook (sizing/results, 27dff48) measured on A100: mean error 5.8 %.

Backward of a product: one product of equal size for each operand that needs a gradient, and a sum over the output's
gradient for a bias. Backward of anything else moves the output's gradient, the saved tensors (costmodels.memory) and
the gradients it writes.

Attention (b heads, q queries, k keys, widths d and v): 2 b q k (d + v) operations forward. The fused kernel moves
only its operands and, in backward, computes the scores again: five products for two, 2.5 times the forward (Dao,
FlashAttention-2, 2023, section 4.1); with ``is_causal`` it skips half of the blocks, which the time and not the count
shows. The unfused one moves the (q x k) matrix six times each way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from costmodels.hardware import Device
from costmodels.matmuls import Matmul, addend, matmuls
from costmodels.memory import saved_for_backward_bytes
from costmodels.operators import (
    DTYPE_BYTES,
    HALF,
    METADATA,
    Hint,
    Shape,
    Tensor,
    attention_is_fused,
    base_name,
    hinted,
    is_floating,
    is_view,
    numel,
    size_bytes,
)
from costmodels.views import over_several

ATTENTION = "scaled_dot_product_attention"
_REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "norm", "linalg_vector_norm", "amax", "amin", "max", "min", "argmax", "argmin", "prod",
    "logsumexp", "all", "any", "var_mean", "std_mean", "mse_loss", "l1_loss", "nll_loss", "cross_entropy_loss",
    "binary_cross_entropy_with_logits", "smooth_l1_loss", "huber_loss", "kl_div",
})  # fmt: skip
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take_along_dim", "embedding_bag"})
# (height, width) in sides of ``matmul_tile``, and the rate relative to ``matmul_efficiency``.
_SMALL_TILES = 0.87
_TILES = (
    (2, 1, 1.0), (1, 2, 1.0), (1, 1, 1.0), (1, 0.5, _SMALL_TILES), (0.5, 1, _SMALL_TILES), (0.5, 0.5, _SMALL_TILES),
)  # fmt: skip
_WHOLE_ROUNDS = 0.64
# By elements of two bytes loaded at once; eight lose nothing.
_UNALIGNED = {1: 0.28, 2: 0.64, 4: 0.64}
_OPTIMIZER_MOVES = {"adamw": 7, "adam": 7, "sgd-momentum": 5, "sgd": 3}


@dataclass(frozen=True)
class OperatorTime:
    """One call of an operator: ``*_flops`` by definition (no deduction for a causal mask), ``*_bytes`` of traffic.

    ``*_s`` on the device; a GPU's host launches ``*_launches`` kernels meanwhile.
    """

    forward_s: float
    backward_s: float
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    forward_launches: int = 1
    backward_launches: int = 1


NO_TIME = OperatorTime(0.0, 0.0, 0, 0, 0, 0, 0, 0)


def operator_flops(op: str, input_shapes: tuple[Shape, ...], output_shapes: tuple[Shape, ...], hint: Hint = ()) -> int:
    """Operations of the forward call: of its matrix products, else one an output (for reductions, an input) element.

    ``input_shapes``: the tensor arguments in order. ``hint``: costmodels.operators.argument_hint. Views count 0.
    """
    name = base_name(op)
    if is_view(op, hint=hint) or name in METADATA:
        return 0
    if name == ATTENTION and len(input_shapes) >= 3:
        q, k, v = input_shapes[:3]
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    products = matmuls(name, input_shapes, output_shapes, hint)
    if products:
        return sum(product.flops for product in products)
    counted = input_shapes[:1] if name in _REDUCTIONS else output_shapes
    return sum(numel(shape) for shape in counted)


def matmul_time_s(product: Matmul, dtype: str, device: Device) -> float:
    """Seconds of one launch of a (batched) matrix product whose operands and result are of ``dtype``."""
    if product.flops == 0:
        return on_device_s(0.0, device)
    compute_s = _rounds_flops(product, device) / (device.peak(dtype) * device.matmul_efficiency)
    if dtype in HALF:
        compute_s /= _alignment(product, device)
    return on_device_s(max(compute_s, _move_s(_matmul_bytes(product, dtype), device)), device)


def on_device_s(work_s: float, device: Device, launches: int = 1) -> float:
    """Seconds an operator of ``work_s`` in ``launches`` kernels keeps the device."""
    if device.kind == "cpu":
        return work_s + launches * device.kernel_launch_s
    return max(work_s, launches * device.kernel_least_s)


def _rounds_flops(product: Matmul, device: Device) -> float:
    """Operations the whole device could do, at the rate of large tiles, while the product is computed."""
    side, workers = device.matmul_tile, device.multiprocessors
    if side == 1:
        return product.flops
    return min(
        _tiled_flops(product, int(height * side), int(width * side), workers) / rate for height, width, rate in _TILES
    )


def _tiled_flops(product: Matmul, height: int, width: int, workers: int) -> float:
    tiles = product.batch * -(-product.m // height) * -(-product.n // width)
    rounds = _WHOLE_ROUNDS * -(-tiles // workers) + (1 - _WHOLE_ROUNDS) * max(tiles / workers, 1.0)
    return rounds * workers * 2 * height * width * product.k


def _alignment(product: Matmul, device: Device) -> float:
    """The part of the rate that is left by loads of as many elements of two bytes as the rows of all operands allow."""
    elements = math.gcd(product.row_elements, max(device.alignment_bytes // 2, 1))
    if 2 * elements >= device.alignment_bytes:
        return 1.0
    return _UNALIGNED[elements]


@lru_cache(maxsize=65536)
def operator_time_s(
    op: str,
    input_tensors: tuple[Tensor, ...],
    output_tensors: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    device: Device,
    hint: Hint = (),
) -> OperatorTime:
    """Time of one call on one device, its tensors as that device holds them.

    Tensors are (shape, dtype name); ``needs_grad[i]``: input i needs a gradient (weights included). ``hint``:
    costmodels.operators.argument_hint. Views and metadata cost nothing.
    """
    name = base_name(op)
    if is_view(op, input_tensors, output_tensors, hint) or name in METADATA:
        return NO_TIME
    shapes = tuple(shape for shape, _ in input_tensors)
    output_shapes = tuple(shape for shape, _ in output_tensors)
    flops = operator_flops(op, shapes, output_shapes, hint)
    if name == ATTENTION and len(input_tensors) >= 3:
        return _attention(flops, input_tensors, output_tensors, needs_grad, device, hint)
    products = matmuls(name, shapes, output_shapes, hint)
    if products:
        return _products(name, products, input_tensors, output_tensors, needs_grad, device)
    forward_bytes = _forward_bytes(name, input_tensors, output_tensors)
    forward_s = _plain_s(flops, forward_bytes, device)
    if not any(needs_grad):
        return OperatorTime(forward_s, 0.0, flops, 0, forward_bytes, 0, 1, 0)
    backward_bytes = _backward_bytes(op, input_tensors, output_tensors, needs_grad, device, hint)
    backward_flops = flops * sum(needs_grad)
    backward_s = _plain_s(backward_flops, backward_bytes, device)
    return OperatorTime(forward_s, backward_s, flops, backward_flops, forward_bytes, backward_bytes)


@over_several
def copy_s(size_bytes: int, device: Device) -> float:
    """Seconds to read and write ``size_bytes``."""
    return on_device_s(_move_s(2 * size_bytes, device), device)


@over_several
def optimizer_step_s(
    parameter_bytes: int, optimizer: str, device: Device, launches: int = 1, moves: float = 0.0
) -> float:
    """Seconds to update ``parameter_bytes`` of parameters on one device, in so many ``launches``.

    ``moves``: bytes moved, of each of them; 0: those of the optimizer, with gradients and state in the dtype of the
    parameters: adamw reads parameter, gradient and two moments and writes all but the gradient (7), sgd-momentum 5, sgd 3.
    Raises ValueError for another optimizer.
    """
    if optimizer not in _OPTIMIZER_MOVES:
        raise ValueError(f"unknown optimizer {optimizer!r}; the cost model knows {', '.join(_OPTIMIZER_MOVES)}")
    if parameter_bytes == 0:
        return 0.0
    move_s = _move_s((moves or _OPTIMIZER_MOVES[optimizer]) * parameter_bytes, device)
    return max(on_device_s(move_s, device, launches), device.host_s(launches))


def _move_s(moved_bytes: float, device: Device) -> float:
    return moved_bytes / (device.memory_bytes_per_s * device.memory_efficiency)


def _plain_s(flops: int, moved_bytes: int, device: Device) -> float:
    return on_device_s(max(flops / device.peak("float32"), _move_s(moved_bytes, device)), device)


def _matmul_bytes(product: Matmul, dtype: str) -> int:
    elements = product.m * product.k + product.k * product.n + product.m * product.n
    return product.batch * elements * DTYPE_BYTES[dtype]


def _products(
    name: str,
    products: tuple[Matmul, ...],
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    device: Device,
) -> OperatorTime:
    dtype = inputs[products[0].right][1]
    backward: list[Matmul] = []
    reached = False
    for product in products:
        # In a chain of products the left operand is all that came before.
        reached = reached or (needs_grad[product.left] if product.left >= 0 else False)
        if reached:
            backward.append(product.left_gradient())
        if needs_grad[product.right]:
            backward.append(product.right_gradient())
            reached = True
    forward_s = sum(matmul_time_s(product, dtype, device) for product in products)
    backward_s = sum(matmul_time_s(product, dtype, device) for product in backward)
    backward_bytes = sum(_matmul_bytes(product, dtype) for product in backward)
    launches = len(backward)
    bias = addend(name)
    if bias is not None and bias < len(inputs) and needs_grad[bias]:
        summed_bytes = size_bytes(outputs[0]) + size_bytes(inputs[bias])
        backward_s += on_device_s(_move_s(summed_bytes, device), device)
        backward_bytes += summed_bytes
        launches += 1
    return OperatorTime(
        forward_s,
        backward_s,
        sum(product.flops for product in products),
        sum(product.flops for product in backward),
        sum(_matmul_bytes(product, dtype) for product in products),
        backward_bytes,
        len(products),
        launches,
    )


def _attention(
    flops: int,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    device: Device,
    hint: Hint,
) -> OperatorTime:
    (q, dtype), (k, _) = inputs[0], inputs[1]
    mask_needs_grad = len(needs_grad) > 3 and needs_grad[3]
    fused = attention_is_fused(dtype, device.kind, hint, mask_needs_grad)
    operands = sum(size_bytes(tensor) for tensor in (*inputs, *outputs[:1]))
    if fused:
        efficiency, work = device.attention_efficiency, 0.5 if hinted(hint, "is_causal", False) is True else 1.0
        ratio, matrix_bytes, launches = 2.5, 0, 1
    else:
        efficiency, work = device.matmul_efficiency, 1.0
        ratio, matrix_bytes, launches = 2.0, 6 * math.prod(q[:-1]) * k[-2] * DTYPE_BYTES[dtype], 5
    rate = device.peak(dtype) * efficiency
    forward_bytes = operands + matrix_bytes
    forward_s = on_device_s(max(work * flops / rate, _move_s(forward_bytes, device)), device, launches)
    if not any(needs_grad):
        return OperatorTime(forward_s, 0.0, flops, 0, forward_bytes, 0, launches, 0)
    backward_flops = int(ratio * flops)
    backward_bytes = 2 * operands + matrix_bytes
    backward_s = on_device_s(max(work * backward_flops / rate, _move_s(backward_bytes, device)), device, launches)
    return OperatorTime(forward_s, backward_s, flops, backward_flops, forward_bytes, backward_bytes, launches, launches)


def _forward_bytes(name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> int:
    written = sum(size_bytes(tensor) for tensor in outputs)
    if name in _GATHERS:
        return 2 * written + sum(size_bytes(tensor) for tensor in inputs if not is_floating(tensor[1]))
    read = sum(size_bytes(tensor) for tensor in inputs)
    if name == "cross_entropy_loss":
        return read + 2 * size_bytes(inputs[0]) + written
    return read + written


def _backward_bytes(
    op: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    needs_grad: tuple[bool, ...],
    device: Device,
    hint: Hint,
) -> int:
    name = base_name(op)
    arriving = sum(size_bytes(tensor) for tensor in outputs if is_floating(tensor[1]))
    written = sum(size_bytes(tensor) for tensor, needed in zip(inputs, needs_grad, strict=True) if needed)
    if name in _GATHERS:
        return 3 * arriving + written + sum(size_bytes(tensor) for tensor in inputs if not is_floating(tensor[1]))
    if name == "cross_entropy_loss":
        return arriving + 4 * written
    saved = 0
    for kind, value in saved_for_backward_bytes(op, inputs, outputs, needs_grad, hint, device.kind):
        saved += value if kind == "extra" else size_bytes((inputs if kind == "input" else outputs)[value])
    return arriving + saved + written
