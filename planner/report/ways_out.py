"""What would make a model fit, as data, as a small table, and as one sentence."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from planner.errors import Shortage
from planner.ir.plan import Plan
from planner.report.parts import brief
from planner.report.tables import table
from planner.report.words import short_configuration
from planner.sizes import format_bytes, format_seconds

TEXT_COLUMNS = 100


@dataclass(frozen=True)
class WayOut:
    """One kind of change. ``plan``: the best plan with the least ``change`` that fits; None: ``refused`` says why none."""

    kind: str
    change: str
    plan: Plan | None
    refused: str = ""


def filling(plan: Plan) -> str:
    """What fills the fullest device of a plan, the largest first: ``optimizer 9.1 GB, weights 4.5 GB``."""
    fullest = max(plan.estimate.devices, key=lambda memory: memory.total_bytes)
    kinds = ("weights", "gradients", "optimizer", "activations", "temporary")
    sizes = sorted(((getattr(fullest, f"{kind}_bytes"), kind) for kind in kinds), reverse=True)
    return ", ".join(f"{kind} {format_bytes(size)}" for size, kind in sizes[:3] if size)


def ways_out_report(ways: Sequence[WayOut]) -> RenderableType:
    rows = table("way out", "what", ">step", ">memory", "plan")
    for way in ways:
        if way.plan is None:
            rows.add_row(way.kind, Text(way.refused), "", "", "none")
            continue
        estimate = way.plan.estimate
        rows.add_row(
            way.kind,
            Text(way.change),
            format_seconds(estimate.step_time_s),
            format_bytes(estimate.peak_memory_bytes),
            Text(short_configuration(way.plan)),
        )
    return rows


def ways_out_text(ways: Sequence[WayOut], width: int = TEXT_COLUMNS) -> str:
    """The table as plain text, for the message of an error."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, _environ={})
    with console.capture() as captured:
        console.print(ways_out_report(ways))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def ways_out_figures(shortage: Shortage | None, ways: Sequence[WayOut]) -> dict[str, Any]:
    return {
        "shortage": None
        if shortage is None
        else {
            "missing_bytes": shortage.missing_bytes,
            "memory_limit_bytes": shortage.memory_limit_bytes,
            "configuration": shortage.configuration,
            "stage": shortage.stage,
        },
        "ways_out": [{"kind": way.kind, "change": way.change, **brief(way.plan, way.refused)} for way in ways],
    }
