"""Local operators that communicate or draw random numbers inside; the source of a program calls them.

Cross-entropy with the classes of z [n, c] sharded (`vocab_parallel_cross_entropy_sum`), three small all-reduces of [n]:

    lse = max z + log sum exp(z - max z)                          max and sum over every rank
    loss = sum over n of  sum over c of  q_c (lse - z_c)          d loss / d z_c = (sum q) softmax_c - q_c
    q_c = w_c ((1 - s) [c = target] + s / C)                      w: class weights, s: label smoothing; ignored: q = 0

The backward of a shard needs nothing from the others: softmax, q and the sum of q are at hand on each rank.
The row-sharded embedding gives zeros for the ids of other ranks, a partial sum.

Random operators are stateless: a generator seeded by a hash of (seed, step, micro-batch, site, coordinates on the axes
that shard the tensor), so replicas draw the same numbers, shards different ones, and recomputation the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from planner.ir.layout import Placement
from runtime.collectives import Axis, all_reduce, part


def vocab_parallel_embedding(
    ids: torch.Tensor, weight: torch.Tensor, axis: Axis, padding_idx: int = -1
) -> torch.Tensor:
    """Rows ``ids`` of a table of which ``weight`` [v/k, h] holds this rank's contiguous rows: a partial value [..., h].

    ``padding_idx`` (a global row, -1 for none) gets no gradient. The gradient reaches this rank's own rows only.
    """
    rows = weight.shape[0]
    first = axis.index * rows
    own = (ids >= first) & (ids < first + rows)
    local_padding = padding_idx - first if first <= padding_idx < first + rows else None
    found = F.embedding((ids - first).masked_fill(~own, 0), weight, padding_idx=local_padding)
    return torch.where(own.unsqueeze(-1), found, found.new_zeros(()))


def vocab_parallel_cross_entropy_sum(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Axis,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum-reduced cross-entropy, whole on each rank (shape []), of ``logits`` sharded contiguously on the class dim.

    ``logits``: [n, c/k, ...] or [c/k]. ``target``: whole, class indices [n, ...] or []; or probabilities [n, c, ...]
    or [c]. ``weight``: whole, [c]. Zero when every target is ignored.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, axis, weight, ignore_index, label_smoothing)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        axis: Axis,
        weight: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        class_dim = 1 if logits.dim() > 1 else 0
        z = logits.movedim(class_dim, -1)
        z = z if z.dtype == torch.float64 else z.float()
        rows, classes = z.shape[-1], z.shape[-1] * axis.size
        first = axis.index * rows
        w = torch.ones(classes, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
        own_w = w.narrow(0, first, rows)
        smooth = label_smoothing / classes
        most = all_reduce(z.amax(-1, keepdim=True), (axis,), dist.ReduceOp.MAX)
        z = z - most if z.dtype == logits.dtype else z.sub_(most)  # a copy of its own is overwritten
        if target.is_floating_point():
            q_whole = (target.movedim(class_dim, -1).to(z.dtype) * (1 - label_smoothing) + smooth) * w
            q, total = q_whole.narrow(-1, first, rows), q_whole.sum(-1)
            weighted = (q * z).sum(-1)
        else:
            kept = target != ignore_index
            index = target.masked_fill(~kept, 0)
            hit = (1 - label_smoothing) * w[index] * kept
            own = (index >= first) & (index < first + rows)
            q, place = hit * own, (index - first).masked_fill(~own, 0).unsqueeze(-1)
            total = hit + smooth * w.sum() * kept
            weighted = q * z.gather(-1, place).squeeze(-1)
            if label_smoothing:
                weighted = weighted + smooth * (z @ own_w) * kept
        exponentials = z.exp_()
        denominator, weighted = all_reduce(torch.stack((exponentials.sum(-1), weighted)), (axis,)).unbind(0)
        ctx.class_dim, ctx.dtype = class_dim, logits.dtype
        softmax = exponentials.div_(denominator.unsqueeze(-1))
        if target.is_floating_point():
            ctx.smooth = 0.0
            ctx.save_for_backward(softmax, total, q)
        else:
            ctx.smooth = smooth
            ctx.save_for_backward(softmax, total, q, place, kept, own_w)
        return (total * denominator.log() - weighted).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, total, q, *rest = ctx.saved_tensors
        dz = softmax * total.unsqueeze(-1)
        if not rest:
            dz -= q
        else:
            place, kept, own_w = rest
            dz.scatter_add_(-1, place, -q.unsqueeze(-1))
            if ctx.smooth:
                dz -= ctx.smooth * own_w * kept.unsqueeze(-1)
        dz *= gradients[0]
        return dz.to(ctx.dtype).movedim(-1, ctx.class_dim).contiguous(), None, None, None, None, None


def cross_entropy_count(
    target: torch.Tensor,
    num_classes: int,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What the mean cross-entropy divides by, of shape []: the number of targets not ignored, or their weights' sum.

    For probability targets (floating point), the number of predictions.
    """
    if target.is_floating_point():
        return torch.tensor(target.numel() // num_classes, dtype=dtype, device=target.device)
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return (weight.detach().to(dtype)[target.masked_fill(~kept, 0)] * kept).sum()


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` [t, i], sorted by group, each times the matrix of its group: [t, o].

    ``weight``: [e, i, o]. ``ends``: [e], the number of rows up to the end of each group; rows behind the last give zero.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and ends.dtype == torch.int32:
        return F.grouped_mm(x, weight, offs=ends)
    bounds = [0, *ends.tolist()]
    products = [x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat((*products, x.new_zeros(x.shape[0] - bounds[-1], weight.shape[2])))


def random_seed(rng: torch.Tensor, site: int, axes: Sequence[Axis] = ()) -> int:
    """A seed in [0, 2^63) from the values of ``rng`` (int64), the place in the program and the coordinates on ``axes``.

    Each value is mixed in by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    state = 0
    for value in (*rng.tolist(), site, *(axis.index for axis in axes)):
        state = (state + 0x9E3779B97F4A7C15 + value) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def dropout(x: torch.Tensor, p: float, rng: torch.Tensor, site: int, axes: Sequence[Axis] = ()) -> torch.Tensor:
    """``x`` with each element zeroed with probability ``p`` and the rest scaled by 1 / (1 - p).

    ``axes`` are those that shard x: ranks that differ on other axes only draw the same mask. Raises ValueError when
    ``p`` is not in [0, 1].
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}; it must be between 0 and 1")
    if p == 0:
        return x
    if p == 1:
        return x * 0
    generator = torch.Generator(x.device).manual_seed(random_seed(rng, site, axes))
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return x * kept / (1 - p)


def seeded(function: Callable[..., Any], rng: torch.Tensor, site: int, axes: Sequence[Axis] = ()) -> Callable[..., Any]:
    """``function`` drawing from torch's default generators as seeded for this place; they are restored afterwards."""

    def run(*args: Any, **kwargs: Any) -> Any:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(random_seed(rng, site, axes))
            return function(*args, **kwargs)

    return run


def micro_slice(x: torch.Tensor, placement: str, rng: torch.Tensor, micro_batches: int | Sequence[int]) -> torch.Tensor:
    """This micro-batch's part of a tensor that was made for all of them; ``rng``: [seed, step, micro-batch].

    ``micro_batches``: how many there are, or the rows of each where they differ.

    As an addend of a sum over micro-batches (``placement`` P) it is the tensor in the first one and zero in the others.
    """
    held = Placement.parse(placement)
    if held.kind == "P":
        return x if int(rng[2]) == 0 else torch.zeros_like(x)
    return part(x, held, micro_batches, int(rng[2]))
