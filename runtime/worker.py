"""One rank of a lowered program: loads its stages, runs training steps, answers for its share of the state.

``Rank`` is driven in two ways by the same methods: by a controlling process, which may call the methods in ``REMOTE``
by name with plain data and tensors, the same call on every rank; and in-process under torchrun. Every method is
collective over all ranks unless it says otherwise.

A step is: this rank's rows, cut into micro-batches; the global counts (sums over micro-batches of ``Stage.prologue``);
forward and backward of every micro-batch by the schedule; sums of gradients over ranks. Nothing is averaged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import BadInput
from planner.ir.program import Program
from runtime import checkpoint, state
from runtime.batch import fits
from runtime.collectives import Axis
from runtime.device import peak_memory_bytes, reset_peak_memory, synchronize
from runtime.gradients import GradientReducer, clip_gradients
from runtime.groups import Groups
from runtime.opaque import load_modules
from runtime.optimizer import StageOptimizer
from runtime.recorder import GATHERING, REDUCTION, STEP, UPDATE, Recorder
from runtime.shards import gather, shard
from runtime.stage_module import RankModule, build_rank
from runtime.step import Step, axes_for, largest_stages

Named = dict[str, torch.Tensor | None]


class Rank:
    """A rank of a program. ``torch.distributed`` must be initialized already when there is more than one.

    ``rank`` and ``world_size`` must be those of its default group. ``timeout_s``: of every collective.
    """

    REMOTE = frozenset(
        {
            "load", "forward_backward", "gradients", "state", "optimizer", "step", "zero_grad", "train_step",
            "clip_grad_norm", "save", "load_checkpoint", "peak_memory_bytes", "measure", "add_batch_size", "traced_step",
        }
    )  # fmt: skip

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self._groups = Groups(timeout_s)
        if (rank, world_size) != (self._groups.rank, self._groups.world_size):
            raise BadInput(
                f"rank {rank} of {world_size} was asked for, but the process group says rank {self._groups.rank} "
                f"of {self._groups.world_size}. Initialize torch.distributed first."
            )
        self._loaded: _Loaded | None = None

    def load(
        self,
        program: Program | Mapping[str, Any],
        state: str | Path | Mapping[str, torch.Tensor],
        modules: str | Path | bytes | None = None,
    ) -> None:
        """Build this rank's stages and fill them; replaces what was loaded before.

        ``program``: a Program, or its ``to_dict()``. ``state``: original name -> whole tensor, or the path of a file of
        it written by ``torch.save``, which is mapped into memory so that only this rank's part is read. ``modules``: what
        ``runtime.opaque.dump_modules`` gave for the modules the program calls as they are, or the path of a file of it.
        Raises BadInput when the number of processes, a name or a shape does not fit; InvalidPlan for a broken program.
        """
        if not isinstance(program, Program):
            program = Program.from_dict(program)
        self._loaded = None
        source = state if isinstance(state, Mapping) else torch.load(state, mmap=True, weights_only=True)
        reset_peak_memory(self.device)
        code = Path(modules).read_bytes() if isinstance(modules, str | Path) else modules
        opaque = load_modules(code) if code is not None else {}
        self._loaded = _Loaded(program, self._groups, source, self.device, opaque)

    def add_batch_size(self, program: Program | Mapping[str, Any]) -> None:
        """Also run batches of the size ``program`` is for, on the tensors that are loaded. Not collective.

        Raises InvalidPlan when ``program`` does not hold them as the first one does.
        """
        self._here.add(program if isinstance(program, Program) else Program.from_dict(program))

    @property
    def program(self) -> Program:
        return self._here.program

    @property
    def module(self) -> RankModule:
        """This rank's stages."""
        return self._here.module

    @property
    def _here(self) -> _Loaded:
        if self._loaded is None:
            raise BadInput("no program is loaded on this rank; call load(program, state) first")
        return self._loaded

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Original name -> what the optimizer updates of this rank's stages: the local parameter, a DTensor on dp where ZeRO
        cuts it. Not collective."""
        return {h.spec.target: h.updated for h in self._here.module.held if not h.spec.is_buffer}

    def forward_backward(self, batch: Mapping[str, torch.Tensor], step: int = 0) -> float:
        """Run all micro-batches of ``batch``, input name -> whole global tensor; returns the global loss on every rank.

        The batch may have any size a program was loaded or added for.

        Gradients accumulate, as by ``loss.backward()``. ``step`` seeds random operators. Raises BadInput for a missing
        input, another shape or dtype.
        """
        here = self._here
        run = here.step_for(batch)
        keywords = run.keywords(batch, step)
        here.reducer.start()
        loss = run.runner.run(keywords)
        with here.recorder.span(REDUCTION):
            here.reducer.finish()
        return run.global_loss(loss, self._groups.world)

    def gradients(self) -> Named:
        """Original name -> whole gradient, on the CPU; None where there is none. Trainable parameters of these stages.

        Only the first rank of a stage (dp = tp = 0) returns them, the others {}.
        """
        here = self._here
        result: Named = {}
        for h in state.owned(here.module.held, here.axes["pp"]):
            if h.spec.is_buffer or not h.spec.trainable:
                continue
            gradient = h.updated.grad
            whole = None if gradient is None else state.assemble(gradient, h.spec, here.axes)
            if here.answers:
                result[h.spec.target] = None if whole is None else whole.detach().to("cpu", copy=True)
        return result

    def state(self) -> Named:
        """Original name -> whole parameter or buffer of this stage, on the CPU; further names of a tensor share it.

        Only the first rank of a stage (dp = tp = 0) returns them, the others {}.
        """
        here = self._here
        result: Named = {}
        for h in state.owned(here.module.held, here.axes["pp"]):
            whole = state.assemble(h.tensor, h.spec, here.axes)
            if here.answers:
                result.update(dict.fromkeys((h.spec.target, *h.spec.aliases), whole.to("cpu", copy=True)))
        return result

    def gather_over_stages(self, mapping: Mapping[str, torch.Tensor | None]) -> Named:
        """What ``gradients`` or ``state`` returned, of all stages, on every rank and on the CPU."""
        return state.gather_over_stages(self._here.program, mapping, self._groups.rank, self.device)

    def optimizer(self, spec: Mapping[str, Any]) -> None:
        """Build the optimizer described by ``runtime.optimizer.describe_optimizer``. Not collective."""
        trainable = {name: p for name, p in self.named_parameters().items() if p.requires_grad}
        self._here.optimizer = StageOptimizer(spec, trainable)

    def step(self) -> None:
        """One update by the optimizer. Under ZeRO-1 and 2 the ranks then exchange what they updated."""
        self._update(self._optimizer)

    def _update(self, optimizer: StageOptimizer) -> None:
        here = self._here
        with here.recorder.span(UPDATE):
            optimizer.step()
        with here.recorder.span(GATHERING):
            gather(here.module.held, here.axes["dp"])

    @property
    def _optimizer(self) -> StageOptimizer:
        if self._here.optimizer is None:
            raise BadInput("no optimizer is set; call optimizer(describe_optimizer(factory, named_parameters)) first")
        return self._here.optimizer

    def zero_grad(self) -> None:
        """Drop all gradients. Not collective."""
        for h in self._here.module.held:
            h.tensor.grad = h.updated.grad = None

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale gradients to a global 2-norm of at most ``max_norm``; returns the norm before, of the whole model."""
        here = self._here
        return clip_gradients(here.module.held, here.axes, self._groups.world, self.device, max_norm)

    def train_step(self, batch: Mapping[str, torch.Tensor], step: int = 0, max_norm: float | None = None) -> float:
        """Zero gradients, forward and backward, clip (if ``max_norm`` is given), update; returns the global loss."""
        optimizer = self._optimizer
        self.zero_grad()
        loss = self.forward_backward(batch, step)
        if max_norm is not None:
            self.clip_grad_norm(max_norm)
        self._update(optimizer)
        return loss

    def traced_step(
        self, batch: Mapping[str, torch.Tensor], step: int = 0, max_norm: float | None = None
    ) -> dict[str, Any]:
        """``train_step`` that also tells what took how long here: ``loss`` and ``spans`` (runtime.recorder.Span)."""
        recorder = self._here.recorder
        if self._groups.world is not None:
            dist.barrier()
        recorder.active = True
        try:
            with recorder.span(STEP):
                loss = self.train_step(batch, step, max_norm)
        finally:
            recorder.active = False
            spans = recorder.taken()
        return {"loss": loss, "spans": spans}

    def save(self, path: str) -> None:
        """Write a checkpoint folder that any number of ranks, or the plain module, can load (runtime.checkpoint)."""
        here = self._here
        checkpoint.save_checkpoint(path, here.module.held, here.optimizer, here.axes)

    def load_checkpoint(self, path: str) -> None:
        """Read weights and buffers, and the optimizer's memory where ``optimizer`` was called before."""
        here = self._here
        checkpoint.load_checkpoint(path, here.module.held, here.optimizer, here.axes)

    def peak_memory_bytes(self) -> int:
        """Peak since ``load``: of tensors on a GPU; of the whole process, since its start, on a CPU. Not collective."""
        return peak_memory_bytes(self.device)

    def measure(self, batch: Mapping[str, torch.Tensor], steps: int) -> list[float]:
        """Seconds of each of ``steps`` training steps on this rank, all ranks starting together.

        A step updates the weights when an optimizer is set; otherwise it is forward and backward alone.
        """
        times_s = []
        for number in range(steps):
            synchronize(self.device)
            if self._groups.world is not None:
                dist.barrier()
            start_s = time.perf_counter()
            if self._here.optimizer is not None:
                self.train_step(batch, number)
            else:
                self.zero_grad()
                self.forward_backward(batch, number)
            synchronize(self.device)
            times_s.append(time.perf_counter() - start_s)
        return times_s


class _Loaded:
    """A program on this rank: its stages with weights, and what runs and reduces it."""

    def __init__(
        self,
        program: Program,
        groups: Groups,
        source: Mapping[str, torch.Tensor],
        device: torch.device,
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        self.program, self.device = program, device
        self.recorder = Recorder(device)
        self.axes: dict[str, Axis] = {
            name: replace(axis, recorder=self.recorder) for name, axis in groups.axes(program.mesh).items()
        }
        self.world = groups.world
        axes = axes_for(program, self.axes)
        self.answers = self.axes["dp"].index == self.axes["tp"].index == 0
        self.module = build_rank(largest_stages(program, axes), axes, device, modules)
        if program.zero == 3:
            for stage in self.module.stages:
                state.shard_segments(stage, program, self.axes["dp"], device)
        state.fill(self.module, source, self.axes, device)
        shared = {s.tied_stages for x in program.stages for s in x.states if len(s.tied_stages) > 1}
        pp = program.mesh.pp
        tied = {
            stages: groups.over_stages(program.mesh, tuple(sorted({i % pp for i in stages})))
            for stages in sorted(shared)
        }
        if program.zero in (1, 2):
            shard(self.module, self.axes["dp"], device)
        at_once = [stage.held for stage in self.module.stages] if program.zero == 2 else []
        self.reducer = GradientReducer(self.module.held, self.axes, tied, program.micro_batches, at_once)
        self.steps = [Step(program, self.module, axes, device, self.recorder)]
        self.optimizer: StageOptimizer | None = None

    def step_for(self, batch: Mapping[str, torch.Tensor]) -> Step:
        """What runs batches of this size."""
        return next((step for step in self.steps if fits(step.program, batch)), self.steps[0])

    def add(self, program: Program) -> None:
        """Also run batches of the size ``program`` is for."""
        self.steps.append(Step(program, self.module, axes_for(program, self.axes), self.device, self.recorder))
