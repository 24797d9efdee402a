"""Batch normalization whose statistics are taken over shards of the batch (or of height and width) on other ranks.

    mean = sum x / n      var = sum (x - mean)^2 / n      xhat = (x - mean) / sqrt(var + eps)     y = weight xhat + bias

with n and the sums over every rank. Each rank sends its mean m_i and M_i = sum (x - m_i)^2 once; with counts n_i

    mean = sum (n_i / n) m_i     M = sum M_i + sum n_i (m_i - mean)^2                         (_merge)

    dx = weight / sqrt(var + eps) (dy - sum dy / n - xhat sum (dy xhat) / n)                  (_BatchNorm.backward)

where both sums are over every rank, while dweight = sum (dy xhat) and dbias = sum dy stay this rank's share.
Parallel variance: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance", 1983.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from runtime.collectives import Axis, all_gather, all_reduce

BatchNormResult = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    axes: Sequence[Axis] = (),
) -> BatchNormResult:
    """Batch normalization of ``x`` [n, c, ...] with statistics also over the shards on ``axes``.

    Returns (y, new running mean, new running variance); the running statistics come back unchanged when ``training`` is
    False. The gradient of x is that of the whole batch's function; those of weight and bias are this rank's summand.
    Raises ValueError when the whole batch has a single value per channel, as torch does.
    """
    if not training and running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), running_mean, running_var
    count = x.numel() // x.shape[1]
    for axis in reversed(axes):  # the innermost first, so that shares stay whole numbers
        count = count // axis.dealt[axis.index] * sum(axis.dealt)
    if training and count <= 1:
        raise ValueError(f"batch norm needs more than one value per channel in training; the input is {list(x.shape)}")
    y, mean, var = _BatchNorm.apply(x, weight, bias, eps, count, tuple(axes))
    if not training or running_mean is None or running_var is None:
        return y, running_mean, running_var
    new_mean = running_mean.lerp(mean.to(running_mean.dtype), momentum)
    new_var = running_var.lerp((var * (count / (count - 1))).to(running_var.dtype), momentum)
    return y, new_mean, new_var


def _merge(mean: torch.Tensor, squares: torch.Tensor, unit: float, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, M) over the ranks of ``axis``, each of ``unit`` values per channel for every unit it holds."""
    means, parts = all_gather(torch.stack((mean, squares)), axis).unbind(1)
    counts = unit * torch.tensor(axis.dealt, dtype=means.dtype, device=means.device)
    merged = counts @ means / counts.sum()
    return merged, parts.sum(0) + counts @ (means - merged).square()


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        count: int,
        axes: tuple[Axis, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [0, *range(2, x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        mean = wide.mean(dims)
        squares = (wide - _along(mean, x)).square().sum(dims)
        merged = float(x.numel() // x.shape[1])
        for axis in axes:
            if axis.size > 1:
                unit = merged / axis.dealt[axis.index]
                mean, squares = _merge(mean, squares, unit, axis)
                merged = unit * sum(axis.dealt)
        var = squares / count
        inverse = torch.rsqrt(var + eps)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        y = (wide - _along(mean, x)) * _along(scale, x)
        if bias is not None:
            y = y + _along(bias.to(y.dtype), x)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.axes, ctx.has_bias = count, axes, bias is not None
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        dy = gradients[0].to(inverse.dtype)
        xhat = (x.to(inverse.dtype) - _along(mean, x)) * _along(inverse, x)
        local = torch.stack((dy.sum(dims), (dy * xhat).sum(dims)))
        dx = None
        if ctx.needs_input_grad[0]:
            mean_dy, mean_dy_xhat = (all_reduce(local, ctx.axes) / ctx.count).unbind(0)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            dx = ((dy - _along(mean_dy, x) - xhat * _along(mean_dy_xhat, x)) * _along(scale, x)).to(x.dtype)
        dweight = local[1].to(weight.dtype) if weight is not None else None
        dbias = local[0].to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None, None


def _along(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A per-channel vector shaped to broadcast over ``x`` [n, c, ...]."""
    return channels.view(1, -1, *([1] * (x.dim() - 2)))
