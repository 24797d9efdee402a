"""Sums of gradients over ranks, once a step, and the gradient norm.

    dp      over replicas of the weights: buckets start their all-reduce during the last micro-batch's backward; of weights
            whose update is sharded (runtime.shards), a reduce-scatter: then (ZeRO-1), or for every micro-batch (ZeRO-2)
    tp      states whose gradient is a partial sum on tp (``sum_over_tp``)
    stages  copies of a shared weight on stages of several ranks (``tied_stages``); stages of one rank share the tensor

All are sums: the program divides its loss by global counts. Gradients that were there before the step are set aside and
added afterwards, so that only the new part is reduced. (DistributedDataParallel reduces all of ``.grad``, averages,
keeps a second copy of the gradients and aborts on a weight without a gradient; hence own buckets.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runtime.buckets import BUCKETS_IN_FLIGHT, buckets, local
from runtime.collectives import Axis
from runtime.shards import Scatter, held_buckets, is_sharded
from runtime.stage_module import Held
from runtime.state import answers_for


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

    ``tied``: stages that share a state -> process group over their ranks, in the same order on every rank. ``at_once``: of
    each stage, the states whose sharded gradients are reduced after every micro-batch.
    """

    def __init__(
        self,
        held: Sequence[Held],
        axes: Mapping[str, Axis],
        tied: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        micro_batches: int,
        at_once: Sequence[Sequence[Held]] = (),
    ) -> None:
        self.trainable = [h for h in held if h.spec.trainable and not h.spec.is_buffer]
        self.axes, self.tied, self.micro_batches = axes, tied, micro_batches
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        self.in_flight: deque[_Sum | Scatter] = deque()
        # Backward reaches the last weights first.
        replicas = [h for h in self.trainable if axes["dp"].size > 1 and not isinstance(h.tensor, DTensor)][::-1]
        shared = {h.spec.target for h in self.trainable if h.uses > 1}
        streams = [[h for h in stage[::-1] if is_sharded(h) and h.spec.target not in shared] for stage in at_once]
        early = {h.spec.target for stream in streams for h in stream}
        late = [h for h in replicas if h.spec.target not in early]
        parts = [[h for h in late if is_sharded(h)], [h for h in late if not is_sharded(h)]]
        self.late = _Stream([bucket for part in parts for bucket in held_buckets(part)], again=False)
        self.early = [_Stream(list(held_buckets(stream)), again=True) for stream in streams]
        for stream in (*self.early, *([] if self.early else [self.late])):
            for h in stream.held:
                h.tensor.register_post_accumulate_grad_hook(partial(self._accumulated, stream))

    def start(self) -> None:
        self.before = {h.updated: h.updated.grad for h in self.trainable if h.updated.grad is not None}
        for h in self.trainable:
            h.tensor.grad = h.updated.grad = None
        self.late.start({h.tensor: self.micro_batches * h.uses for h in self.late.held})
        for stream in self.early:
            stream.start(dict.fromkeys((h.tensor for h in stream.held), 1))

    @torch.no_grad()
    def _accumulated(self, stream: _Stream, parameter: torch.Tensor) -> None:
        """A micro-batch's gradient has been added; start the buckets, in order, that are complete with it."""
        for bucket in stream.complete_with(parameter):
            self._launch(bucket)

    def _launch(self, bucket: Sequence[Held]) -> None:
        if len(self.in_flight) >= BUCKETS_IN_FLIGHT:
            self.in_flight.popleft().finish()
        present = [h for h in bucket if h.tensor.grad is not None]
        if present and is_sharded(present[0]):
            self.in_flight.append(Scatter(present, self.axes["dp"]))
        elif present:
            gradients = [h.tensor.grad for h in present if h.tensor.grad is not None]
            self.in_flight.append(_Sum(gradients, self.axes["dp"].group))

    @torch.no_grad()
    def finish(self) -> None:
        for stream in (*self.early, self.late):
            for bucket in stream.rest():
                self._launch(bucket)
        while self.in_flight:
            self.in_flight.popleft().finish()
        tp = self.axes["tp"]
        if tp.size > 1:
            of_parts = [h.updated.grad for h in self.trainable if h.spec.sum_over_tp]
            sum_flat([local(g) for g in of_parts if g is not None], tp.group)
        for stages, group in self.tied.items():
            if group is not None:
                self._sum_copies([h for h in self.trainable if h.spec.tied_stages == stages], group)
        for updated, earlier in self.before.items():
            updated.grad = earlier if updated.grad is None else earlier.add_(updated.grad)
        self.before = {}

    def _sum_copies(self, copies: list[Held], group: dist.ProcessGroup) -> None:
        """Sum over stages, in order of names. A stage without a gradient adds zeros; if all lack it, it stays None."""
        for held in sorted(copies, key=lambda h: h.spec.target):
            updated = held.updated
            had = torch.tensor([updated.grad is not None], dtype=torch.float32, device=local(updated).device)
            dist.all_reduce(had, group=group)
            if not had.item():
                continue
            if updated.grad is None:
                updated.grad = torch.zeros_like(updated)
            sum_flat([local(updated.grad)], group)


class _Stream:
    """Buckets that are reduced in a fixed order, the same on every rank of dp, each as soon as it is complete.

    ``again``: a bucket that was reduced counts anew, and the first follows the last.
    """

    def __init__(self, buckets: Sequence[Sequence[Held]], again: bool) -> None:
        self.buckets, self.again = buckets, again
        self.held = [h for bucket in buckets for h in bucket]
        self.wanted: Mapping[torch.Tensor, int] = {}
        self.missing: dict[torch.Tensor, int] = {}
        self.next = 0
        # Weights that got no gradient in the step before: those of an unused layer. No bucket that comes again waits for them.
        self.idle: set[torch.Tensor] = set()
        self.reached: set[torch.Tensor] = set()

    def start(self, wanted: Mapping[torch.Tensor, int]) -> None:
        """``wanted``: how many gradients of each weight make it complete."""
        self.wanted, self.missing, self.next = wanted, dict(wanted), 0
        self.reached = set()

    def complete_with(self, parameter: torch.Tensor) -> Iterator[Sequence[Held]]:
        """The buckets that are complete with one more gradient of ``parameter``."""
        if parameter not in self.missing:
            return
        self.missing[parameter] -= 1
        self.reached.add(parameter)
        for _ in self.buckets:
            if self.next == len(self.buckets):
                return
            bucket = self.buckets[self.next]
            if any(self.missing[h.tensor] > 0 and h.tensor not in self.idle for h in bucket):
                return
            self.next += 1
            if self.again:
                self.missing.update((h.tensor, self.wanted[h.tensor]) for h in bucket)
                self.next %= len(self.buckets)
            yield bucket

    def rest(self) -> Iterator[Sequence[Held]]:
        """What is left at the end of a step, in order."""
        yield from self.buckets[self.next :]
        if self.again:
            yield from self.buckets[: self.next]
            self.idle = {h.tensor for h in self.held} - self.reached
        self.missing = {}


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
        gradient = h.updated.grad
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
