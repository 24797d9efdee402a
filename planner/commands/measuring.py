"""measure, calibrate: times of this machine, for its plans."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from planner.commands.common import (
    GPUS,
    example_of,
    load_model,
    planning_options_without,
    print_report,
    progress_shown,
)
from planner.report.measurement import (
    calibration_figures,
    calibration_report,
    measurement_figures,
    measurement_report,
)


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of ranks; processes stand for GPUs that are not there.")
@click.option("--refresh", is_flag=True, help="Time again what is there already.")
@planning_options_without("cluster", "memory_limit", "time_limit")
def measure(model: str, gpus: int, refresh: bool, sequence_length: int | None, as_json: bool, **options: Any) -> None:
    """Time operators, messages and the optimizer's step on this machine, at the shapes MODEL needs; plans then use them.

    Interrupted (Ctrl-C, SIGTERM), it keeps what it has, and the next call goes on from there.
    """
    with terminated_as_interrupted(), progress_shown() as progress:
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.measuring import measure as measure_model

        found = measure_model(loaded.model, gpus, refresh=refresh, **example_of(loaded), **options, progress=progress)
    if as_json:
        click.echo(json.dumps(measurement_figures(found), indent=1))
    else:
        print_report(measurement_report(found))


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print only JSON on stdout.")
def calibrate(trace: Path, as_json: bool) -> None:
    """Correct prices for this machine by TRACE, a file that planner run --trace wrote."""
    from planner.measuring import calibrate as calibrate_by

    found = calibrate_by(trace)
    if as_json:
        click.echo(json.dumps(calibration_figures(found), indent=1))
    else:
        print_report(calibration_report(found))


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM ends the work inside as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
