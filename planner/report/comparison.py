"""Several plans side by side: the solver's and the ones a person would pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.plan import Plan
from planner.sizes import format_bytes, format_seconds


@dataclass(frozen=True)
class ComparisonRow:
    """One strategy. ``plan`` is None where there is none, and ``refused`` says why.

    ``refused`` next to a plan says why it was not measured. ``measured_step_time_s``: seconds, on local ranks.
    """

    name: str
    plan: Plan | None = None
    refused: str = ""
    measured_step_time_s: float | None = None


def comparison_report(rows: Sequence[ComparisonRow]) -> RenderableType:
    """A table, in the given order; times relative to the fastest plan that fits; refusals below it."""
    measured = any(row.measured_step_time_s is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    for header in ("predicted", "to best", *(["measured", "error"] * measured), "memory"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fits")
    best = best_step_time_s(rows)
    for row in rows:
        if row.plan is None:
            table.add_row(Text(row.name), "", "refused", "", *(["", ""] * measured), "", "")
            continue
        estimate = row.plan.estimate
        table.add_row(
            Text(row.name),
            str(row.plan.mesh),
            format_seconds(estimate.step_time_s),
            f"{estimate.step_time_s / best:.2f}x" if best else "",
            *(_measurement(row) if measured else ()),
            format_bytes(estimate.peak_memory_bytes),
            _fits(row.plan),
            style="bold" if estimate.fits and estimate.step_time_s == best else "",
        )
    details = Table.grid(padding=(0, 2))
    for row in rows:
        if row.plan is not None:
            details.add_row(Text(row.name), Text(row.plan.configuration))
        if row.refused:
            details.add_row(Text(row.name), Text(f"refused: {row.refused}" if row.plan is None else row.refused))
    return Group(table, Text(""), details)


def best_step_time_s(rows: Sequence[ComparisonRow]) -> float | None:
    """Predicted step time of the fastest plan that fits; of the fastest at all when none does."""
    plans = [row.plan for row in rows if row.plan is not None]
    fitting = [plan for plan in plans if plan.estimate.fits] or plans
    return min((plan.estimate.step_time_s for plan in fitting), default=None)


def comparison_figures(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """The comparison for scripts: plain data, units in the names."""
    best = best_step_time_s(rows)
    figures = []
    for row in rows:
        entry: dict[str, Any] = {
            "name": row.name,
            "refused": row.refused or None,
            "measured_step_time_s": row.measured_step_time_s,
        }
        if row.plan is not None:
            estimate = row.plan.estimate
            entry |= {
                "configuration": row.plan.configuration,
                "step_time_s": estimate.step_time_s,
                "relative_to_best": estimate.step_time_s / best if best else None,
                "compute_s": estimate.compute_s,
                "exposed_communication_s": estimate.exposed_communication_s,
                "bubble_s": estimate.bubble_s,
                "peak_memory_bytes": estimate.peak_memory_bytes,
                "memory_limit_bytes": estimate.memory_limit_bytes,
                "fits": estimate.fits,
            }
        figures.append(entry)
    return figures


def _measurement(row: ComparisonRow) -> tuple[str, str]:
    if row.measured_step_time_s is None or row.plan is None:
        return "-", ""
    predicted = row.plan.estimate.step_time_s
    error = f"{predicted / row.measured_step_time_s - 1:+.0%}" if row.measured_step_time_s else ""
    return format_seconds(row.measured_step_time_s), error


def _fits(plan: Plan) -> Text:
    estimate = plan.estimate
    if estimate.fits:
        return Text("yes", style="green")
    return Text(f"lacks {format_bytes(max(estimate.over_bytes))}", style="red")
