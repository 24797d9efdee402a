"""How long planning takes from a module to a proven plan, beside the limits it is held to.

    python -m benchmarks.plan_time                   every case, each in a process of its own
    python -m benchmarks.plan_time --only gpt3       those whose name holds the word

Building the model and importing libraries are not counted: they are there before the call. "solve" cases count the search
only. A case passes when it took no longer than its limit on two cores and the plan is proven (gap 0 up to rounding).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from benchmarks.rows import ROOT, Row, TimedEvaluator, answer, made, show

LIMIT_S = 1200.0
PROVEN_GAP = 1e-6


@dataclass(frozen=True)
class Case:
    """``model``: a file of examples/configs, or a name of benchmarks.shapes. ``limit_s``: for trace and search, or solve only."""

    model: str
    gpus: int
    cluster: str
    batch: int
    limit_s: float
    solve_only: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.removesuffix('.json')}, batch {self.batch}, {self.gpus} x {self.cluster}"


CASES = (
    Case("gpt2.json", 8, "dgx-a100-80gb", 64, 5.0),
    Case("llama-3-8b.json", 64, "dgx-h100", 64, 15.0),
    Case("llama-3-70b.json", 512, "dgx-h100", 512, 40.0),
    Case("gpt3-175b", 1024, "dgx-a100-80gb", 1536, 10.0, solve_only=True),
    Case("llama-3-405b", 16384, "dgx-h100", 2048, 30.0),
)


def load(model: str, batch: int) -> tuple[Any, Any, Any]:
    """The module, its batch, and its loss."""
    from planner.trace import Batch

    if model.endswith(".json"):
        from planner.models import load_model

        loaded = load_model(str(ROOT / "examples" / "configs" / model), batch)
        return loaded.model, Batch(loaded.example_inputs or (), loaded.example_kwargs), loaded.loss_fn
    from benchmarks.shapes import SHAPES, sample

    module, inputs = sample(SHAPES[model], batch)
    return module, Batch(inputs, {}), None


def measure(row: Row) -> Row:
    """One case, in this process."""
    from benchmarks.shapes import OPTIMIZER, precision
    from costmodels.hardware import load_cluster
    from planner.garbage import uncollected
    from planner.solve.problem import Problem
    from planner.solve.search import search
    from planner.trace import trace

    machines = load_cluster(row["cluster"], row["gpus"])
    with uncollected():
        model, batch, loss_fn = load(row["model"], row["batch"])
        start = time.perf_counter()
        graph = trace(model, batch, loss_fn).graph
        traced = time.perf_counter()
        problem = Problem(row["model"], graph, machines, OPTIMIZER, precision(machines), machines.device.memory_bytes)
        evaluator = TimedEvaluator(problem)
        plan = search(problem, evaluator=evaluator)
        done = time.perf_counter()
    return {
        "trace_s": traced - start,
        "pricing_s": evaluator.pricing_s,
        "search_s": done - traced,
        "plan": plan.configuration,
        "objective_s": plan.objective_s,
        "gap": plan.gap,
        "searched": len(plan.searched),
    }


def cells(case: Case, found: Row) -> tuple[str, ...]:
    limit = f"{case.limit_s:g} s{' (search)' if case.solve_only else ''}"
    if "error" in found:
        return (case.name, "", "", "", limit, "NO", "", found["error"], "")
    counted = found["search_s"] + (0.0 if case.solve_only else found["trace_s"])
    passes = counted <= case.limit_s and found["gap"] <= PROVEN_GAP
    return (
        case.name,
        f"{found['trace_s']:.1f} s",
        f"{found['search_s']:.1f} s",
        f"{counted:.1f} s",
        limit,
        "yes" if passes else "NO",
        f"{found['memory_bytes'] / 1e9:.2f} GB",
        found["plan"],
        f"{found['gap']:.2%}",
    )


HEADINGS = ("model and cluster", "trace", "search", "counted", "limit", "within", "memory", "plan", "gap")


@click.command()
@click.option("--only", default="", help="Cases whose name holds this.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
@click.option("--row", hidden=True)
def main(only: str, markdown: bool, row: str | None) -> None:
    """Seconds of tracing and searching beside their limits."""
    if row is not None:
        answer(measure, row)
        return
    chosen = (case for case in CASES if only in case.name)
    rows = (cells(case, made("benchmarks.plan_time", asdict(case), LIMIT_S)) for case in chosen)
    show(HEADINGS, rows, markdown)


if __name__ == "__main__":
    main()
