"""Predicted and measured steps on local ranks, for every strategy picked by hand and the solver's plan.

    python -m benchmarks.local                    six models on 2 and on 4 ranks
    python -m benchmarks.local --only gpt --ranks 2
    python -m benchmarks.local --details          every strategy, not only the summary
    python -m benchmarks.local --plain            priced without the tables of ``planner measure``

For each model and number of ranks: this machine is measured at the model's shapes, each strategy is priced, and each trains
for a few steps in several rounds, so that whatever else the machine does hits all alike. What is shown:

    error       predicted over measured time, less 1; MAPE is the mean of its size
    rank        Spearman's rank correlation of predicted and measured times of a model's strategies
    regret      measured time of the strategy predicted to be fastest, over the least measured, less 1
    memory      the peak of the fullest rank: what the process grew by since before it held any weights, and the prediction

Corrections from earlier runs (planner.calibrate) are left out. A measured time is the median of all steps of all rounds, a step
that of the slowest rank. More ranks than cores take turns, and a rank that waits leaves its core to the others: those rows say
how far a model of ranks that all run can be trusted then.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from benchmarks.published import mape, rank_correlation, regrets
from benchmarks.rows import Row, answer, made, show

if TYPE_CHECKING:
    from planner.ir.program import Program

MODELS = ("wide-mlp", "deep-mlp", "gpt", "giant-vocabulary", "cnn", "long-sequence")
STRATEGIES = {
    2: (
        "ddp", "dp2 zero=1", "dp2 zero=2", "fsdp", "tp", "model", "gpipe", "1f1b", "pp2 mb=4 schedule=zero-bubble", "ddp mb=4",
        "1f1b recompute=full", "pp2 mb=2",
    ),
    4: (
        "ddp", "dp4 zero=1", "dp4 zero=2", "fsdp", "tp", "model", "gpipe", "1f1b", "dp2.tp2", "pp2.dp2", "pp2.tp2",
        "pp2.dp2 zero=1",
    ),
}  # fmt: skip
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Ran:
    """One strategy. ``reason``: why it was not run."""

    group: str
    strategy: str
    plan: str
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    reason: str = ""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def run(row: Row) -> Row:
    """One model on so many ranks: measure, price, train."""
    import torch

    import planner
    from benchmarks.local_models import CASES
    from costmodels.measured import Corrections
    from planner.errors import MeshwrightError
    from planner.garbage import uncollected
    from planner.lower import lower
    from planner.options import asked
    from planner.solve.configuration import Evaluator
    from planner.solve.search import search
    from planner.strategies import plan_by_hand
    from planner.tracing import problem_of, trace_model

    torch.manual_seed(0)
    case, gpus = CASES[row["model"]], row["ranks"]
    model, batch = case.make(), case.batch()
    told = {"example_inputs": batch}
    coverage = ""
    if not row["plain"]:
        found = planner.measure(model, gpus, refresh=row["refresh"], **told)
        coverage = f"{found.measured} of {found.calls} calls measured"
    made = asked("local", gpus, "auto", None, told)
    traced, _ = trace_model(model, made.batch, made.request, made.samplewise)
    problem = problem_of(model, traced.graph, made.request)
    tables = problem.cluster.measured
    tables = None if row["plain"] or tables is None else replace(tables, corrections=Corrections())
    problem = replace(problem, cluster=replace(problem.cluster, measured=tables))
    with uncollected():
        evaluator = Evaluator(problem)
        plans: dict[str, Any] = {"auto": search(problem)}
        rows: dict[str, dict[str, Any]] = {}
        for strategy in STRATEGIES[gpus]:
            try:
                plans[strategy] = plan_by_hand(evaluator, strategy)
            except MeshwrightError as error:
                rows[strategy] = {"strategy": strategy, "plan": "", "reason": str(error)}
    programs = {strategy: lower(traced.graph, plan) for strategy, plan in plans.items()}
    tensors = {name: batch[int(path[4:-1])] for name, path in traced.input_paths.items()}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in plans}
    memory: dict[str, list[int]] = {strategy: [] for strategy in plans}
    for _ in range(row["rounds"]):
        for strategy, program in programs.items():
            steps, peak = train(model, program, tensors, row["steps"])
            seconds[strategy] += steps
            memory[strategy].append(peak)
    for strategy, plan in plans.items():
        rows[strategy] = {
            "strategy": strategy,
            "plan": plan.configuration,
            "predicted_s": plan.objective_s,
            "measured_s": statistics.median(seconds[strategy]),
            "predicted_bytes": max(device.total_bytes for device in plan.estimate.devices),
            "measured_bytes": min(memory[strategy]),
        }
    return {"ran": list(rows.values()), "coverage": coverage}


def train(model: Any, program: Program, tensors: dict[str, Any], steps: int) -> tuple[list[float], int]:
    """Seconds of each of ``steps`` steps after two that warm up, and the most that a rank grew by."""
    import tempfile
    from pathlib import Path

    import torch

    from planner.trace import tensors_by_target
    from runtime.launch import LocalRanks
    from runtime.optimizer import describe_optimizer

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with tempfile.TemporaryDirectory() as folder, LocalRanks.start(program.mesh.size, device="cpu") as ranks:
        state = Path(folder, "state.pt")
        torch.save(
            {
                name: x.detach()
                for name, x in tensors_by_target(
                    model, {s.target for stage in program.stages for s in stage.states}
                ).items()
            },
            state,
        )
        before = ranks.call("peak_memory_bytes")
        ranks.call("load", {"program": program.to_dict(), "state": str(state)})
        ranks.call("optimizer", {"spec": describe_optimizer(torch.optim.AdamW, parameters)})
        times = ranks.call("measure", {"batch": tensors, "steps": steps + 2})
        after = ranks.call("peak_memory_bytes")
    grown = max(b - a for a, b in zip(before, after, strict=True))
    return [max(each) for each in zip(*times, strict=True)][2:], grown


# --- the table --------------------------------------------------------------------------------------------------------

HEADINGS = ("model", "ranks", "strategies", "MAPE", "worst", "rank", "regret", "plan", "memory MAPE", "priced by")
DETAILS = ("model", "ranks", "strategy", "plan", "predicted", "measured", "error", "memory", "measured", "error")


def read(row: Row, found: Row) -> list[Ran]:
    group = f"{row['model']} on {row['ranks']}"
    return [Ran(group, **each) for each in found.get("ran", ())]


def ran(rows: Sequence[Ran]) -> list[Ran]:
    return [row for row in rows if not row.reason]


def summary(row: Row, found: Row) -> tuple[str, ...]:
    if "error" in found:
        return (row["model"], str(row["ranks"]), found["error"], *[""] * (len(HEADINGS) - 3))
    done = ran(read(row, found))
    chosen = next(each for each in done if each.strategy == "auto")
    return (
        row["model"],
        str(row["ranks"]),
        str(len(done)),
        f"{mape(done):.1%}",
        f"{max((each.error for each in done), key=abs):+.0%}",
        f"{rank_correlation(done):.2f}",
        f"{regrets(done)[0]:.1%}",
        chosen.plan.replace(" recompute=none", ""),
        f"{statistics.fmean(abs(each.memory_error) for each in done):.0%}",
        found["coverage"] or "constants",
    )


def details(row: Row, found: Row) -> Iterator[tuple[str, ...]]:
    for each in sorted(read(row, found), key=lambda each: each.measured_s):
        first = (row["model"], str(row["ranks"]), each.strategy)
        if each.reason:
            yield (*first, each.reason[:60], *[""] * 6)
            continue
        times = (f"{1e3 * each.predicted_s:.1f} ms", f"{1e3 * each.measured_s:.1f} ms", f"{each.error:+.0%}")
        memory = (
            f"{each.predicted_bytes / 1e6:.0f} MB",
            f"{each.measured_bytes / 1e6:.0f} MB",
            f"{each.memory_error:+.0%}",
        )
        yield (*first, each.plan, *times, *memory)


def words(ranks: int, rows: Sequence[Ran]) -> str:
    """Everything on so many ranks in one line."""
    lost = regrets(rows)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    turns = f", {ranks / cores:g} to a core" if ranks > cores else ""
    by_group = [
        rank_correlation([x for x in rows if x.group == group]) for group in dict.fromkeys(x.group for x in rows)
    ]
    return (
        f"{ranks} ranks{turns}: {len(rows)} runs, MAPE {mape(rows):.1%}, rank correlation {statistics.fmean(by_group):.2f} "
        f"(mean over models), regret {statistics.median(lost):.1%} / {statistics.fmean(lost):.1%} / {lost[-1]:.1%} "
        f"(median / mean / worst), memory MAPE {statistics.fmean(abs(x.memory_error) for x in rows):.0%}"
    )


@click.command()
@click.option("--only", default="", help="Models whose name holds this.")
@click.option("--ranks", type=click.Choice(["2", "4"]), help="Only so many.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Of every round.")
@click.option("--plain", is_flag=True, help="Price by the constants of this machine alone.")
@click.option("--keep", is_flag=True, help="Use the tables that are there; else all is measured anew.")
@click.option("--details", "every", is_flag=True, help="Every strategy, below the table.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
@click.option("--row", hidden=True)
def main(
    only: str,
    ranks: str | None,
    rounds: int,
    steps: int,
    plain: bool,
    keep: bool,
    every: bool,
    markdown: bool,
    row: str | None,
) -> None:
    """Predicted and measured steps of six models on local ranks."""
    if row is not None:
        answer(run, row)
        return
    wanted = [
        {"model": model, "ranks": n, "rounds": rounds, "steps": steps, "plain": plain, "refresh": not keep}
        for n in STRATEGIES
        if ranks in (None, str(n))
        for model in MODELS
        if only in model
    ]
    answers: list[tuple[Row, Row]] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for each in wanted:
            answers.append((each, made("benchmarks.local", each, LIMIT_S)))
            yield summary(*answers[-1])

    show(HEADINGS, rows(), markdown)
    if every:
        show(DETAILS, (line for each in answers for line in details(*each)), markdown)
    for n in STRATEGIES:
        done = [one for each in answers if each[0]["ranks"] == n for one in ran(read(*each))]
        if done:
            click.echo(words(n, done))


if __name__ == "__main__":
    main()
