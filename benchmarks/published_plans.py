"""The solver's plan beside configurations that others published, under the same cost model.

    python -m benchmarks.published_plans              every row of data/published_plans.csv
    python -m benchmarks.published_plans --quick      those marked quick
    python -m benchmarks.published_plans --only llama

A row of the file is a configuration as its source states it: model (of benchmarks.shapes), machines, rows a step (batch),
degrees, rows of a micro-batch, ZeRO stage, recomputation, schedule and stages a GPU (chunks), and the seconds measured for it.
An empty field is not stated; for ZeRO and recomputation the best then counts for the published side. ``memory_gb``: of these
machines, where it is not the preset's. Measured times are shown for information: software and numerics were others (Megatron-LM
in float16, without sequence parallelism where recomputation is full), while both plans here are priced for bfloat16 by one model.

What differs is listed choice by choice; "saved" says where the time goes that the solver's plan does not take, in parts of the
published step: arithmetic (mostly recomputation), exposed communication, pipeline bubble.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from benchmarks.hand_picked import TOLERANCE, seconds
from benchmarks.rows import ROOT, Row, answer, made, show

if TYPE_CHECKING:
    from planner.ir.plan import Plan
    from planner.solve.configuration import Evaluator

DATA = ROOT / "benchmarks" / "data" / "published_plans.csv"
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Published:
    """A row of the file; every field as it is written there."""

    model: str
    cluster: str
    memory_gb: str
    gpus: str
    batch: str
    pp: str
    dp: str
    tp: str
    micro_batch: str
    zero: str
    recompute: str
    schedule: str
    chunks: str
    measured_s: str
    quick: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.gpus} x {self.cluster}"

    def strategies(self) -> Iterator[str]:
        """The configuration in the grammar of strategies; one for each way to fill in what is not stated."""
        pp, dp, tp = int(self.pp), int(self.dp), int(self.tp)
        mesh = ".".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1) or "single"
        words = [mesh, f"mb={int(self.batch) // dp // int(self.micro_batch)}"]
        pipeline = [f"schedule={self.schedule}"] if pp > 1 else []
        pipeline += [f"v={self.chunks}"] if pp > 1 and int(self.chunks) > 1 else []
        stages = [self.zero] if self.zero else ["0", "1"]
        again = [self.recompute] if self.recompute else ["none", "selective", "full"]
        for zero, recompute in itertools.product(stages if dp > 1 else ["0"], again):
            yield " ".join([*words, f"zero={zero}", f"recompute={recompute}", *pipeline])


def read() -> tuple[Published, ...]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return tuple(Published(**row) for row in csv.DictReader(file))


def compare(row: Row) -> Row:
    """One row: the solver's plan and the published one."""
    import time
    from dataclasses import replace

    from benchmarks.shapes import problem
    from planner.garbage import uncollected
    from planner.solve.configuration import Evaluator
    from planner.solve.search import search

    published = Published(**row)
    with uncollected():
        todo = problem(published.model, int(published.batch), published.cluster, int(published.gpus))
        if published.memory_gb:
            limit = int(float(published.memory_gb) * 1e9)
            device = replace(todo.cluster.device, memory_bytes=limit)
            todo = replace(todo, cluster=replace(todo.cluster, device=device), memory_limit_bytes=limit)
        since = time.perf_counter()
        plan = search(todo)
        search_s = time.perf_counter() - since
        by_hand, reason = price(Evaluator(todo), published)
    return {
        "plan": figures(plan),
        "gap": plan.gap,
        "search_s": search_s,
        "published": figures(by_hand) if by_hand else None,
        "reason": reason,
    }


def price(evaluator: Evaluator, published: Published) -> tuple[Plan | None, str]:
    """The published plan (the fastest that fits of those it can mean; else the one nearest to fitting), or why it has none."""
    from planner.errors import BadInput
    from planner.strategies import plan_by_hand

    plans, reason = [], ""
    for strategy in published.strategies():
        try:
            plans.append(plan_by_hand(evaluator, strategy))
        except BadInput as error:
            reason = str(error)
    fitting = [plan for plan in plans if plan.estimate.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.objective_s), ""
    return min(plans, key=lambda plan: plan.estimate.peak_memory_bytes, default=None), reason


def figures(plan: Plan) -> Row:
    estimate = plan.estimate
    return {
        "configuration": plan.configuration,
        "step_time_s": estimate.step_time_s,
        "compute_s": estimate.compute_s,
        "communication_s": estimate.exposed_communication_s,
        "bubble_s": estimate.bubble_s,
        "over_bytes": max(0, estimate.peak_memory_bytes - estimate.memory_limit_bytes),
        "choices": choices(plan),
    }


def choices(plan: Plan) -> Row:
    """The plan's choices by name, in the order they are shown."""
    mesh = plan.mesh
    rows = plan.global_batch // mesh.dp // plan.micro_batches
    words = dict(word.split("=") for word in plan.configuration.split() if "=" in word)
    return {
        "pp": mesh.pp,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "micro-batch": rows,
        "zero": plan.zero,
        "recompute": words.get("recompute", "none"),
        "schedule": words.get("schedule", "none"),
        "v": plan.chunks,
    }


def differences(published: Row, solver: Row) -> str:
    """``dp 8 -> 16, recompute full -> none``; from the published choice to the solver's."""
    there, here = published["choices"], solver["choices"]
    return ", ".join(f"{name} {there[name]} -> {here[name]}" for name in here if here[name] != there[name]) or "none"


def saved(published: Row, solver: Row) -> str:
    """Parts of the published step that the solver's plan does not take (+) or takes in addition (-)."""
    parts = (("compute", "compute_s"), ("communication", "communication_s"), ("bubble", "bubble_s"))
    shares = [(name, (published[key] - solver[key]) / published["step_time_s"]) for name, key in parts]
    return ", ".join(f"{name} {share:+.1%}" for name, share in shares if abs(share) >= 5e-4)


HEADINGS = (
    "model and cluster",
    "measured",
    "published",
    "step",
    "plan",
    "step",
    "gap",
    "gain",
    "differs",
    "saved",
    "search",
)


def cells(row: Published, found: Row) -> tuple[str, ...]:
    measured = seconds(float(row.measured_s)) if row.measured_s else ""
    if "error" in found:
        return (row.name, measured, " or ".join(row.strategies()), "", found["error"], *[""] * 6)
    solver, published = found["plan"], found["published"]
    plan = (solver["configuration"], seconds(solver["step_time_s"]), f"{found['gap']:.2%}")
    search = f"{found['search_s']:.1f} s"
    if published is None:
        return (row.name, measured, next(row.strategies()), found["reason"], *plan, "", "", "", search)
    over = f" ({published['over_bytes'] / 1e9:.1f} GB over)" if published["over_bytes"] else ""
    by_hand = (published["configuration"] + over, seconds(published["step_time_s"]))
    gained = gain(found)
    said = f"{'WORSE ' if gained is not None and gained < 1 - TOLERANCE else ''}{gained:.3f}" if gained else ""
    return (row.name, measured, *by_hand, *plan, said, differences(published, solver), saved(published, solver), search)


def gain(found: Row) -> float | None:
    """The published step over the solver's; None where the published plan is not to be compared."""
    published = found.get("published")
    if not published or published["over_bytes"]:
        return None
    return float(published["step_time_s"] / found["plan"]["step_time_s"])


def summary(all_found: Sequence[Row]) -> str:
    gains = sorted(g for g in map(gain, all_found) if g is not None)
    worse = sum(g < 1 - TOLERANCE for g in gains)
    words = f"never worse: {len(gains) - worse} of {len(gains)} published configurations that fit"
    if gains:
        words += f"; gain from {gains[0]:.3f} to {gains[-1]:.3f}, median {gains[len(gains) // 2]:.3f}"
    over = sum(bool((found.get("published") or {}).get("over_bytes")) for found in all_found)
    failed = sum("error" in found or not found["published"] for found in all_found)
    words += f"; {over} do not fit by the memory model" if over else ""
    return words + (f"; {failed} failed" if failed else "")


@click.command()
@click.option("--quick", is_flag=True, help="A few rows only.")
@click.option("--only", default="", help="Rows whose name holds this.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
@click.option("--row", hidden=True)
def main(quick: bool, only: str, markdown: bool, row: str | None) -> None:
    """The solver's plans beside published configurations."""
    if row is not None:
        answer(compare, row)
        return
    found: list[Row] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for published in read():
            if only in published.name and (published.quick or not quick):
                found.append(made("benchmarks.published_plans", asdict(published), LIMIT_S))
                yield cells(published, found[-1])

    show(HEADINGS, rows(), markdown)
    click.echo(summary(found))


if __name__ == "__main__":
    main()
