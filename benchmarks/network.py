"""Plans for two hosts and the link between them, against what their steps take there.

    python -m benchmarks.network                   100 Mbit/s, 1 and 10 Gbit/s
    python -m benchmarks.network --only gpt --details

Two hosts of one rank are emulated (benchmarks.hosts; root on Linux, else it says so and ends). For each model and rate:
operators are measured on this machine (planner.measure) and messages over the link, the solver's plan and strategies picked by
hand are priced by these, and all are trained on the hosts, in rounds. The plan should change with the link, and stay the fastest
measured. Corrections from earlier runs (planner.calibrate) are left out.

    best        the strategy of least measured time
    regret      measured time of the solver's plan over that, less 1
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.hosts import Hosts, HostsError, why_not
from benchmarks.local import Ran, ran
from benchmarks.published import mape, rank_correlation
from benchmarks.rows import Row, show

if TYPE_CHECKING:
    from costmodels.hardware import Cluster
    from planner.solve.problem import Problem

MODELS = ("wide-mlp", "gpt", "cnn")
RATES = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
STRATEGIES = ("ddp", "dp2 zero=1", "fsdp", "tp", "model", "gpipe", "1f1b", "pp2 mb=4 schedule=zero-bubble")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
MESSAGE_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
LONGEST_MESSAGE_S = 0.5  # larger ones are extrapolated
HOSTS = 2
LIMIT_S = 900.0


def run(row: Row, hosts: Hosts) -> dict[str, Any]:
    """One model at one rate."""
    import torch

    import planner
    from benchmarks.local_models import CASES
    from planner.errors import MeshwrightError
    from planner.garbage import uncollected
    from planner.lower import lower
    from planner.options import asked
    from planner.solve.configuration import Evaluator
    from planner.solve.search import search
    from planner.strategies import plan_by_hand
    from planner.tracing import problem_of, trace_model

    torch.manual_seed(0)
    case = CASES[row["model"]]
    model, batch = case.make(), case.batch()
    planner.measure(model, HOSTS, example_inputs=batch)
    made = asked("network", HOSTS, "auto", None, {"example_inputs": batch})
    traced, _ = trace_model(model, made.batch, made.request, made.samplewise)
    hosts.limit(RATES[row["rate"]])
    problem = over_link(problem_of(model, traced.graph, made.request), hosts, RATES[row["rate"]])
    plans: dict[str, Any] = {}
    with uncollected():
        evaluator = Evaluator(problem)
        plans["auto"] = search(problem)
        for strategy in STRATEGIES:
            try:
                plans[strategy] = plan_by_hand(evaluator, strategy)
            except MeshwrightError:
                continue
    programs = {strategy: lower(traced.graph, plan) for strategy, plan in plans.items()}
    tensors = {name: batch[int(path[4:-1])] for name, path in traced.input_paths.items()}
    seconds = train(model, programs, tensors, row, hosts)
    rows = [
        {
            "strategy": strategy,
            "plan": plan.configuration,
            "predicted_s": plan.objective_s,
            "measured_s": statistics.median(seconds[strategy]),
        }
        for strategy, plan in plans.items()
    ]
    return {"ran": rows}


def over_link(problem: Problem, hosts: Hosts, bits_per_s: float) -> Problem:
    """``problem`` on two nodes of one rank: messages take what they take on the link."""
    from dataclasses import replace

    from costmodels.calibration import TimedCollective, fit_link
    from costmodels.measured import Corrections, MeasuredCollective

    messages = [(kind, size) for kind in KINDS for size in MESSAGE_BYTES if 8 * size / bits_per_s < LONGEST_MESSAGE_S]
    seconds = job(hosts, {"what": "time", "messages": [list(message) for message in messages]})
    pairs = list(zip(messages, seconds, strict=True))
    link = fit_link([TimedCollective(kind, size, HOSTS, s) for (kind, size), s in pairs], 0.0)
    cluster: Cluster = problem.cluster
    assert cluster.measured is not None
    tables = replace(cluster.measured, collectives=(), corrections=Corrections()).with_collectives(
        MeasuredCollective(kind, HOSTS, HOSTS, size, s) for (kind, size), s in pairs
    )
    two = replace(cluster, name="two hosts", gpus_per_node=1, inter=link, measured=tables)
    return replace(problem, cluster=two)


def train(
    model: Any, programs: dict[str, Any], tensors: dict[str, Any], row: Row, hosts: Hosts
) -> dict[str, list[float]]:
    """Seconds of the steps of every program."""
    import torch

    from planner.trace import tensors_by_target
    from runtime.optimizer import describe_optimizer

    targets = {s.target for program in programs.values() for stage in program.stages for s in stage.states}
    state = {name: x.detach() for name, x in tensors_by_target(model, targets).items()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    told = {
        "what": "train",
        "programs": [program.to_dict() for program in programs.values()],
        "optimizer": describe_optimizer(torch.optim.AdamW, parameters),
        "batch": tensors,
        "rounds": row["rounds"],
        "steps": row["steps"],
    }
    return dict(zip(programs, job(hosts, told, state), strict=True))


def job(hosts: Hosts, told: dict[str, Any], state: dict[str, Any] | None = None) -> Any:
    """What rank 0 answers. Raises HostsError."""
    import torch

    from benchmarks.network_rank import JOB, RESULT, STATE
    from runtime.messages import encode

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / JOB).write_bytes(encode(told, "job"))
        if state is not None:
            torch.save(state, folder / STATE)
        hosts.run("benchmarks.network_rank", folder, LIMIT_S)
        return json.loads((folder / RESULT).read_text())


# --- the table --------------------------------------------------------------------------------------------------------

HEADINGS = ("model", "link", "plan", "predicted", "measured", "best", "measured", "regret", "MAPE", "rank")
DETAILS = ("model", "link", "strategy", "plan", "predicted", "measured", "error")


def read(row: Row, found: Row) -> list[Ran]:
    return [Ran(f"{row['model']} at {row['rate']}", **each) for each in found.get("ran", ())]


def summary(row: Row, found: Row) -> tuple[str, ...]:
    if "error" in found:
        return (row["model"], row["rate"], found["error"], *[""] * (len(HEADINGS) - 3))
    done = ran(read(row, found))
    chosen, best = next(x for x in done if x.strategy == "auto"), min(done, key=lambda x: x.measured_s)
    return (
        row["model"],
        row["rate"],
        chosen.plan.replace(" recompute=none", ""),
        milliseconds(chosen.predicted_s),
        milliseconds(chosen.measured_s),
        best.strategy,
        milliseconds(best.measured_s),
        f"{chosen.measured_s / best.measured_s - 1:.1%}",
        f"{mape(done):.0%}",
        f"{rank_correlation(done):.2f}",
    )


def details(row: Row, found: Row) -> Iterator[tuple[str, ...]]:
    for x in sorted(read(row, found), key=lambda x: x.measured_s):
        times = (milliseconds(x.predicted_s), milliseconds(x.measured_s))
        yield (row["model"], row["rate"], x.strategy, x.plan, *times, f"{x.error:+.0%}")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def words(answers: list[tuple[Row, Row]]) -> str:
    done = [ran(read(*each)) for each in answers if "error" not in each[1]]
    lost = sorted(
        next(x for x in one if x.strategy == "auto").measured_s / min(x.measured_s for x in one) - 1 for one in done
    )
    plans: dict[str, set[str]] = {}
    for (row, _), one in zip([each for each in answers if "error" not in each[1]], done, strict=True):
        plans.setdefault(row["model"], set()).add(next(x for x in one if x.strategy == "auto").plan)
    changed = sum(len(found) > 1 for found in plans.values())
    text = f"the plan changes with the link for {changed} of {len(plans)} models"
    if lost:
        text += f"; its regret: median {statistics.median(lost):.1%}, mean {statistics.fmean(lost):.1%}, worst {lost[-1]:.1%}"
    return text


@click.command()
@click.option("--only", default="", help="Models whose name holds this.")
@click.option("--rate", type=click.Choice(list(RATES)), help="Only this link.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Of every round.")
@click.option("--details", "every", is_flag=True, help="Every strategy, below the table.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
def main(only: str, rate: str | None, rounds: int, steps: int, every: bool, markdown: bool) -> None:
    """Plans for two emulated hosts, and what their steps take there."""
    from planner.commands.measuring import terminated_as_interrupted

    reason = why_not()
    if reason:
        click.echo(f"skipped: {reason}")
        return
    answers: list[tuple[Row, Row]] = []

    def rows(hosts: Hosts) -> Iterator[tuple[str, ...]]:
        for model in (model for model in MODELS if only in model):
            for name in (name for name in RATES if rate in (None, name)):
                row = {"model": model, "rate": name, "rounds": rounds, "steps": steps}
                try:
                    found = run(row, hosts)
                except HostsError as error:
                    found = {"error": str(error)}
                answers.append((row, found))
                yield summary(row, found)

    with terminated_as_interrupted(), Hosts() as hosts:
        show(HEADINGS, rows(hosts), markdown)
    if every:
        show(DETAILS, (line for each in answers for line in details(*each)), markdown)
    click.echo(words(answers))


if __name__ == "__main__":
    main()
