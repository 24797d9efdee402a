"""Runs the micro-batches of one step through a rank's stages.

One stage in all: a loop of forward and backward. Several: torch.distributed.pipelining, which sends activations and
gradients.

Micro-batches differ in their keyword arguments, of which some are cut (inputs), some whole (counts) and some no tensors
of the batch at all (the random state). The schedule's public ``step`` can only cut a keyword along dim 0, so the only
keyword given to it is the numbers of the micro-batches; ``_Feed`` looks the true keywords up by that number. This needs
no private call, and keeps torch from treating the stage as a module wrapped by DDP or FSDP.

Torch exchanges tensors of one shape for all micro-batches. Where the last ones are shorter, what is sent is filled up with
zeros to the shape of the largest, and cut again on arrival; going back, autograd does the same to the gradients.

Shapes travel as meta tensors, so no trial forward runs. The loss is computed in the last stage: the loss function of
the schedule is the identity.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from planner.ir.program import Program, TensorSpec
from runtime.collectives import Axis
from runtime.recorder import BACKWARD, FORWARD, WEIGHTS, Recorder
from runtime.split_backward import gradients_of_inputs
from runtime.stage_module import Code

Keywords = Mapping[str, torch.Tensor]


class StageRunner:
    """Forward and backward of all micro-batches of one rank's stages."""

    def __init__(
        self, codes: Sequence[Sequence[Code]], program: Program, pp: Axis, device: torch.device, recorder: Recorder
    ) -> None:
        """``codes``: of each stage of the rank, what runs each micro-batch, the largest first. ``recorder``: told what runs."""
        self.codes, self.recorder = codes, recorder
        self.micro_batches = program.micro_batches
        self.feeds: list[_Feed] = []
        if pp.size == 1:
            return
        count, split = len(program.stages), program.schedule == "zero-bubble"
        self.feeds = [_Feed(mine, last=mine[0].stage.index == count - 1) for mine in codes]
        stages: list[_PipelineStageBase] = [
            (_SplitStage if split else _Stage)(
                feed,
                mine[0].stage.index,
                count,
                device,
                input_args=tuple(_meta(spec) for spec in mine[0].stage.receives),
                output_args=tuple(_meta(spec) for spec in mine[0].stage.sends),
                group=pp.group,
            )
            for feed, mine in zip(self.feeds, codes, strict=True)
        ]
        for stage in stages:
            cast(_Stage, stage).recorder = recorder
        self.schedule = _schedule(program, stages)

    def run(self, keywords: Sequence[Sequence[Keywords]]) -> torch.Tensor | None:
        """The sum of the losses; None where another rank has it. ``keywords[s][i]``: of stage s for micro-batch i."""
        modules = [mine[0].module for mine in self.codes]
        for module in modules:
            module.finish_writes(keep=False)  # of a step that failed
        total = self._pipeline(keywords) if self.feeds else self._loop(keywords[0])
        for module in modules:
            module.finish_writes()
        return total

    def _pipeline(self, keywords: Sequence[Sequence[Keywords]]) -> torch.Tensor | None:
        numbers = torch.arange(self.micro_batches)
        losses: list[torch.Tensor] = []
        for feed, mine in zip(self.feeds, keywords, strict=True):
            feed.keywords = tuple(mine)
        with _quiet():
            self.schedule.step(target=numbers, losses=losses, return_outputs=False, micro_batch=numbers)
        for feed in self.feeds:
            feed.keywords = ()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _loop(self, keywords: Sequence[Keywords]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for number, (code, arguments) in enumerate(zip(self.codes[0], keywords, strict=True)):
            with self.recorder.span(FORWARD, 0, number):
                (loss,) = code(**arguments)
            if loss.requires_grad:
                with self.recorder.span(BACKWARD, 0, number):
                    loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


def _schedule(program: Program, stages: list[_PipelineStageBase]) -> PipelineScheduleSingle | PipelineScheduleMulti:
    if program.schedule == "zero-bubble":
        return ScheduleInterleavedZeroBubble(stages, program.micro_batches, loss_fn=_same, scale_grads=False)
    if program.schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, program.micro_batches, loss_fn=_same, scale_grads=False)
    # 1F1B needs a micro-batch per stage; with fewer, every one is in flight and both orders are the same.
    one_f_one_b = program.schedule == "1f1b" and program.micro_batches >= len(program.stages)
    schedule = Schedule1F1B if one_f_one_b else ScheduleGPipe
    return schedule(stages[0], program.micro_batches, loss_fn=_same, scale_grads=False)


class _Feed(nn.Module):
    """A stage whose keyword arguments are chosen by the number of the micro-batch, a tensor of shape [1] on the CPU."""

    def __init__(self, codes: Sequence[Code], last: bool) -> None:
        super().__init__()
        self.module, self.codes, self.last = codes[0].module, codes, last
        self.keywords: tuple[Keywords, ...] = ()

    @property
    def weights(self) -> list[torch.Tensor]:
        """The stage's parameters, those that another stage of the rank registers too."""
        return [held.tensor for held in self.module.held if isinstance(held.tensor, nn.Parameter)]

    def forward(self, *received: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        number = int(micro_batch)
        code, largest = self.codes[number], self.codes[0].stage
        ready = (_DenseGradient.apply(x) if x.requires_grad else x for x in received)
        cut = tuple(_cut(x, spec.shape) for x, spec in zip(ready, code.stage.receives, strict=True))
        outputs = code(*cut, **self.keywords[number])
        if not self.last:
            pairs = zip(outputs, largest.sends, strict=True)
            filled = ((_filled_up(x, spec.shape), spec) for x, spec in pairs)
            outputs = tuple((x if spec.differentiable else x.detach()).contiguous() for x, spec in filled)
        return outputs[0] if self.last else outputs


class _DenseGradient(torch.autograd.Function):
    """Its argument, whose gradient is contiguous: only such tensors can be sent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Stage(PipelineStage):
    """A stage whose work is recorded."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.span(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.span(BACKWARD, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.span(WEIGHTS, self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class _SplitStage(_Stage):
    """A stage whose backward runs in two parts (runtime.split_backward)."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        if backward_type == "input":
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            return gradients_of_inputs(outputs, bwd_kwargs["output_grads"], inputs, cast(_Feed, self.submod).weights)
        if backward_type == "weight":
            bwd_kwargs["param_groups"].run()
            return (), None
        result: tuple[Any, Any] = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return result


def _cut(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first elements of every dim."""
    for dim, size in enumerate(shape):
        if x.shape[dim] != size:
            x = x.narrow(dim, 0, size)
    return x


def _filled_up(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``x`` with zeros behind it in every dim that is too short."""
    for dim, size in enumerate(shape):
        if x.shape[dim] != size:
            rest = x.new_zeros((*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]))
            x = torch.cat((x, rest), dim)
    return x


def _meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", requires_grad=spec.differentiable)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log of the whole schedule where an action fails: the exception says it."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _same(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
