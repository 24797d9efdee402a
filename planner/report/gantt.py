"""The schedule drawn with text blocks: which stage is busy when, with which micro-batch.

One row a stage, one cell a slice of time. A block starts with its micro-batch number where there is room:

    stage 0 |0░1░      0▓▓▓1▓▓▓~+|
    stage 1 |  0░0▓▓▓1░1▓▓▓    ~+|

When drawing the whole step leaves no room for numbers, its beginning and end are drawn, ``…`` between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from planner.ir.plan import Plan
from planner.simulate import simulate
from planner.sizes import format_seconds

FILLS = {"F": "░", "B": "▓", "S": "~", "U": "+"}
ASCII_FILLS = {"F": "-", "B": "=", "S": "~", "U": "+"}
STYLES = {"F": "black on bright_cyan", "B": "black on bright_green", "S": "yellow", "U": "magenta"}
WORDS = {"F": "forward", "B": "backward", "S": "gradient sync", "U": "update"}
MOST_ROWS = 16
NARROWEST = 2  # cells a block should have


@dataclass(frozen=True)
class Block:
    """``kind``: F forward, B backward, S gradient synchronisation, U update."""

    kind: str
    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True)
class Window:
    """Cells of ``cell_s`` seconds, starting at ``start_s``."""

    start_s: float
    cell_s: float
    cells: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.cell_s * self.cells

    def cell(self, time_s: float) -> int:
        position = (time_s - self.start_s) / self.cell_s
        return round(min(float(self.cells), max(0.0, position)))


def blocks(plan: Plan) -> tuple[tuple[Block, ...], ...]:
    """What each stage does during one step, in order."""
    stages = plan.estimate.stages
    timeline = simulate(
        [(stage.forward_s, stage.backward_s, stage.transfer_s) for stage in stages], plan.schedule, plan.micro_batches
    )
    rows: list[list[Block]] = [[] for _ in stages]
    for event in timeline.events:
        action = event.action
        rows[action.stage].append(Block(action.kind, event.start_s, event.end_s, str(action.micro_batch)))
    for row, stage, end in zip(rows, stages, timeline.end_s, strict=True):
        synchronised = end + stage.gradient_sync_per_step_s
        row.append(Block("S", end, synchronised))
        row.append(Block("U", synchronised, synchronised + stage.optimizer_per_step_s))
    return tuple(tuple(row) for row in rows)


def windows(plan: Plan, width: int) -> tuple[Window, ...]:
    """The parts of the step that are drawn in ``width`` cells: all of it, or its beginning and end."""
    step = plan.estimate.step_time_s
    if step <= 0:
        return ()
    slowest = max(plan.estimate.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    shorter = min(slowest.forward_s, slowest.backward_s) or max(slowest.forward_s, slowest.backward_s)
    cell = shorter / max(NARROWEST, len(str(plan.micro_batches - 1)))
    if step <= cell * width or not cell:
        return (Window(0.0, step / width, width),)
    left = (width - 1) // 2
    right = width - 1 - left
    return Window(0.0, cell, left), Window(step - right * cell, cell, right)


class Gantt:
    """A rich renderable; as wide as the terminal lets it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = blocks(self.plan)
        fills = ASCII_FILLS if options.ascii_only else FILLS
        names = [f"stage {index} " for index in range(len(rows))]
        margin = max(map(len, names))
        parts = windows(self.plan, max(8, options.max_width - margin - 2))
        if not parts:
            return
        for index, row in enumerate(rows):
            if len(rows) > MOST_ROWS and MOST_ROWS // 2 <= index < len(rows) - MOST_ROWS // 2:
                if index == MOST_ROWS // 2:
                    yield Text(f"{'…':>{margin}} {len(rows) - MOST_ROWS} more stages")
                continue
            line = Text(names[index].rjust(margin) + "|")
            for number, window in enumerate(parts):
                if number:
                    line.append("…")
                line.append_text(_row(row, window, fills))
            line.append("|")
            yield line
        yield Text(" " * (margin + 1) + _axis(parts))
        yield _legend(rows, fills, margin + 1)


def _row(row: tuple[Block, ...], window: Window, fills: dict[str, str]) -> Text:
    line = Text()
    at = 0
    for block in row:
        first, end = max(at, window.cell(block.start_s)), window.cell(block.end_s)
        if end <= first:
            continue
        line.append(" " * (first - at))
        whole = window.start_s <= block.start_s and len(block.label) <= end - first
        line.append((block.label if whole else "").ljust(end - first, fills[block.kind]), STYLES[block.kind])
        at = end
    line.append(" " * (window.cells - at))
    return line


def _axis(parts: tuple[Window, ...]) -> str:
    pieces = []
    for window in parts:
        start, end = format_seconds(window.start_s), format_seconds(window.end_s)
        room = window.cells - len(start)
        pieces.append(start + end.rjust(room) if len(end) < room else start.ljust(window.cells))
    return " ".join(pieces)


def _legend(rows: tuple[tuple[Block, ...], ...], fills: dict[str, str], margin: int) -> Text:
    line = Text(" " * margin)
    for number, kind in enumerate(_present(rows)):
        line.append("   " if number else "")
        line.append(("0" if kind in "FB" else "") + fills[kind] * 2, STYLES[kind])
        line.append(f" {WORDS[kind]}")
    return line


def _present(rows: tuple[tuple[Block, ...], ...]) -> Iterator[str]:
    for kind in FILLS:
        if any(block.kind == kind and block.end_s > block.start_s for row in rows for block in row):
            yield kind
