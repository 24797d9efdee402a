"""plan, inspect, compare: plans made, shown, and beside those a person would pick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from planner.commands.common import (
    GPUS,
    example_of,
    infeasible_as_json,
    load_model,
    load_plan,
    planning_options,
    print_report,
    progress_shown,
    save_plan,
)
from planner.errors import BadInput
from planner.garbage import uncollected
from planner.ir.plan import Plan
from planner.report import comparison_figures, comparison_report, plan_figures, plan_report, summary
from planner.step_trace import require_folder_of


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of devices.")
@click.option(
    "--strategy", default="auto", show_default=True, help="auto, or a hand-picked one: ddp, pp2.dp2 mb=4, ..."
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the plan goes. [default: plan.json]"
)
@planning_options
def plan(model: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Find the fastest plan for MODEL, prove it, print it, and write it to plan.json."""
    target = output or (None if as_json else Path("plan.json"))
    if target is not None:
        require_folder_of(target)
    with infeasible_as_json(as_json):
        found = _plan(model, **options)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        print_report(plan_report(found))
    if target is not None:
        save_plan(found, target)
        click.echo(f"plan written to {target}", err=True)


@click.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the figures of the report as JSON.")
@click.option("--summary", "one_line", is_flag=True, help="Print one line.")
def inspect(plan_file: Path, as_json: bool, one_line: bool) -> None:
    """Show a plan as a report: stages, layouts, schedule, time, memory, and what binds."""
    found = load_plan(plan_file)
    if as_json:
        click.echo(json.dumps(plan_figures(found), indent=1))
    elif one_line:
        click.echo(summary(found))
    else:
        print_report(plan_report(found))


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of devices.")
@click.option("--strategies", help="Comma-separated, for example auto,ddp,fsdp,tp. [default: all that apply]")
@click.option("--measure", is_flag=True, help="Also run each plan on local ranks and show the measured time.")
@planning_options
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
    with progress_shown() as progress:
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=measure)
        from planner.api import compare as compare_strategies

        rows = compare_strategies(
            loaded.model, gpus=gpus, **example_of(loaded), **options, **chosen, measure=measure, progress=progress
        )
    if as_json:
        click.echo(json.dumps(comparison_figures(rows), indent=1))
    else:
        print_report(comparison_report(rows))


def _plan(model: str, gpus: int, sequence_length: int | None, **options: Any) -> Plan:
    with progress_shown() as progress, uncollected():
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.api import auto_parallelize

        parallel = auto_parallelize(loaded.model, gpus=gpus, **example_of(loaded), **options, progress=progress)
        try:
            found: Plan = parallel.plan
        finally:
            parallel.close()
    return found
