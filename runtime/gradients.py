"""Sums of gradients over ranks, once a step, and the gradient norm.

    dp      over replicas of the weights: buckets start their all-reduce during the last micro-batch's backward
    tp      states whose gradient is a partial sum on tp (``sum_over_tp``)
    stages  copies of a shared weight on stages of several ranks (``tied_stages``); stages of one rank share the tensor

All are sums: the program divides its loss by global counts. Gradients that were there before the step are set aside and
added afterwards, so that only the new part is reduced. (DistributedDataParallel reduces all of ``.grad``, averages,
keeps a second copy of the gradients and aborts on a weight without a gradient; hence own buckets.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runtime.collectives import Axis
from runtime.stage_module import Held
from runtime.state import answers_for

BUCKET_BYTES = 25 * 2**20
BUCKETS_IN_FLIGHT = 4


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> list[list[torch.Tensor]]:
    """``tensors`` in order, grouped by dtype into lists of at most ``limit_bytes`` (or one larger tensor)."""
    finished: list[list[torch.Tensor]] = []
    open_bucket: dict[torch.dtype, list[torch.Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype in open_bucket and filled[tensor.dtype] + size > limit_bytes:
            finished.append(open_bucket.pop(tensor.dtype))
        if tensor.dtype not in open_bucket:
            open_bucket[tensor.dtype], filled[tensor.dtype] = [], 0
        open_bucket[tensor.dtype].append(tensor)
        filled[tensor.dtype] += size
    return finished + list(open_bucket.values())


class _Sum:
    """One all-reduce in flight over the concatenation of ``tensors``."""

    def __init__(self, tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        self.tensors = tensors
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        assert self.work is not None
        self.work.wait()
        for tensor, summed in zip(self.tensors, self.flat.split([t.numel() for t in self.tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))


@torch.no_grad()
def sum_flat(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum ``tensors`` in place over ``group``, in flat buckets. The same list of shapes on every rank."""
    for bucket in buckets(tensors):
        _Sum(bucket, group).finish()


class GradientReducer:
    """Reduces the gradients of a rank's stages. Call ``start`` before and ``finish`` after the micro-batches of a step.

    ``tied``: stages that share a state -> process group over their ranks, in the same order on every rank.
    """

    def __init__(
        self,
        held: Sequence[Held],
        axes: Mapping[str, Axis],
        tied: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        micro_batches: int,
    ) -> None:
        self.trainable = [h for h in held if h.spec.trainable and not h.spec.is_buffer]
        self.axes, self.tied, self.micro_batches = axes, tied, micro_batches
        self.uses = {h.tensor: h.uses for h in self.trainable}
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        self.missing: dict[torch.Tensor, int] = {}
        self.in_flight: deque[_Sum] = deque()
        self.next_bucket = 0
        replicas = (
            [h.tensor for h in self.trainable if not isinstance(h.tensor, DTensor)] if axes["dp"].size > 1 else []
        )
        self.replica_buckets = buckets(replicas[::-1])  # backward reaches the last weights first
        for parameter in replicas:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def start(self) -> None:
        self.before = {h.tensor: h.tensor.grad for h in self.trainable if h.tensor.grad is not None}
        for parameter in self.before:
            parameter.grad = None
        self.missing = {p: self.micro_batches * self.uses[p] for bucket in self.replica_buckets for p in bucket}
        self.next_bucket = 0

    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A micro-batch's gradient has been added; start the buckets, in order, that are complete with it."""
        if parameter not in self.missing:
            return
        self.missing[parameter] -= 1
        while self.next_bucket < len(self.replica_buckets):
            if any(self.missing[p] for p in self.replica_buckets[self.next_bucket]):
                return
            self._launch()

    def _launch(self) -> None:
        if len(self.in_flight) >= BUCKETS_IN_FLIGHT:
            self.in_flight.popleft().finish()
        gradients = [p.grad for p in self.replica_buckets[self.next_bucket] if p.grad is not None]
        self.next_bucket += 1
        if gradients:
            self.in_flight.append(_Sum(gradients, self.axes["dp"].group))

    @torch.no_grad()
    def finish(self) -> None:
        while self.next_bucket < len(self.replica_buckets):
            self._launch()
        while self.in_flight:
            self.in_flight.popleft().finish()
        self.missing = {}
        tp = self.axes["tp"]
        if tp.size > 1:
            partial = [h.tensor.grad for h in self.trainable if h.spec.sum_over_tp]
            sum_flat([local(g) for g in partial if g is not None], tp.group)
        for stages, group in self.tied.items():
            if group is not None:
                self._sum_copies([h for h in self.trainable if h.spec.tied_stages == stages], group)
        for parameter, earlier in self.before.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self.before = {}

    def _sum_copies(self, copies: list[Held], group: dist.ProcessGroup) -> None:
        """Sum over stages, in order of names. A stage without a gradient adds zeros; if all lack it, it stays None."""
        for held in sorted(copies, key=lambda h: h.spec.target):
            parameter = held.tensor
            had = torch.tensor([parameter.grad is not None], dtype=torch.float32, device=local(parameter).device)
            dist.all_reduce(had, group=group)
            if not had.item():
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_flat([local(parameter.grad)], group)


@torch.no_grad()
def clip_gradients(
    held: Sequence[Held], axes: Mapping[str, Axis], world: Any, device: torch.device, max_norm: float
) -> float:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; returns the norm before.

    Each element counts once: a replica by the first rank that holds it, a copy of a tied state by its first stage.
    As torch.nn.utils.clip_grad_norm_: the factor is max_norm / (norm + 1e-6), at most 1.
    """
    own: list[torch.Tensor] = []
    everything: list[torch.Tensor] = []
    for h in held:
        gradient = h.tensor.grad
        if gradient is None:
            continue
        everything.append(local(gradient))
        first_on_dp = isinstance(gradient, DTensor) or axes["dp"].index == 0
        first_on_tp = h.spec.placement.kind == "S" or axes["tp"].index == 0
        if first_on_dp and first_on_tp and answers_for(h.spec, axes["pp"]):
            own.append(local(gradient))
    square = torch.zeros((), dtype=torch.float64, device=device)
    if own:
        square += torch.stack([n.double() for n in torch._foreach_norm(own)]).square().sum()
    if world is not None:
        dist.all_reduce(square, group=world)
    norm = float(square.sqrt())
    factor = max_norm / (norm + 1e-6)
    if everything and factor < 1:
        torch._foreach_mul_(everything, factor)
    return norm
