"""estimate, explain, size, prove: what a person asks about a strategy or a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from costmodels.software import OURS, software_names
from planner.commands.common import (
    GPUS,
    example_of,
    infeasible_as_json,
    load_model,
    load_plan,
    planning_options,
    planning_options_without,
    print_report,
    progress_shown,
)
from planner.errors import BadInput
from planner.report import proof_figures, record_report, sizing_figures
from planner.report.difference import difference, difference_figures
from planner.report.estimate import estimate_figures, estimate_report
from planner.report.explanation import explanation_figures

PLAN = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, required=True, help="Number of devices.")
@click.option("--strategy", required=True, help="auto, or a hand-picked one: ddp, 'pp2.dp2 mb=4 recompute=full', ...")
@click.option(
    "--software", type=click.Choice(software_names()), default=OURS.name, show_default=True, help="What runs the step."
)
@planning_options
def estimate(
    model: str, gpus: int, strategy: str, software: str, sequence_length: int | None, as_json: bool, **options: Any
) -> None:
    """Predict time and memory of a training step of MODEL under one strategy."""
    with infeasible_as_json(as_json), progress_shown() as progress:
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.questions import estimate as estimate_model

        found = estimate_model(
            loaded.model, gpus, strategy=strategy, software=software, **example_of(loaded), **options, progress=progress
        )
    if as_json:
        click.echo(json.dumps(estimate_figures(found, strategy), indent=1))
    else:
        print_report(estimate_report(found, strategy))


@click.command()
@click.argument("model", required=False)
@click.option("--gpus", type=GPUS, help="Number of devices. [default: those of the plan]")
@click.option("--strategy", default="auto", show_default=True, help="Explain a hand-picked one instead.")
@click.option("--plan", "plan_file", type=PLAN, help="Explain this plan, made before for MODEL.")
@click.option("--operator", "operators", multiple=True, help="Name or module of an operator to explain; several times.")
@click.option("--changes/--no-changes", default=True, show_default=True, help="Solve for other machines too.")
@click.option(
    "--diff", nargs=2, type=PLAN, metavar="PLAN PLAN", help="Only tell two plans apart, from the files alone."
)
@planning_options
def explain(
    model: str | None,
    gpus: int | None,
    plan_file: Path | None,
    diff: tuple[Path, Path] | None,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Why a plan for MODEL and not another: families, what binds, what would change it, operators."""
    if diff is not None:
        if model is not None:
            raise BadInput("--diff takes two plans and no MODEL")
        found = difference(*map(load_plan, diff))
        if as_json:
            click.echo(json.dumps(difference_figures(found), indent=1))
        else:
            print_report(found)
        return
    if model is None:
        raise BadInput("give a MODEL to explain its plan, or --diff with two plans")
    _refuse_a_plan(model)
    made = load_plan(plan_file) if plan_file is not None else None
    if made is not None:
        gpus = made.mesh.size if gpus is None else gpus
        options |= {"global_batch": made.global_batch, "precision": made.precision, "plan": made}
    if gpus is None:
        raise BadInput("give --gpus N, or --plan with a plan made before")
    with infeasible_as_json(as_json), progress_shown() as progress:
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.questions import explain as explain_model

        why = explain_model(loaded.model, gpus, **example_of(loaded), **options, progress=progress)
    if as_json:
        click.echo(json.dumps(explanation_figures(why), indent=1))
    else:
        print_report(why)


def _refuse_a_plan(model: str) -> None:
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        try:
            data = json.loads(path.read_text())
        except ValueError:
            return
        if isinstance(data, dict) and "graph_digest" in data:
            raise BadInput(f"{model} is a plan, which holds no model; write: planner explain MODEL --plan {model}")


@click.command()
@click.argument("model")
@click.option("--clusters", help="Comma-separated presets or TOML files. [default: every preset]")
@click.option("--step-time", metavar="TIME", help="The most a step may take, as 500ms or 0.5s.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the whole training.")
@click.option("--within", metavar="TIME", help="The time all steps may take, as 12h or 7d.")
@click.option("--price", "prices", multiple=True, metavar="CLUSTER=PRICE", help="Of a GPU-hour; several times.")
@click.option("--most-gpus", type=GPUS, default=256, show_default=True, help="Largest size to look at.")
@planning_options_without("cluster")
def size(
    model: str,
    clusters: str | None,
    prices: tuple[str, ...],
    most_gpus: int,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """The smallest and the cheapest cluster that trains MODEL fast enough, over kinds of machines and GPU counts."""
    names = tuple(name.strip() for name in clusters.split(",")) if clusters is not None else ()
    if not all(names):
        raise BadInput(f"--clusters {clusters!r} holds an empty name; write for example dgx-a100-80gb,dgx-h100")
    with progress_shown() as progress:
        progress("loading the model")
        loaded = load_model(model, options["global_batch"], sequence_length, options["precision"], built=False)
        from planner.questions import size as size_model

        found = size_model(
            loaded.model,
            clusters=names,
            prices=_prices(prices),
            most_devices=most_gpus,
            **example_of(loaded),
            **options,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(sizing_figures(found), indent=1))
    else:
        print_report(found)


def _prices(texts: tuple[str, ...]) -> dict[str, float]:
    prices = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            raise BadInput(f"--price {text!r} is no price; write for example dgx-h100=2.5") from None
    return prices


@click.command()
@click.argument("plan_file", metavar="PLAN", type=PLAN)
@click.option("--model", help="Also check the plan against this model.")
@click.option("--cluster", help="The machine the plan is for. [default: the preset of its name]")
@click.option("--list", "with_record", is_flag=True, help="Show every configuration searched, its bound and outcome.")
@planning_options_without("cluster", "global_batch", "precision", "memory_limit", "time_limit", "seed")
def prove(
    plan_file: Path,
    model: str | None,
    cluster: str | None,
    with_record: bool,
    sequence_length: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Check the proof of PLAN again, without a solver: exit code 0 where it holds, 1 where it does not."""
    from planner.ir.plan import Plan
    from planner.proof import prove as prove_plan

    made = Plan.load(plan_file)
    if model is None:
        proof = prove_plan(made, cluster=cluster)
    else:
        with progress_shown() as progress:
            progress("loading the model")
            loaded = load_model(model, made.global_batch, sequence_length, made.precision, built=False)
            proof = prove_plan(made, loaded.model, cluster=cluster, **example_of(loaded), **options, progress=progress)
    if as_json:
        click.echo(json.dumps(proof_figures(proof), indent=1))
    else:
        print_report(proof)
        if with_record:
            print_report(record_report(made))
    sys.exit(0 if proof.holds else 1)
