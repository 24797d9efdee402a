"""Conversions between layouts on one mesh axis (planner.ir.layout), as autograd functions over local tensors.

    convert(x, axis, "f -> t")    forward   move(value f, value t)        backward   move(gradient t, gradient f)

The primitives, on a tensor whose dim d is seen as (outer, k, rest) where it is sharded as S(d,outer):

    slice            R -> S     this rank's part
    keep             R -> P     rank 0 keeps the tensor, the others hold zeros
    pad              S -> P     the part in place, zeros elsewhere
    all_gather       S -> R     the parts of all ranks, put in place
    all_reduce       P -> R     the sum over ranks
    reduce_scatter   P -> S     this rank's part of the sum
    all_to_all       S -> S'    every rank sends each other rank the crossing of their parts

Every result is contiguous and owns its memory where it differs from the argument; no argument is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from planner.ir.layout import Pair, Placement, R, conversion
from planner.ir.layout import move as primitive
from runtime.recorder import COMMUNICATION, Recorder

# Their names since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as a rank sees it: ``index`` is its coordinate; ``group`` is None where ``size`` is 1.

    ``shares``: of how many units of a dim each rank holds, where these differ. ``recorder``: told of what is exchanged.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    shares: tuple[int, ...] = ()
    recorder: Recorder | None = field(default=None, compare=False, repr=False)

    def communicating(self) -> AbstractContextManager[None]:
        """Around an exchange that is waited for."""
        return nullcontext() if self.recorder is None else self.recorder.span(COMMUNICATION)

    @property
    def dealt(self) -> tuple[int, ...]:
        """``shares``, also where they are equal."""
        return self.shares or (1,) * self.size


@lru_cache(maxsize=4096)
def parse_conversion(text: str) -> tuple[Pair, Pair]:
    """``'P:R -> R:R'`` as two pairs. Raises ValueError when it is none."""
    source, arrow, target = text.partition("->")
    if not arrow:
        raise ValueError(f"{text!r} is not a conversion; write for example 'P:R -> R:R'")
    return Pair.parse(source.strip()), Pair.parse(target.strip())


def convert(x: torch.Tensor, axis: Axis, text: str, known: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` in another layout on ``axis``; its gradient is converted back. ``text``: ``'<pair> -> <pair>'``.

    ``known``: the result, from an earlier call; then only the gradient is to come, and the values of ``x`` are not read.

    Every rank of the axis must call it. Raises ValueError when a dim cannot be cut evenly.
    """
    source, target = parse_conversion(text)
    if known is not None:
        given: torch.Tensor = _Convert.apply(x, axis, source, target, known) if x.requires_grad else known
        return given
    if axis.size == 1 or source == target:
        return x
    forward, backward = conversion(source, target)
    if forward == backward == "none":
        return x
    if source.gradient is None or target.gradient is None or not x.requires_grad:
        return move(x.detach(), axis, source.value, target.value)
    converted: torch.Tensor = _Convert.apply(x, axis, source, target, None)
    return converted


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, source: Pair, target: Pair, known: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        moved = move(x, axis, source.value, target.value) if known is None else known
        return moved.view_as(moved) if moved is x or moved is known else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return move(gradients[0], ctx.axis, ctx.target.gradient, ctx.source.gradient), None, None, None, None


def move(x: torch.Tensor, axis: Axis, source: Placement, target: Placement) -> torch.Tensor:
    """The local tensor of placement ``target`` from that of ``source``; ``x`` where nothing changes. No autograd."""
    if axis.size == 1 or source == target:
        return x
    name = primitive(source, target)
    with torch.no_grad():
        if name == "slice":
            return part(x, target, axis.shares or axis.size, axis.index).clone(memory_format=torch.contiguous_format)
        if name == "keep":
            return x if axis.index == 0 else torch.zeros_like(x, memory_format=torch.contiguous_format)
        if name == "all_reduce":
            return all_reduce(x, (axis,))
        if axis.shares:
            return _move_unequal(x, axis, source, target)
        if name == "pad":
            return _pad(x, axis, source)
        if name == "all_gather":
            return _join(all_gather(x, axis), source)
        if name == "reduce_scatter":
            return _reduce_scatter(_split(x, target, axis.size), axis)
        if source.dim == target.dim:  # both cuts on one dim: by way of the whole tensor
            return move(move(x, axis, source, R), axis, R, target)
        return _join(_all_to_all(_split(x, target, axis.size), axis), source)


def all_reduce(x: torch.Tensor, axes: tuple[Axis, ...], operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new tensor: ``x`` summed (or reduced by ``operation``) over ``axes``. No autograd."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    for axis in axes:
        if axis.group is not None:
            with axis.communicating():
                dist.all_reduce(result, op=operation, group=axis.group)
    return result


def part(x: torch.Tensor, placement: Placement, k: int | Sequence[int], index: int) -> torch.Tensor:
    """What rank ``index`` of ``k`` holds of the whole ``x``; a view of ``x`` where one exists, else a copy.

    ``k`` may be the units each rank holds, where these differ.
    """
    if placement.kind != "S" or k == 1:
        return x
    if not isinstance(k, int):
        return _dealt(x, placement, k)[index].flatten(placement.dim, placement.dim + 1)
    return _cut(x, placement, k).select(placement.dim + 1, index).flatten(placement.dim, placement.dim + 1)


def _cut(x: torch.Tensor, placement: Placement, k: int) -> torch.Tensor:
    """A view of the whole ``x`` with dim d as three dims (outer, k, rest)."""
    local = placement.local_shape(tuple(x.shape), k)[placement.dim]
    return x.unflatten(placement.dim, (placement.outer, k, local // placement.outer))


def _dealt(x: torch.Tensor, placement: Placement, shares: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views of the whole ``x`` with dim d as two dims (outer, rest), the second cut by ``shares``."""
    units = sum(shares)
    size = placement.local_shape(tuple(x.shape), units)[placement.dim] // placement.outer
    seen = x.unflatten(placement.dim, (placement.outer, units * size))
    return seen.split([share * size for share in shares], placement.dim + 1)


def _move_unequal(x: torch.Tensor, axis: Axis, source: Placement, target: Placement) -> torch.Tensor:
    """``pad``, ``all_gather``, ``reduce_scatter`` and ``all_to_all`` where ranks hold unequal shares of a dim.

    Parts travel as large as the largest of them, the rest zeros.
    """
    if source.kind == "P":
        parts = _dealt(x, target, axis.shares)
        sent = torch.stack([_lengthened(each, target.dim + 1, parts[0].shape[target.dim + 1]) for each in parts])
        received = _reduce_scatter(sent, axis)
        mine = received.narrow(target.dim + 1, 0, parts[axis.index].shape[target.dim + 1])
        return mine.contiguous().flatten(target.dim, target.dim + 1)
    own = x.unflatten(source.dim, (source.outer, x.shape[source.dim] // source.outer))
    dim = source.dim + 1
    sizes = [own.shape[dim] // axis.shares[axis.index] * share for share in axis.shares]
    if target.kind == "P":
        held = [own if i == axis.index else own.new_zeros(_resized(own, dim, size)) for i, size in enumerate(sizes)]
    else:
        gathered = all_gather(_lengthened(own, dim, max(sizes)), axis)
        held = [each.narrow(dim, 0, size) for each, size in zip(gathered, sizes, strict=True)]
    whole = torch.cat(held, dim).flatten(source.dim, source.dim + 1)
    return move(whole, axis, R, target) if target.kind == "S" else whole


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _lengthened(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros behind it along ``dim``; contiguous."""
    if x.shape[dim] == size:
        return x.contiguous()
    result = x.new_zeros(_resized(x, dim, size))
    result.narrow(dim, 0, x.shape[dim]).copy_(x)
    return result


def _pad(x: torch.Tensor, axis: Axis, placement: Placement) -> torch.Tensor:
    dim = placement.dim
    whole = x.new_zeros((*x.shape[:dim], x.shape[dim] * axis.size, *x.shape[dim + 1 :]))
    mine = _cut(whole, placement, axis.size).select(dim + 1, axis.index)
    mine.copy_(x.unflatten(dim, (placement.outer, x.shape[dim] // placement.outer)))
    return whole


def _split(x: torch.Tensor, placement: Placement, k: int) -> torch.Tensor:
    """The parts of ``x`` of all ranks, stacked: contiguous, of shape [k, *local]."""
    dim = placement.dim
    return _cut(x, placement, k).movedim(dim + 1, 0).contiguous().flatten(dim + 1, dim + 2)


def _join(parts: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The whole tensor from stacked ``parts`` [k, *local]: the inverse of ``_split``."""
    dim = placement.dim
    local = parts.shape[dim + 1]
    cut = parts.unflatten(dim + 1, (placement.outer, local // placement.outer)).movedim(0, dim + 1)
    return cut.contiguous().flatten(dim, dim + 2)


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[k, *x.shape]: every rank's ``x``, stacked. No autograd."""
    gathered = x.new_empty((axis.size, *x.shape))
    with axis.communicating():
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=axis.group)
    return gathered


def _reduce_scatter(parts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks of the part meant for this one, of shape [*local]."""
    mine = parts.new_empty(parts.shape[1:])
    with axis.communicating():
        _reduce_scatter_sum(mine.view(-1), parts.view(-1), group=axis.group)
    return mine


def reduce_scatter_flat(mine: torch.Tensor, parts: torch.Tensor, axis: Axis) -> dist.Work:
    """Start to write the sum over ranks of row ``axis.index`` of ``parts`` [k, n] into ``mine`` [n]."""
    received, sent = mine, parts.view(-1)
    if sent.is_complex():
        received, sent = torch.view_as_real(received).view(-1), torch.view_as_real(sent).view(-1)
    work = _reduce_scatter_sum(received, sent, group=axis.group, async_op=True)
    assert work is not None
    return work


def all_gather_flat(parts: torch.Tensor, mine: torch.Tensor, axis: Axis) -> dist.Work:
    """Start to write every rank's ``mine`` [n] into ``parts`` [k, n]."""
    received, sent = parts.view(-1), mine.view(-1)
    if sent.is_complex():
        received, sent = torch.view_as_real(received).view(-1), torch.view_as_real(sent).view(-1)
    work = _all_gather(received, sent, group=axis.group, async_op=True)
    assert work is not None
    return work


def _all_to_all(parts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[k, *local]: what each rank had for this one."""
    received = torch.empty_like(parts)
    with axis.communicating():
        dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.group)
    return received
