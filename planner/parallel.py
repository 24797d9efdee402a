"""A planned model and its ranks: what ``auto_parallelize`` returns.

Ranks start at the first call that needs them. Locally they are processes of this machine, driven from here; under torchrun
this process is one of them, and every method that talks to ranks must be called on all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from planner.errors import BadInput
from planner.inputs import BatchForm, arguments_of
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.other_batch import other_rows, unchanged_paths
from planner.step_trace import Event, StepTrace, require_folder_of, save_trace
from planner.trace import Batch, tensors_by_target
from planner.trace_guards import refuse_modes
from runtime.batch import check_batch
from runtime.checkpoint import check_checkpoint
from runtime.launch import LocalRanks
from runtime.opaque import dump_modules
from runtime.optimizer import describe_optimizer
from runtime.tables import priced_with
from runtime.worker import Rank
from runtime.world import share_tensors

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
# (batch, its rows, key paths of inputs that are no longer or shorter) -> the program for it.
OtherBatch = Callable[[Batch, int, tuple[str, ...]], Program]
Named = dict[str, torch.Tensor | None]
# Columns of the plan as text.
NARROWEST, WIDTH = 60, 100


def default_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def check_operators(program: Program) -> None:
    """Raises BadInput when ``program`` calls operators that local ranks, which never ran the user's imports, lack."""
    if program.library_operators:
        raise BadInput(
            f"operator {program.library_operators[0]} is registered by a library, which local ranks do not load; start the "
            "script with torchrun, where every rank does, or write it with torch's own operators"
        )


class Parallel:
    """``plan``: the Plan. ``program``: what each stage runs; ``source(stage)`` is its text.

    A context manager: leaving it stops the ranks. Prints as the plan.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        program: Program,
        form: BatchForm,
        *,
        start: Callable[[], LocalRanks] | None = None,
        rank: Rank | None = None,
        other_batch: OtherBatch | None = None,
    ) -> None:
        """``other_batch``: makes the program for another number of rows; without it, only those of the plan run."""
        self.plan = plan
        self.program = program
        self._model = model
        self._form = form
        self._start = start
        self._ranks: LocalRanks | None = None
        self._rank = rank
        self._other_batch = other_batch
        self._others: dict[int, Program] = {}
        self._loaded = False
        self._closed = False
        self._has_optimizer = False
        self._step = 0

    # --- running ------------------------------------------------------------------------------------------------------

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """Run all micro-batches of one global batch; returns the loss, as the unsplit model would compute it.

        ``args`` and ``kwargs`` as the model takes them, ``target`` as loss_fn does, whole. Gradients accumulate, as by
        ``loss.backward()``. The number of rows may differ from the example's; the first batch of a new size traces the model
        again, with that many rows. Raises BadInput when other sizes or dtypes are not those of the example, or when there
        are too few rows for the plan.
        """
        tensors = self._tensors(Batch(args, kwargs, target))
        self._step += 1
        return float(self._call("forward_backward", batch=tensors, step=self._step)[0])

    def gradients(self) -> Named:
        """{original name: whole gradient, on the CPU; None where single-device has None}."""
        found = self._gathered("gradients")
        names = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        return {name: found.get(name) for name in names}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """{original name: whole tensor, on the CPU}: parameters and persistent buffers, as ``model.state_dict()``."""
        found = self._gathered("state")
        own = self._model.state_dict()
        result: dict[str, torch.Tensor] = {}
        for name, tensor in own.items():
            trained = found.get(name)
            result[name] = trained if trained is not None else tensor.detach().cpu()
        return result

    def buffers(self) -> Named:
        """{original name: whole tensor, on the CPU} of every buffer, those that ``state_dict`` leaves out among them."""
        found = self._gathered("state")
        return {name: found.get(name, tensor.detach().cpu()) for name, tensor in self._model.named_buffers()}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._call("zero_grad")

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""
        return float(self._call("clip_grad_norm", max_norm=float(max_norm))[0])

    def set_optimizer(self, optimizer: OptimizerFactory = default_optimizer) -> None:
        """Give every rank its share of ``optimizer(parameters)``; the class must be importable, the options data."""
        parameters = {name: p for name, p in self._model.named_parameters() if name in self._parameter_names()}
        spec = describe_optimizer(optimizer, {name: p for name, p in parameters.items() if p.requires_grad})
        self._call("optimizer", spec=spec)
        self._has_optimizer = True

    def step(self) -> None:
        """One update by the optimizer."""
        if not self._has_optimizer:
            raise BadInput("no optimizer is set; call set_optimizer(lambda params: torch.optim.AdamW(params)) first")
        self._call("step")

    def train(
        self,
        batches: Iterable[Any],
        optimizer: OptimizerFactory | None = None,
        steps: int | None = None,
        max_norm: float | None = None,
        progress: bool = True,
        trace: str | Path | None = None,
    ) -> list[float]:
        """Train; returns the loss of every step.

        ``batches``: each a ``(inputs, target)`` pair when there is a loss_fn (``inputs`` a tensor, tuple or dict), else a
        tuple of inputs or a dict of keywords. They are repeated when they run out before ``steps`` (iterators end).
        ``optimizer(parameters)`` makes the optimizer (AdamW, lr 1e-3, by default); called again without one, training
        goes on with the last. ``max_norm``: clip gradients to it first. ``trace``: a file that gets what every rank did when in
        every step, as a Chrome trace (planner.step_trace); local ranks only.
        """
        if trace is not None and self._rank is not None:
            raise BadInput("only local ranks are traced; leave trace out under torchrun")
        if trace is not None:
            require_folder_of(trace)
        if optimizer is not None or not self._has_optimizer:
            self.set_optimizer(optimizer or default_optimizer)
        losses: list[float] = []
        events: list[Event] = []
        with _progress_bar(progress and self._is_first) as bar:
            task = bar.add_task("training", total=steps, loss="")
            for batch in _repeated(batches, steps):
                tensors = self._tensors(self._as_batch(batch))
                self._step += 1
                arguments = {"batch": tensors, "step": self._step, "max_norm": max_norm}
                if trace is None:
                    loss = float(self._call("train_step", **arguments)[0])
                else:
                    found = self._call("traced_step", **arguments)
                    loss = float(found[0]["loss"])
                    spans = ((rank, span) for rank, of_rank in enumerate(found) for span in of_rank["spans"])
                    events += [Event(rank, self._step, **span) for rank, span in spans]
                losses.append(loss)
                bar.update(task, advance=1, loss=f"loss {loss:.4f}")
        if trace is not None:
            save_trace(StepTrace(self.plan, *priced_with(self.plan.mesh.size), tuple(events)), trace)
        return losses

    def measure(self, tensors: Mapping[str, torch.Tensor], steps: int) -> list[float]:
        """Seconds of ``steps`` training steps on ``tensors`` (by input name), after one that warms up: the slowest rank's."""
        times = self._call("measure", batch=dict(tensors), steps=steps + 1)
        return [max(per_step) for per_step in zip(*times, strict=True)][1:]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's shares of the trainable parameters, for an optimizer of the user's own. Only under torchrun."""
        if self._rank is None:
            raise BadInput(
                "parameters live in the ranks' processes; start the script with torchrun to hold them, or use train()"
            )
        self._ready()
        return iter([p for p in self._rank.module.parameters() if p.requires_grad])

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder (weights, buffers, optimizer state) that any other plan can load.

        Raises BadInput when a folder cannot be made there.
        """
        path = Path(path).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent):
                pass
        except OSError as error:
            raise BadInput(f"cannot write a checkpoint at {path}: {error.strerror}. Choose another path") from None
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} is a file; a checkpoint is a folder. Choose another path")
        self._call("save", path=str(path))

    def load(self, path: str | Path) -> None:
        """Read a checkpoint written by ``save``, of this or another plan of the model.

        The optimizer's memory is read too where an optimizer was set before. Raises BadInput when ``path`` holds no
        checkpoint of this model.
        """
        path = Path(path).absolute()
        check_checkpoint(path, self.program)
        self._call("load_checkpoint", path=str(path))

    def peak_memory_bytes(self) -> list[int]:
        """Of each rank (locally), or of this one (under torchrun)."""
        return [int(peak) for peak in self._call("peak_memory_bytes")]

    # --- looking ------------------------------------------------------------------------------------------------------

    def source(self, stage: int = 0) -> str:
        """The Python text a stage runs. Raises BadInput when there is no such stage."""
        last = len(self.program.stages) - 1
        if not 0 <= stage <= last:
            raise BadInput(f"there is no stage {stage}: the plan has {last + 1} stages, 0 to {last}")
        return self.program.stages[stage].source

    def __str__(self) -> str:
        from planner.report import plan_text

        columns = shutil.get_terminal_size((WIDTH, 24)).columns
        return plan_text(self.plan, max(NARROWEST, min(columns, WIDTH)))

    def __rich__(self) -> RenderableType:
        from planner.report import plan_report

        return plan_report(self.plan)

    def __repr__(self) -> str:
        from planner.report import summary

        return f"<Parallel {summary(self.plan)}>"

    def _repr_html_(self) -> str:
        from planner.report import plan_html

        return plan_html(self.plan)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the local ranks; does nothing under torchrun or when none run."""
        if self._rank is None:
            self._closed = True
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_first(self) -> bool:
        return self._rank is None or torch.distributed.get_rank() == 0

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        """``method`` on every rank; their results (under torchrun: this one's)."""
        self._ready()
        if self._rank is not None:
            return [getattr(self._rank, method)(**arguments)]
        assert self._ranks is not None
        return self._ranks.call(method, arguments)

    def _ready(self) -> None:
        """Start the ranks and give each its weights, once."""
        if self._closed:
            raise BadInput(
                "the ranks have been stopped, with what they had trained; use the plan inside its with block"
            )
        if self._loaded:
            return
        state = self._initial_state()
        called = sorted({spec.path for stage in self.program.stages for spec in stage.modules})
        modules = dump_modules(self._model, called) if called else None
        if self._rank is not None:
            self._rank.load(self.program, share_tensors(state), modules)
        else:
            assert self._start is not None
            check_operators(self.program)
            self._ranks = self._start()
            with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
                path = Path(folder) / "weights.pt"
                torch.save(state, path)
                arguments = {"program": self.program.to_dict(), "state": str(path)}
                if modules is not None:
                    code = Path(folder) / "modules.pkl"
                    code.write_bytes(modules)
                    arguments["modules"] = str(code)
                self._ranks.call("load", arguments)
        self._loaded = True

    def _initial_state(self) -> dict[str, torch.Tensor]:
        specs = {spec.target: spec for stage in self.program.stages for spec in stage.states}
        tensors = tensors_by_target(self._model, specs)
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise BadInput(
                    f"parameter {name!r} is on meta and has no values, so the plan can be looked at but not run; "
                    "build the model with weights"
                )
            if tuple(tensor.shape) != specs[name].shape:
                raise BadInput(
                    f"{name} has shape {list(tensor.shape)} here and {list(specs[name].shape)} in the plan; "
                    "build the same model on every rank"
                )
        return {name: t.detach().to("cpu", getattr(torch, specs[name].dtype)) for name, t in tensors.items()}

    def _parameter_names(self) -> set[str]:
        return {spec.target for stage in self.program.stages for spec in stage.states if not spec.is_buffer}

    def _gathered(self, method: str) -> Named:
        results = self._call(method)
        if self._rank is not None:
            return self._rank.gather_over_stages(results[0])
        merged: Named = {}
        for result in results:
            merged.update(result)
        return merged

    # --- batches ------------------------------------------------------------------------------------------------------

    def _as_batch(self, batch: Any) -> Batch:
        if isinstance(batch, Batch) or not self._form.has_target:
            return batch if isinstance(batch, Batch) else arguments_of(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise BadInput("each batch must be an (inputs, target) pair, because the plan has a loss_fn")
        return arguments_of(batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1])

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The program's inputs, by name, from what the user passed; refused here, they leave the ranks as they were."""
        refuse_modes()
        tensors = self._form.tensors(batch, self.program.inputs)
        check_batch(self._program_for(batch, tensors), tensors)
        return tensors

    def _program_for(self, batch: Batch, tensors: Mapping[str, torch.Tensor]) -> Program:
        """The plan's program, or that for the number of rows of ``batch``, which the ranks are given the first time."""
        rows = other_rows(self.program, tensors)
        if rows is None or self._other_batch is None:
            return self.program
        if rows not in self._others:
            program = self._other_batch(batch, rows, unchanged_paths(self.program, tensors))
            self._call("add_batch_size", program=program if self._rank is not None else program.to_dict())
            self._others[rows] = program
        return self._others[rows]


def _repeated(batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
    """Items of ``batches``, over again until there are ``steps``; an iterator cannot be repeated and ends."""
    count = 0
    while steps is None or count < steps:
        before = count
        for batch in batches:
            if steps is not None and count >= steps:
                return
            count += 1
            yield batch
        if not count:
            raise BadInput("batches is empty; there is nothing to train on")
        if steps is None or count == before or isinstance(batches, Iterator):
            return


def _progress_bar(shown: bool) -> Progress:
    console = Console(stderr=True)
    words, loss = TextColumn("{task.description}"), TextColumn("{task.fields[loss]}")
    columns = (words, BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not shown or not console.is_terminal, transient=True)
