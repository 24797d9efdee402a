"""The command line: ``planner plan``, ``inspect``, ``compare``, ``verify``, ``run``.

Results go to stdout, progress and messages to stderr. Exit codes: 2 for wrong usage, and those of ``planner.errors``.
torch and the solver are imported by the commands that trace or solve, never by ``inspect``.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from planner.errors import BadInput, MeshwrightError
from planner.garbage import uncollected
from planner.ir.plan import Plan
from planner.ir.verify import verify_plan
from planner.report import (
    Verification,
    comparison_figures,
    comparison_report,
    plan_figures,
    plan_report,
    summary,
    verification_figures,
    verification_report,
)
from planner.sizes import parse_bytes

if TYPE_CHECKING:
    from planner.models import LoadedModel

INTERRUPTED = 130
MOST_LOSSES = 12  # lines of losses printed
VERIFIED = {"unequal": 1, "failed": 7, "refused": 2}  # exit codes of outcomes, the worst first

Progress = Callable[..., None]
Command = TypeVar("Command", bound=Callable[..., Any])


class _Commands(click.Group):
    """Turns errors meant for the user into one message and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            click.echo(f"planner: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("planner: interrupted", err=True)
            ctx.exit(INTERRUPTED)


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Plans, proves and runs the fastest way to train a PyTorch model on N GPUs.

    MODEL is module:callable, path/to/file.py:callable, or a Hugging Face config file. The callable returns a model, or
    (model, example_inputs, example_kwargs, loss_fn) with any of the last ones left out.
    """


def _planning_options(command: Command) -> Command:
    """The options of a search, in the order the help shows them."""
    options = [
        click.option("--cluster", default="auto", show_default=True, help="Preset, TOML file, or auto: this machine."),
        click.option("--global-batch", type=click.IntRange(min=1), help="Samples in one step over all devices."),
        click.option("--not-batched", multiple=True, help="Argument whose dim 0 is not the batch; may be repeated."),
        click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sample."),
        click.option("--precision", help="fp32, bf16, fp16 or fp64."),
        click.option("--memory-limit", type=_Size(), help="Memory of one device to stay within, as 40GB or 24GiB."),
        click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds to search at most."),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option(
            "--samplewise",
            multiple=True,
            metavar="PATH",
            help="Modules that cannot be traced but treat each row of the batch alone; '*' for all. Several times.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print only JSON on stdout."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


GPUS = click.IntRange(min=1)


@cli.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of devices.")
@click.option(
    "--strategy", default="auto", show_default=True, help="auto, or a hand-picked one: ddp, pp2.dp2 mb=4, ..."
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the plan goes. [default: plan.json]"
)
@_planning_options
def plan(model: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Find the fastest plan for MODEL, prove it, print it, and write it to plan.json."""
    target = output or (None if as_json else Path("plan.json"))
    if target is not None and not target.absolute().parent.is_dir():
        raise BadInput(f"cannot write {target}: there is no folder {target.parent}")
    found = _plan(model, **options)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        _print(plan_report(found))
    if target is not None:
        _save(found, target)
        click.echo(f"plan written to {target}", err=True)


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the figures of the report as JSON.")
@click.option("--summary", "one_line", is_flag=True, help="Print one line.")
def inspect(plan_file: Path, as_json: bool, one_line: bool) -> None:
    """Show a plan as a report: stages, layouts, schedule, time, memory, and what binds."""
    found = _load(plan_file)
    if as_json:
        click.echo(json.dumps(plan_figures(found), indent=1))
    elif one_line:
        click.echo(summary(found))
    else:
        _print(plan_report(found))


@cli.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of devices.")
@click.option("--strategies", help="Comma-separated, for example auto,ddp,fsdp,tp. [default: all that apply]")
@click.option("--measure", is_flag=True, help="Also run each plan on local ranks and show the measured time.")
@_planning_options
def compare(
    model: str,
    gpus: int,
    sequence_length: int | None,
    strategies: str | None,
    measure: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the solver's plan for MODEL with hand-picked strategies."""
    names = tuple(name.strip() for name in strategies.split(",")) if strategies is not None else None
    if names is not None and not all(names):
        raise BadInput(f"--strategies {strategies!r} holds an empty name; write for example auto,ddp,tp")
    chosen: dict[str, Any] = {} if names is None else {"strategies": names}
    with _progress() as progress:
        progress("loading the model")
        loaded = _load_model(model, options["global_batch"], sequence_length, options["precision"], built=measure)
        from planner.api import compare as compare_strategies

        rows = compare_strategies(
            loaded.model, gpus=gpus, **_batch(loaded), **options, **chosen, measure=measure, progress=progress
        )
    if as_json:
        click.echo(json.dumps(comparison_figures(rows), indent=1))
    else:
        _print(comparison_report(rows))


@cli.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of ranks; processes stand for GPUs that are not there.")
@click.option(
    "--strategy", default="auto", show_default=True, help="One or several, comma-separated: auto,ddp,pp2.dp2 mb=4"
)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Training steps.")
@click.option("--tolerance", type=float, help="Error allowed, of a tensor's largest entry. [default: by dtype]")
@_planning_options
def verify(
    model: str,
    gpus: int,
    strategy: str,
    steps: int,
    tolerance: float | None,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Check that training MODEL under a plan equals training it on one device, tensor by tensor.

    Exit code: 0 equal, 1 not equal, 2 refused, 7 failed; the worst of several strategies.
    """
    names = tuple(name.strip() for name in strategy.split(","))
    if not all(names):
        raise BadInput(f"--strategy {strategy!r} holds an empty name; write for example auto,ddp,tp")
    rows: list[Verification] = []
    with _progress() as progress, uncollected():
        progress("loading the model")
        import torch

        torch.manual_seed(options["seed"])  # of the model's weights
        is_config = Path(model).suffix == ".json" or Path(model).is_dir()
        precision = options["precision"] or ("fp32" if is_config else None)  # bf16 would show gross errors only
        loaded = _load_model(model, options["global_batch"], sequence_length, precision, built=True)
        from planner.api import verify_each

        found = verify_each(
            loaded.model,
            gpus=gpus,
            **_batch(loaded),
            **options,
            strategies=names,
            steps=steps,
            tolerance=tolerance,
            progress=progress,
        )
        for row in found:
            rows.append(row)
            if not as_json:
                _print(verification_report(row))
    if as_json:
        click.echo(json.dumps(verification_figures(rows), indent=1))
    outcomes = {row.outcome for row in rows}
    worst = next((outcome for outcome in VERIFIED if outcome in outcomes), "equal")
    sys.exit(VERIFIED.get(worst, 0))


@cli.command()
@click.argument("model")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan made before; else one is made now.")
@click.option("--gpus", type=GPUS, help="Number of devices. [default: those of the plan]")
@click.option("--strategy", default="auto", show_default=True, help="Strategy of the plan to make.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--learning-rate", type=click.FloatRange(min=0), default=1e-3, show_default=True)
@_planning_options
def run(
    model: str,
    plan_file: Path | None,
    gpus: int | None,
    steps: int,
    learning_rate: float,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL on its example batch: on local ranks, or on those of torchrun."""
    made = _load(plan_file) if plan_file is not None else None
    if made is not None:
        if gpus not in (None, made.mesh.size):
            raise BadInput(
                f"{plan_file} is for {made.mesh.size} devices, not {gpus}; leave --gpus out or make a new plan"
            )
        gpus = made.mesh.size
        options |= {"global_batch": made.global_batch, "precision": made.precision, "plan": made}
    if gpus is None:
        raise BadInput("give --gpus N, or --plan with a plan made before")
    with _progress() as progress, uncollected():
        progress("loading the model")
        import torch

        torch.manual_seed(options["seed"])  # of the model's first weights
        loaded = _load_model(model, options["global_batch"], sequence_length, options["precision"], built=True)
        from planner.api import auto_parallelize

        parallel = auto_parallelize(loaded.model, gpus=gpus, **_batch(loaded), **options, progress=progress)
    try:
        losses = [float(loss) for loss in _train(parallel, loaded, steps, learning_rate)]
    finally:
        parallel.close()
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        click.echo(json.dumps({"configuration": parallel.plan.configuration, "losses": losses}, indent=1))
        return
    click.echo(summary(parallel.plan))
    for step in _shown(len(losses)):
        click.echo(f"step {step + 1:>{len(str(steps))}}  loss {losses[step]:.6g}")


def _plan(model: str, gpus: int, sequence_length: int | None, **options: Any) -> Plan:
    with _progress() as progress, uncollected():
        progress("loading the model")
        loaded = _load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.api import auto_parallelize

        parallel = auto_parallelize(loaded.model, gpus=gpus, **_batch(loaded), **options, progress=progress)
        try:
            found: Plan = parallel.plan
        finally:
            parallel.close()
    return found


def _load_model(
    model: str, global_batch: int | None, sequence_length: int | None, precision: str | None, built: bool
) -> LoadedModel:
    """``built``: with weights, to be run; else a model from a config takes no memory."""
    from planner.models import load_model

    return load_model(model, global_batch, sequence_length, precision, device="cpu" if built else "meta")


def _batch(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "example_inputs": loaded.example_inputs,
        "example_kwargs": loaded.example_kwargs,
        "loss_fn": loaded.loss_fn,
    }


def _train(parallel: Any, loaded: LoadedModel, steps: int, learning_rate: float) -> list[float]:
    """Every step sees the example batch: a run that works drives its loss down."""
    import torch

    from planner.models import example_batch

    batch = example_batch(loaded)
    losses: list[float] = parallel.train(
        [batch] * steps, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), steps=steps
    )
    return losses


def _shown(count: int) -> list[int]:
    """At most MOST_LOSSES steps, evenly spread, the first and the last among them."""
    if count <= MOST_LOSSES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_LOSSES - 1)) for i in range(MOST_LOSSES)})


def _load(path: Path) -> Plan:
    found = Plan.load(path)
    verify_plan(found)
    return found


def _save(found: Plan, path: Path) -> None:
    try:
        found.save(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None


def _print(renderable: Any) -> None:
    Console().print(renderable)


@contextmanager
def _progress() -> Iterator[Progress]:
    """``progress(message, done=None, total=None)`` on stderr: a live line on a terminal, else each new message."""
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def tell(message: str, done: float | None = None, total: float | None = None) -> None:
            if message not in told:
                told.add(message)
                click.echo(f"{message} ...", err=True)

        yield tell
        return

    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def update(message: str, done: float | None = None, total: float | None = None) -> None:
            bars.update(task, description=message, completed=done or 0, total=total)

        yield update


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without these characters shows ? instead of failing
    cli(prog_name="planner")
