"""ZeRO-1 and 2: each rank of dp updates its own shard of every weight, and the ranks exchange what they updated.

Weights stay whole on every rank. The shard of a weight is a DTensor on dp, cut along dim 0 as by torch.chunk, whose local
tensor is a view of the weight: what the optimizer writes there is in the weight already. It has the gradient, and what the
optimizer remembers:

    shard(module, dp)            makes the shards (``Held.updated``)
    Scatter(held, dp)            weights' gradients -> sum over dp -> gradients of the shards    (one reduce-scatter)
    gather(held, dp)             after an update: weights from the shards of all ranks           (all-gathers)

A flat bucket is [k, width]: row r holds what rank r gets, one weight after the other; a shard that is shorter than the
first one is filled up with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from runtime.buckets import BUCKETS_IN_FLIGHT, buckets, local
from runtime.collectives import Axis, all_gather_flat, reduce_scatter_flat
from runtime.stage_module import Held, RankModule


def shard(module: RankModule, dp: Axis, device: torch.device) -> None:
    """Give every trainable weight that has a dim to cut its shard. To be called when the weights have their memory."""
    if dp.size == 1 or dp.group is None:
        return
    mesh = DeviceMesh.from_group(dp.group, device.type)
    for held in module.held:
        weight = held.tensor
        is_plain = not isinstance(weight, DTensor) and not held.spec.is_buffer
        if not is_plain or not held.spec.trainable or not weight.dim() or not weight.numel():
            continue
        mine = _parts(weight.detach(), dp.size)[dp.index]
        sharded = DTensor.from_local(
            mine, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        held.module.__dict__["shards"][held.attribute] = nn.Parameter(sharded)


def is_sharded(held: Held) -> bool:
    return held.updated is not held.tensor


class Scatter:
    """One reduce-scatter in flight, of the gradients of ``held``, which gives these up to it."""

    def __init__(self, held: Sequence[Held], dp: Axis) -> None:
        self.held, self.dp = held, dp
        gradients = [h.tensor.grad for h in held]
        self.flat = _pack([g for g in gradients if g is not None], dp.size)
        for h in held:
            h.tensor.grad = None
        self.mine = self.flat.new_empty(self.flat.shape[1])
        self.work = reduce_scatter_flat(self.mine, self.flat, dp)

    def finish(self) -> None:
        """Add what this rank got to the gradients of its shards."""
        self.work.wait()
        offset = 0
        for h in self.held:
            shard = local(h.updated)
            got = self.mine[offset : offset + shard.numel()].view(shard.shape)
            offset += _width(h.tensor, self.dp.size)
            if h.updated.grad is not None:
                local(h.updated.grad).add_(got)
                continue
            assert isinstance(h.updated, DTensor)
            h.updated.grad = DTensor.from_local(
                got, h.updated.device_mesh, [Shard(0)], run_check=False, shape=h.tensor.shape, stride=h.tensor.stride()
            )


class _Gather:
    """One all-gather in flight, of the shards of ``held``."""

    def __init__(self, held: Sequence[Held], dp: Axis) -> None:
        self.held = held
        rows = [local(h.updated).detach().reshape(1, -1) for h in held]
        self.mine = torch.cat([_filled_up(x, _width(h.tensor, dp.size)) for x, h in zip(rows, held, strict=True)], 1)
        self.flat = self.mine.new_empty((dp.size, self.mine.shape[1]))
        self.work = all_gather_flat(self.flat, self.mine, dp)

    def finish(self) -> None:
        self.work.wait()
        k, offset = self.flat.shape[0], 0
        for h in self.held:
            width = _width(h.tensor, k)
            received = self.flat[:, offset : offset + width]
            if h.tensor.shape[0] % k == 0:
                h.tensor.view(k, -1).copy_(received)
            else:
                for row, part in zip(received, _parts(h.tensor, k), strict=True):
                    part.copy_(row[: part.numel()].view(part.shape))
            offset += width


@torch.no_grad()
def gather(held: Sequence[Held], dp: Axis) -> None:
    """Let every rank have what the others updated. Collective over dp."""
    in_flight: deque[_Gather] = deque()
    for bucket in held_buckets([h for h in held if is_sharded(h)]):
        if len(in_flight) >= BUCKETS_IN_FLIGHT:
            in_flight.popleft().finish()
        in_flight.append(_Gather(bucket, dp))
    while in_flight:
        in_flight.popleft().finish()


def held_buckets(held: Sequence[Held]) -> Iterator[list[Held]]:
    of_tensor = {h.tensor: h for h in held}
    for bucket in buckets([h.tensor for h in held]):
        yield [of_tensor[tensor] for tensor in bucket]


def _parts(x: torch.Tensor, k: int) -> list[torch.Tensor]:
    """Views of ``x``: what each of ``k`` ranks holds of it, the last ones possibly empty."""
    rows = -(-x.shape[0] // k)
    return [x[min(i * rows, x.shape[0]) : min((i + 1) * rows, x.shape[0])] for i in range(k)]


def _width(x: torch.Tensor, k: int) -> int:
    """Elements of the largest shard."""
    return -(-x.shape[0] // k) * (x.numel() // x.shape[0])


def _filled_up(row: torch.Tensor, width: int) -> torch.Tensor:
    return row if row.shape[1] == width else torch.cat((row, row.new_zeros(1, width - row.shape[1])), 1)


def _pack(tensors: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    """[k, width] of ``tensors``, of one dtype."""
    widths = [_width(x, k) for x in tensors]
    flat = tensors[0].new_zeros((k, sum(widths)))
    offset = 0
    for x, width in zip(tensors, widths, strict=True):
        sent = flat[:, offset : offset + width]
        if x.shape[0] % k == 0:
            sent.copy_(x.reshape(k, -1))
        else:
            for row, part in zip(sent, _parts(x, k), strict=True):
                row[: part.numel()].view(part.shape).copy_(part)
        offset += width
    return flat
