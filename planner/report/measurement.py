"""What ``planner measure`` found, as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from costmodels.measured import Corrections, MeasuredTables
from planner.report.tables import heading, table
from planner.sizes import format_bytes, format_seconds
from planner.step_trace import Part

MOST_OPERATORS = 12


@dataclass(frozen=True)
class Measurement:
    """``calls``: that the model makes under all strategies tried, of which ``measured`` are in the ``tables`` now.

    ``new``: rows that are new. ``refused``: (operator, why it could not be timed on its own). ``path``: of the file.
    """

    tables: MeasuredTables
    path: Path
    calls: int
    measured: int
    new: int
    refused: tuple[tuple[str, str], ...] = ()


def measurement_report(found: Measurement) -> Group:
    tables = found.tables
    ranks = f"{tables.ranks} rank{'s' * (tables.ranks > 1)} of {tables.threads} thread{'s' * (tables.threads > 1)}"
    parts: list[RenderableType] = [
        Text(f"{found.measured} of {found.calls} operator calls measured, {found.new} new rows", style="bold"),
        Text(f"{tables.device}, {tables.software}, {ranks}; kept in {found.path}"),
        heading("Operators that take longest, of all that is kept"),
        _operators(tables),
    ]
    if tables.collectives:
        parts += [heading("Messages"), _messages(tables)]
    for u in tables.updates:
        which = f"{u.optimizer}, {'cut by ZeRO' if u.sharded else 'whole'}"
        parts.append(Text(f"{which}: {format_seconds(u.tensor_s)} a tensor, {4e9 * u.byte_s:.2g} ns a float32 number"))
    parts += [Text(f"not measured: {op}: {why}", style="yellow") for op, why in found.refused]
    return Group(*parts)


def _operators(tables: MeasuredTables) -> RenderableType:
    rows = table("operator", "operands", ">forward", ">backward")
    slowest = sorted(tables.operators, key=lambda o: -(o.forward_s + o.backward_s))[:MOST_OPERATORS]
    for o in slowest:
        operands = " ".join("x".join(map(str, shape)) or "1" for shape, _ in o.call.inputs)
        backward = format_seconds(o.backward_s) if any(o.call.needs_grad) else ""
        rows.add_row(o.call.kind[0], operands, format_seconds(o.forward_s), backward)
    return rows


def _messages(tables: MeasuredTables) -> RenderableType:
    sizes = sorted({c.size_bytes for c in tables.collectives})
    rows = table("collective", ">ranks", *(f">{format_bytes(size)}" for size in sizes))
    found = {(c.kind, c.ranks, c.size_bytes): c.seconds for c in tables.collectives}
    for kind, ranks in dict.fromkeys((c.kind, c.ranks) for c in tables.collectives):
        cells = [format_seconds(found[kind, ranks, size]) if (kind, ranks, size) in found else "" for size in sizes]
        rows.add_row(kind, str(ranks), *cells)
    return rows


@dataclass(frozen=True)
class Calibration:
    """``parts``: of the traced steps. What prices were corrected by ``before`` and are ``after``; kept in ``path``."""

    parts: tuple[Part, ...]
    before: Corrections
    after: Corrections
    path: Path


def calibration_report(found: Calibration) -> Group:
    rows = table("part of a step", ">predicted", ">measured", ">ratio")
    for part in found.parts:
        ratio = f"{part.measured_s / part.predicted_s:.2f}" if part.predicted_s > 0 and part.measured_s > 0 else ""
        measured = format_seconds(part.measured_s) if part.measured_s > 0 else ""
        rows.add_row(part.name, format_seconds(part.predicted_s), measured, ratio)
    words = ", ".join(
        f"{name} x {getattr(found.after, name):.3g}" for name in ("forward", "backward", "communication", "update")
    )
    runs = f"{found.after.runs} run{'s' * (found.after.runs > 1)}"
    return Group(rows, Text(f"prices are corrected by {runs}: {words}", style="bold"), Text(f"kept in {found.path}"))


def calibration_figures(found: Calibration) -> dict[str, Any]:
    return {
        "parts": [asdict(part) for part in found.parts],
        "before": asdict(found.before),
        "after": asdict(found.after),
        "path": str(found.path),
    }


def measurement_figures(found: Measurement) -> dict[str, Any]:
    tables = found.tables
    return {
        "device": tables.device,
        "software": tables.software,
        "ranks": tables.ranks,
        "threads": tables.threads,
        "calls": found.calls,
        "measured": found.measured,
        "new": found.new,
        "refused": dict(found.refused),
        "path": str(found.path),
    }
