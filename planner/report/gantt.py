"""The schedule drawn with text blocks: which stage is busy when, with which micro-batch.

One row a device, one cell a slice of time. A block starts with its micro-batch number where there is room:

    stage 0 |0░1░      0▓▓▓1▓▓▓~+|
    stage 1 |  0░0▓▓▓1░1▓▓▓    ~+|

Where a device has several stages, a letter behind the number says which: ``0a`` is micro-batch 0 in the first of them.

When drawing the whole step leaves no room for numbers, its beginning and end are drawn, ``…`` between.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from planner.ir.plan import Plan
from planner.report.words import stages_words
from planner.schedules import ZERO_BUBBLE
from planner.simulate import simulate, times_of
from planner.sizes import format_seconds

FILLS = {"F": "░", "B": "▓", "I": "▓", "W": "▒", "S": "~", "U": "+"}
ASCII_FILLS = {"F": "-", "B": "=", "I": "=", "W": "#", "S": "~", "U": "+"}
STYLES = {
    "F": "black on bright_cyan", "B": "black on bright_green", "I": "black on bright_green", "W": "black on green",
    "S": "yellow", "U": "magenta",
}  # fmt: skip
WORDS = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "S": "gradient sync",
    "U": "update",
}  # fmt: skip
MOST_ROWS = 16
NARROWEST = 2  # cells a block should have


@dataclass(frozen=True)
class Block:
    """``kind``: F forward, B backward, I and W its two parts, S gradient synchronisation, U update."""

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
    """What the devices of each pipeline rank do during one step, in order."""
    stages, pp = plan.estimate.stages, plan.mesh.pp
    timeline = simulate(times_of(stages), plan.schedule, plan.micro_batches, plan.chunks)
    rows: list[list[Block]] = [[] for _ in range(pp)]
    for event in timeline.events:
        action = event.action
        label = str(action.micro_batch) + (_letter(action.stage // pp) if plan.chunks > 1 else "")
        rows[action.stage % pp].append(Block(action.kind, event.start_s, event.end_s, label))
    for rank, (row, end) in enumerate(zip(rows, timeline.end_s, strict=True)):
        synchronised = end + sum(stage.gradient_sync_per_step_s for stage in stages[rank::pp])
        row.append(Block("S", end, synchronised))
        row.append(Block("U", synchronised, synchronised + sum(s.optimizer_per_step_s for s in stages[rank::pp])))
    return tuple(tuple(row) for row in rows)


def _letter(chunk: int) -> str:
    return string.ascii_lowercase[chunk % len(string.ascii_lowercase)]


def windows(plan: Plan, width: int) -> tuple[Window, ...]:
    """The parts of the step that are drawn in ``width`` cells: all of it, or its beginning and end."""
    step = plan.estimate.step_time_s
    if step <= 0:
        return ()
    slowest = max(plan.estimate.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    times = [slowest.forward_s, slowest.backward_s]
    if plan.schedule == ZERO_BUBBLE:
        times = [slowest.forward_s, slowest.backward_s - slowest.weight_backward_s, slowest.weight_backward_s]
    shorter = min((t for t in times if t), default=0.0)
    cell = shorter / max(NARROWEST, len(str(plan.micro_batches - 1)) + (plan.chunks > 1))
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
        names = [f"stage{'s' * (self.plan.chunks > 1)} {stages_words(self.plan, rank)} " for rank in range(len(rows))]
        margin = max(map(len, names))
        parts = windows(self.plan, max(8, options.max_width - margin - 2))
        if not parts:
            return
        for index, row in enumerate(rows):
            if len(rows) > MOST_ROWS and MOST_ROWS // 2 <= index < len(rows) - MOST_ROWS // 2:
                if index == MOST_ROWS // 2:
                    yield Text(
                        f"{'…':>{margin}} {len(rows) - MOST_ROWS} more {'stages' if self.plan.chunks == 1 else 'devices'}"
                    )
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
        line.append(("0" if kind in "FBIW" else "") + fills[kind] * 2, STYLES[kind])
        line.append(f" {WORDS[kind]}")
    return line


def _present(rows: tuple[tuple[Block, ...], ...]) -> Iterator[str]:
    for kind in FILLS:
        if any(block.kind == kind and block.end_s > block.start_s for row in rows for block in row):
            yield kind
