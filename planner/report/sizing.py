"""The smallest and the cheapest cluster for a model, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.plan import Plan
from planner.report.parts import brief
from planner.report.tables import table
from planner.report.words import plural, short_configuration
from planner.sizes import format_bytes, format_seconds

S_PER_HOUR = 3600.0
STEPS_WITHOUT_A_NUMBER = 1000  # what GPU-hours are counted for when no number of steps is given


@dataclass(frozen=True)
class SizeRow:
    """One cluster with a number of devices. ``plan`` is None where there is none: ``refused`` says why.

    ``device_hours``: of all steps, on all devices; ``price``: in the user's currency, None where none was given.
    """

    cluster: str
    devices: int
    devices_per_node: int
    plan: Plan | None
    meets_limit: bool = False
    device_hours: float | None = None
    price: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Sizing:
    """``rows``: every size that was looked at. ``step_limit_s``: None without a limit. ``steps``: None if not given."""

    model: str
    global_batch: int
    step_limit_s: float | None
    steps: int | None
    rows: tuple[SizeRow, ...]

    @property
    def smallest(self) -> SizeRow | None:
        """Fewest devices that meet the limit; of equals the fastest."""
        return min(self._meeting, key=lambda row: (row.devices, _step_s(row), row.cluster), default=None)

    @property
    def cheapest(self) -> SizeRow | None:
        """The lowest price among those that have one; without any price the fewest device hours; None without a row."""
        priced = [row for row in self._meeting if row.price is not None]
        if priced:
            return min(priced, key=lambda row: (row.price or 0.0, row.devices, row.cluster))
        return min(self._meeting, key=lambda row: (row.device_hours or 0.0, row.devices, row.cluster), default=None)

    @property
    def _meeting(self) -> list[SizeRow]:
        return [row for row in self.rows if row.meets_limit and row.plan is not None]

    def __rich__(self) -> RenderableType:
        return sizing_report(self)


def _step_s(row: SizeRow) -> float:
    assert row.plan is not None
    return row.plan.objective_s


def sizing_report(found: Sizing) -> RenderableType:
    count = found.steps or STEPS_WITHOUT_A_NUMBER
    limit = f", at most {format_seconds(found.step_limit_s)} a step" if found.step_limit_s is not None else ""
    steps = f", {found.steps} steps" if found.steps else ""
    parts: list[RenderableType] = [Text(f"{found.model}, batch {found.global_batch}{limit}{steps}"), Text("")]
    parts.append(_rows(found, "GPU-hours" if found.steps else f"GPU-h/{count}"))
    parts.append(Text(""))
    smallest, cheapest = found.smallest, found.cheapest
    if smallest is None or cheapest is None:
        parts.append(Text("No size that was looked at meets the limit" if limit else "Nothing fits"))
        return Group(*parts)
    parts.append(Text(f"smallest  {_named(smallest)}", style="bold"))
    by = f"price {cheapest.price:.3g}" if cheapest.price is not None else f"{cheapest.device_hours:.3g} GPU-hours"
    word = "cheapest" if cheapest.price is not None else "least GPU-hours"
    parts.append(Text(f"{word}  {_named(cheapest)}, {by}", style="bold"))
    return Group(*parts)


def _named(row: SizeRow) -> str:
    assert row.plan is not None
    nodes = -(-row.devices // row.devices_per_node)
    return (
        f"{row.devices} x {row.cluster} ({plural(nodes, 'node')}): {format_seconds(row.plan.objective_s)} a step, "
        f"{short_configuration(row.plan)}"
    )


def _rows(found: Sizing, hours: str) -> Table:
    priced = any(row.price is not None for row in found.rows)
    rows = table("cluster", ">GPUs", ">step", f">{hours}", *([">price"] * priced), ">memory", "limit", "plan")
    best = {id(found.smallest), id(found.cheapest)}
    for row in found.rows:
        if row.plan is None:
            rows.add_row(row.cluster, str(row.devices), "", "", *([""] * priced), "", "no", Text(row.refused))
            continue
        estimate = row.plan.estimate
        price = ("-" if row.price is None else f"{row.price:.3g}",) if priced else ()
        rows.add_row(
            row.cluster,
            str(row.devices),
            format_seconds(estimate.step_time_s),
            f"{row.device_hours:.3g}",
            *price,
            format_bytes(estimate.peak_memory_bytes),
            "yes" if row.meets_limit else "no",
            Text(short_configuration(row.plan)),
            style="bold" if id(row) in best else "",
        )
    return rows


def sizing_figures(found: Sizing) -> dict[str, Any]:
    def entry(row: SizeRow | None) -> dict[str, Any] | None:
        if row is None:
            return None
        return {
            **brief(row.plan, row.refused),
            "cluster": row.cluster,
            "devices": row.devices,
            "devices_per_node": row.devices_per_node,
            "meets_limit": row.meets_limit,
            "device_hours": row.device_hours,
            "price": row.price,
        }

    return {
        "model": found.model,
        "global_batch": found.global_batch,
        "step_limit_s": found.step_limit_s,
        "steps": found.steps,
        "device_hours_of_steps": found.steps or STEPS_WITHOUT_A_NUMBER,
        "smallest": entry(found.smallest),
        "cheapest": entry(found.cheapest),
        "rows": [entry(row) for row in found.rows],
    }
