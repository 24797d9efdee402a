"""verify, run: training under a plan, against one device or on its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.common import (
    GPUS,
    example_of,
    load_model,
    load_plan,
    planning_options,
    print_report,
    progress_shown,
)
from planner.errors import BadInput
from planner.garbage import uncollected
from planner.report import Verification, summary, verification_figures, verification_report
from planner.step_trace import require_folder_of

if TYPE_CHECKING:
    from planner.models import LoadedModel

MOST_LOSSES = 12  # lines of losses printed
VERIFIED = {"unequal": 1, "failed": 7, "refused": 2}  # exit codes of outcomes, the worst first


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of ranks; processes stand for GPUs that are not there.")
@click.option(
    "--strategy", default="auto", show_default=True, help="One or several, comma-separated: auto,ddp,pp2.dp2 mb=4"
)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Training steps.")
@click.option("--tolerance", type=float, help="Error allowed, of a tensor's largest entry. [default: by dtype]")
@planning_options
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
    with progress_shown() as progress, uncollected():
        progress("loading the model")
        import torch

        torch.manual_seed(options["seed"])  # of the model's weights
        is_config = Path(model).suffix == ".json" or Path(model).is_dir()
        precision = options["precision"] or ("fp32" if is_config else None)  # bf16 would show gross errors only
        loaded = load_model(model, options["global_batch"], sequence_length, precision, built=True)
        from planner.api import verify_each

        found = verify_each(
            loaded.model,
            gpus=gpus,
            **example_of(loaded),
            **options,
            strategies=names,
            steps=steps,
            tolerance=tolerance,
            progress=progress,
        )
        for row in found:
            rows.append(row)
            if not as_json:
                print_report(verification_report(row))
    if as_json:
        click.echo(json.dumps(verification_figures(rows), indent=1))
    outcomes = {row.outcome for row in rows}
    worst = next((outcome for outcome in VERIFIED if outcome in outcomes), "equal")
    sys.exit(VERIFIED.get(worst, 0))


@click.command()
@click.argument("model")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan made before; else one is made now.")
@click.option("--gpus", type=GPUS, help="Number of devices. [default: those of the plan]")
@click.option("--strategy", default="auto", show_default=True, help="Strategy of the plan to make.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write what every rank did when, as a Chrome trace.")
@click.option("--learning-rate", type=click.FloatRange(min=0), default=1e-3, show_default=True)
@planning_options
def run(
    model: str,
    plan_file: Path | None,
    gpus: int | None,
    steps: int,
    learning_rate: float,
    trace: Path | None,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL on its example batch: on local ranks, or on those of torchrun."""
    if trace is not None:
        require_folder_of(trace)
    made = load_plan(plan_file) if plan_file is not None else None
    if made is not None:
        if gpus not in (None, made.mesh.size):
            raise BadInput(
                f"{plan_file} is for {made.mesh.size} devices, not {gpus}; leave --gpus out or make a new plan"
            )
        gpus = made.mesh.size
        options |= {"global_batch": made.global_batch, "precision": made.precision, "plan": made}
    if gpus is None:
        raise BadInput("give --gpus N, or --plan with a plan made before")
    with progress_shown() as progress, uncollected():
        progress("loading the model")
        import torch

        torch.manual_seed(options["seed"])  # of the model's first weights
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=True)
        from planner.api import auto_parallelize

        parallel = auto_parallelize(loaded.model, gpus=gpus, **example_of(loaded), **options, progress=progress)
    try:
        losses = [float(loss) for loss in _train(parallel, loaded, steps, learning_rate, trace)]
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


def _train(parallel: Any, loaded: LoadedModel, steps: int, learning_rate: float, trace: Path | None) -> list[float]:
    """Every step sees the example batch: a run that works drives its loss down."""
    import torch

    from planner.models import example_batch

    batch = example_batch(loaded)
    losses: list[float] = parallel.train(
        [batch] * steps,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        steps=steps,
        trace=trace,
    )
    return losses


def _shown(count: int) -> list[int]:
    """At most MOST_LOSSES steps, evenly spread, the first and the last among them."""
    if count <= MOST_LOSSES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_LOSSES - 1)) for i in range(MOST_LOSSES)})
