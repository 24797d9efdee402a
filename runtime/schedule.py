"""Runs the micro-batches of one step through a rank's stage.

One stage: a loop of forward and backward. Several: torch.distributed.pipelining, which sends activations and gradients.

Micro-batches differ in their keyword arguments, of which some are cut (inputs), some whole (counts) and some no tensors
of the batch at all (the random state). The schedule's public ``step`` can only cut a keyword along dim 0, so the only
keyword given to it is the numbers of the micro-batches; ``_Feed`` looks the true keywords up by that number. This needs
no private call and no padding, and keeps torch from treating the stage as a module wrapped by DDP or FSDP.

Shapes travel as meta tensors, so no trial forward runs. The loss is computed in the last stage: the loss function of
the schedule is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from planner.ir.program import Program, StageProgram, TensorSpec
from runtime.collectives import Axis
from runtime.stage_module import StageModule

Keywords = Mapping[str, torch.Tensor]


class StageRunner:
    """Forward and backward of all micro-batches of one rank's stage."""

    def __init__(self, module: StageModule, program: Program, pp: Axis, device: torch.device) -> None:
        self.module = module
        self.micro_batches = program.micro_batches
        self.feed: _Feed | None = None
        if pp.size == 1:
            return
        stage = program.stages[pp.index]
        self.feed = _Feed(module, stage, last=pp.index == pp.size - 1)
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
        if self.feed is None:
            return self._loop(keywords)
        numbers = torch.arange(self.micro_batches)
        losses: list[torch.Tensor] = []
        self.feed.keywords = tuple(keywords)
        self.schedule.step(target=numbers, losses=losses, return_outputs=False, micro_batch=numbers)
        self.feed.keywords = ()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _loop(self, keywords: Sequence[Keywords]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for arguments in keywords:
            (loss,) = self.module(**arguments)
            if loss.requires_grad:
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


class _Feed(nn.Module):
    """A stage whose keyword arguments are chosen by the number of the micro-batch, a tensor of shape [1] on the CPU."""

    def __init__(self, module: StageModule, stage: StageProgram, last: bool) -> None:
        super().__init__()
        self.module, self.sends, self.last = module, stage.sends, last
        self.keywords: tuple[Keywords, ...] = ()

    def forward(self, *received: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = self.module(*received, **self.keywords[int(micro_batch)])
        if self.last:
            loss: torch.Tensor = outputs[0]
            return loss
        pairs = zip(outputs, self.sends, strict=True)
        return tuple((x if spec.differentiable else x.detach()).contiguous() for x, spec in pairs)


def _meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", requires_grad=spec.differentiable)


def _same(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
