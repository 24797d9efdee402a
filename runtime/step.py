"""Runs a batch of one size on a rank: its inputs, the code of each of its micro-batches, and their schedule.

A rank may hold several, for batches of several sizes; all run on the tensors of one ``RankModule``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from planner.ir.mesh import deal, in_lowest_terms
from planner.ir.program import Program, StageProgram
from runtime.batch import Keywords, micro_batches
from runtime.collectives import Axis
from runtime.recorder import Recorder
from runtime.schedule import StageRunner
from runtime.stage_module import Code, RankModule, read_code


def axes_for(program: Program, axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """``axes`` as the sources of ``program`` see them: dp knows its unequal shares."""
    dp = axes["dp"]
    uneven = program.batch_size % dp.size
    shares = in_lowest_terms(deal(program.batch_size, dp.size)) if uneven else ()
    return {**axes, "dp": replace(dp, shares=shares)}


def largest_stages(program: Program, axes: Mapping[str, Axis]) -> tuple[StageProgram, ...]:
    """This rank's stages, for the largest of its micro-batches."""
    rank_rows, rows = program.pieces_of(axes["dp"].index)
    stages = program.stages_for(rank_rows, rows[0])
    return tuple(stages[i] for i in program.on_rank(axes["pp"].index))


class Step:
    """Forward and backward of all micro-batches of a batch that ``program`` is for. ``axes``: of ``axes_for``."""

    def __init__(
        self,
        program: Program,
        module: RankModule,
        axes: Mapping[str, Axis],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self.program, self.axes, self.device = program, axes, device
        rank_rows, rows = program.pieces_of(axes["dp"].index)
        self.codes: list[tuple[Code, ...]] = []  # of each stage, what runs each micro-batch
        for stage in module.stages:
            index = stage.running.stage.index
            codes = {
                size: read_code(program.stages_for(rank_rows, size)[index], axes, device, stage)
                for size in dict.fromkeys(rows)
            }
            self.codes.append(tuple(codes[size] for size in rows))
        self.runner = StageRunner(self.codes, program, axes["pp"], device, recorder or Recorder(device))

    def keywords(self, batch: Mapping[str, torch.Tensor], step: int) -> list[list[Keywords]]:
        """The keyword arguments of each stage for each micro-batch: its inputs and the global counts."""
        return [self._keywords(codes, batch, step) for codes in self.codes]

    def _keywords(self, codes: Sequence[Code], batch: Mapping[str, torch.Tensor], step: int) -> list[Keywords]:
        stage, dp = codes[0].stage, self.axes["dp"]
        result = micro_batches(self.program, stage.inputs, batch, dp, self.device, step)
        if stage.counts:
            inputs = micro_batches(self.program, stage.prologue_inputs, batch, dp, self.device, step)
            with torch.no_grad():
                shares = [code.prologue(**keywords) for code, keywords in zip(codes, inputs, strict=True)]
            counts = {spec.name: sum(c) for spec, c in zip(stage.counts, zip(*shares, strict=True), strict=True)}
            for keywords in result:
                keywords.update(counts)  # type: ignore[arg-type]
        return result

    def global_loss(self, loss: torch.Tensor | None, world: dist.ProcessGroup | None) -> float:
        """The sum of all ranks' shares: each of them where the loss is partial on an axis, else the first one's."""
        counts = (self.program.loss_is_partial_on_dp or self.axes["dp"].index == 0) and (
            self.program.loss_is_partial_on_tp or self.axes["tp"].index == 0
        )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if loss is not None and counts:
            total += loss
        if world is not None:
            dist.all_reduce(total, group=world)
        return float(total)
