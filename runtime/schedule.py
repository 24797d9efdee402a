"""Runs the micro-batches of one step through a rank's stage.

One stage: a loop of forward and backward. Several: torch.distributed.pipelining, which sends activations and gradients.

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

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from planner.ir.program import Program, TensorSpec
from runtime.collectives import Axis
from runtime.stage_module import Code

Keywords = Mapping[str, torch.Tensor]


class StageRunner:
    """Forward and backward of all micro-batches of one rank's stage."""

    def __init__(self, codes: Sequence[Code], program: Program, pp: Axis, device: torch.device) -> None:
        """``codes``: what runs each micro-batch, the largest first."""
        self.codes = codes
        self.micro_batches = program.micro_batches
        self.feed: _Feed | None = None
        if pp.size == 1:
            return
        stage = codes[0].stage
        self.feed = _Feed(codes, last=pp.index == pp.size - 1)
        pipeline_stage = PipelineStage(
            self.feed,
            pp.index,
            pp.size,
            device,
            input_args=tuple(_meta(spec) for spec in stage.receives),
            output_args=tuple(_meta(spec) for spec in stage.sends),
            group=pp.group,
        )
        # 1F1B needs a micro-batch per stage; with fewer, every one is in flight and both orders are the same.
        one_f_one_b = program.schedule == "1f1b" and program.micro_batches >= pp.size
        schedule = Schedule1F1B if one_f_one_b else ScheduleGPipe
        self.schedule = schedule(pipeline_stage, program.micro_batches, loss_fn=_same, scale_grads=False)

    def run(self, keywords: Sequence[Keywords]) -> torch.Tensor | None:
        """The sum of the losses; None where another stage has it. ``keywords[i]``: the arguments for micro-batch i."""
        module = self.codes[0].module
        module.finish_writes(keep=False)  # of a step that failed
        total = self._loop(keywords) if self.feed is None else self._pipeline(self.feed, keywords)
        module.finish_writes()
        return total

    def _pipeline(self, feed: _Feed, keywords: Sequence[Keywords]) -> torch.Tensor | None:
        numbers = torch.arange(self.micro_batches)
        losses: list[torch.Tensor] = []
        feed.keywords = tuple(keywords)
        self.schedule.step(target=numbers, losses=losses, return_outputs=False, micro_batch=numbers)
        feed.keywords = ()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _loop(self, keywords: Sequence[Keywords]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for code, arguments in zip(self.codes, keywords, strict=True):
            (loss,) = code(**arguments)
            if loss.requires_grad:
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


class _Feed(nn.Module):
    """A stage whose keyword arguments are chosen by the number of the micro-batch, a tensor of shape [1] on the CPU."""

    def __init__(self, codes: Sequence[Code], last: bool) -> None:
        super().__init__()
        self.module, self.codes, self.last = codes[0].module, codes, last
        self.keywords: tuple[Keywords, ...] = ()

    def forward(self, *received: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        number = int(micro_batch)
        code, largest = self.codes[number], self.codes[0].stage
        received = tuple(_cut(x, spec.shape) for x, spec in zip(received, code.stage.receives, strict=True))
        outputs = code(*received, **self.keywords[number])
        if self.last:
            loss: torch.Tensor = outputs[0]
            return loss
        pairs = zip(outputs, largest.sends, strict=True)
        filled = ((_filled_up(x, spec.shape), spec) for x, spec in pairs)
        return tuple((x if spec.differentiable else x.detach()).contiguous() for x, spec in filled)


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


def _same(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
