"""What the commands share: options, loading models and plans, progress, printing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from planner.errors import BadInput, Infeasible
from planner.ir.plan import Plan
from planner.ir.verify import verify_plan
from planner.sizes import parse_bytes

if TYPE_CHECKING:
    from planner.models import LoadedModel

Progress = Callable[..., None]
Command = TypeVar("Command", bound=Callable[..., Any])


class Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


def planning_options(command: Command) -> Command:
    """The options of a search, in the order the help shows them."""
    return planning_options_without()(command)


def planning_options_without(*left_out: str) -> Callable[[Command], Command]:
    """Those but for the named ones, such as 'cluster'."""
    options = [
        click.option("--cluster", default="auto", show_default=True, help="Preset, TOML file, or auto: this machine."),
        click.option("--global-batch", type=click.IntRange(min=1), help="Samples in one step over all devices."),
        click.option("--not-batched", multiple=True, help="Argument whose dim 0 is not the batch; may be repeated."),
        click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sample."),
        click.option("--precision", help="fp32, bf16, fp16 or fp64."),
        click.option("--memory-limit", type=Size(), help="Memory of one device to stay within, as 40GB or 24GiB."),
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
    names = (
        "cluster", "global_batch", "not_batched", "sequence_length", "precision", "memory_limit", "time_limit", "seed",
        "samplewise", "json",
    )  # fmt: skip

    def add(command: Command) -> Command:
        for name, option in reversed(list(zip(names, options, strict=True))):
            if name not in left_out:
                command = option(command)
        return command

    return add


@contextmanager
def infeasible_as_json(as_json: bool) -> Iterator[None]:
    """With ``as_json``, what would make a model fit goes to stdout as data, besides the message."""
    try:
        yield
    except Infeasible as error:
        if as_json:
            click.echo(json.dumps({"error": "infeasible", "message": str(error), **error.figures}, indent=1))
        raise


GPUS = click.IntRange(min=1)


def load_model(
    model: str, global_batch: int | None, sequence_length: int | None, precision: str | None, built: bool
) -> LoadedModel:
    """``built``: with weights, to be run; else a model from a config takes no memory."""
    from planner import models

    return models.load_model(model, global_batch, sequence_length, precision, device="cpu" if built else "meta")


def example_of(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "example_inputs": loaded.example_inputs,
        "example_kwargs": loaded.example_kwargs,
        "loss_fn": loaded.loss_fn,
    }


def load_plan(path: Path) -> Plan:
    found = Plan.load(path)
    verify_plan(found)
    return found


def save_plan(found: Plan, path: Path) -> None:
    try:
        found.save(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None


def print_report(renderable: Any) -> None:
    Console().print(renderable)


@contextmanager
def progress_shown() -> Iterator[Progress]:
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
