"""What tells two plans apart: decisions in words, times and memory in figures. From the plans alone.

Layouts are compared operator by operator where both plans name it; a plan of another model shares none, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.ir.plan import Plan
from planner.report.explanation import SAME, grown
from planner.report.parts import step_parts
from planner.report.tables import heading, table
from planner.report.words import (
    limit_words,
    mesh_words,
    operator_name,
    placement_words,
    plural,
    recompute_words,
    schedule_words,
    strategy_words,
    zero_words,
)
from planner.sizes import format_bytes, format_seconds

MOST_OPERATORS = 20


@dataclass(frozen=True)
class Decision:
    """One decision that differs, in words."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Figure:
    """One figure of both plans, ``unit`` 's' or 'B'."""

    name: str
    first: float
    second: float
    unit: str


@dataclass(frozen=True)
class Difference:
    """``decisions`` and ``operators`` hold what differs only. ``figures``: all of them."""

    first: Plan
    second: Plan
    decisions: tuple[Decision, ...]
    operators: tuple[Decision, ...]
    figures: tuple[Figure, ...]

    def __rich__(self) -> RenderableType:
        return difference_report(self)


def difference(first: Plan, second: Plan) -> Difference:
    return Difference(
        first,
        second,
        tuple(row for row in _decisions(first, second) if row.first != row.second),
        tuple(_operators(first, second)),
        tuple(_figures(first, second)),
    )


def same_decisions(first: Plan, second: Plan) -> bool:
    """Whether both plans run the same program in the same way."""
    return _what_runs(first) == _what_runs(second)


def _what_runs(plan: Plan) -> tuple[object, ...]:
    return (
        plan.graph_digest,
        plan.mesh,
        plan.micro_batches,
        plan.schedule if plan.mesh.pp > 1 else "",
        plan.chunks,
        plan.zero,
        plan.stages,
        plan.recompute,
        plan.layouts,
    )


def _decisions(first: Plan, second: Plan) -> Iterator[Decision]:
    def row(name: str, *words: str) -> Decision:
        return Decision(name, words[0], words[1])

    plans = (first, second)
    yield row("model", *(plan.model for plan in plans))
    yield row("graph", *(plan.graph_digest[:12] for plan in plans))
    yield row("cluster", *(f"{plan.mesh.size} x {plan.cluster}" for plan in plans))
    yield row("global batch", *(str(plan.global_batch) for plan in plans))
    yield row("precision", *(plan.precision for plan in plans))
    yield row("optimizer", *(plan.optimizer for plan in plans))
    yield row("memory limit", *(limit_words(plan.estimate) for plan in plans))
    if any(plan.placement for plan in plans):
        yield row("machines", *(placement_words(plan) if plan.placement else "all alike" for plan in plans))
    yield row("mesh", *(mesh_words(plan.mesh, plan.chunks) for plan in plans))
    yield row("micro-batches", *(str(plan.micro_batches) for plan in plans))
    yield row("schedule", *(schedule_words(plan) for plan in plans))
    yield row("ZeRO", *(zero_words(plan) for plan in plans))
    yield row("recompute", *(recompute_words(plan) for plan in plans))
    yield row("stages", *(_stages(plan) for plan in plans))


def _stages(plan: Plan) -> str:
    sizes = ", ".join(str(end - first) for first, end in plan.stages)
    return f"{plural(len(plan.stages), 'stage')} of {sizes} segments"


def _operators(first: Plan, second: Plan) -> Iterator[Decision]:
    """Operators that both plans name and that run another strategy, on axes that both plans have."""
    theirs = {(row.kind, row.name): row for row in second.layouts}
    labels = {segment.kind: segment.label for segment in reversed(first.segments)}
    for row in first.layouts:
        other = theirs.get((row.kind, row.name))
        if other is None or other.op != row.op:
            continue
        for axis in ("dp", "tp"):
            mine, yours = (strategy_words(x.op, getattr(x, axis), axis) for x in (row, other))
            if getattr(row, axis) and getattr(other, axis) and mine != yours:
                place = row.module or labels.get(row.kind, "")
                name = f"{operator_name(row.op)} in {place}" if place else operator_name(row.op)
                yield Decision(f"{name}, on {axis}", mine, yours)


def _figures(first: Plan, second: Plan) -> Iterator[Figure]:
    yield Figure("step", first.objective_s, second.objective_s, "s")
    for part, mine in step_parts(first).items():
        yours = step_parts(second)[part]
        if mine or yours:
            yield Figure(part, mine, yours, "s")
    yield Figure("no plan is faster than", first.bound_s, second.bound_s, "s")
    yield Figure("peak memory", first.estimate.peak_memory_bytes, second.estimate.peak_memory_bytes, "B")
    for name in ("weights", "gradients", "optimizer", "activations", "temporary"):
        most, most_yours = (max(getattr(x, f"{name}_bytes") for x in p.estimate.devices) for p in (first, second))
        yield Figure(f"most {name}", most, most_yours, "B")


def difference_words(found: Difference) -> str:
    """Which is faster, by how much, and why, in one sentence."""
    first, second = found.first, found.second
    gap = second.objective_s - first.objective_s
    if abs(gap) <= SAME * first.objective_s:
        return "Both take the same time."
    faster, slower, name = (first, second, "first") if gap > 0 else (second, first, "second")
    why = grown(slower, faster)
    share = slower.objective_s / faster.objective_s - 1
    sentence = f"The {name} is faster by {format_seconds(abs(gap))} a step ({share:.1%})"
    return f"{sentence}. What the other spends more on: {why}." if why else f"{sentence}."


def difference_report(found: Difference) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"first   {found.first.configuration}"),
        Text(f"second  {found.second.configuration}"),
        Text(difference_words(found)),
        heading("Decisions that differ"),
    ]
    if found.decisions:
        rows = table("", "first", "second")
        for row in found.decisions:
            rows.add_row(Text(row.name), Text(row.first), Text(row.second))
        parts.append(rows)
    else:
        parts.append(Text("none"))
    if found.operators:
        parts.append(heading(f"Operators cut otherwise: {len(found.operators)}"))
        rows = table("operator", "first", "second")
        for row in found.operators[:MOST_OPERATORS]:
            rows.add_row(Text(row.name), Text(row.first), Text(row.second))
        parts.append(rows)
        if len(found.operators) > MOST_OPERATORS:
            parts.append(Text(f"and {len(found.operators) - MOST_OPERATORS} more"))
    parts.append(heading("Time of a step, memory of a device"))
    rows = table("", ">first", ">second", ">change")
    for figure in found.figures:
        form = format_seconds if figure.unit == "s" else format_bytes
        change = figure.second - figure.first
        sign = "" if change == 0 else "+" if change > 0 else "-"
        rows.add_row(figure.name, form(figure.first), form(figure.second), sign + form(abs(change)) if change else "")
    parts.append(rows)
    return Group(*parts)


def difference_figures(found: Difference) -> dict[str, Any]:
    return {
        "first": found.first.configuration,
        "second": found.second.configuration,
        "words": difference_words(found),
        "same": same_decisions(found.first, found.second),
        "decisions": [asdict(row) for row in found.decisions],
        "operators": [asdict(row) for row in found.operators],
        "figures": [asdict(row) for row in found.figures],
    }
