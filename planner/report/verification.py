"""Whether training under a plan is training on one device: tensor by tensor, and what is to blame where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

KINDS = ("loss", "buffer", "gradient", "parameter")
WORDS = {"loss": "losses", "buffer": "buffers", "gradient": "gradients", "parameter": "parameters"}
WIDTH = 100


@dataclass(frozen=True)
class ComparedTensor:
    """``kind``: one of KINDS. ``error``: of the tensor's largest entry; inf where one run lacks it, or has it not finite.

    ``name``: original name; of a loss 'step 1', of a buffer 'name, step 1'.
    """

    kind: str
    name: str
    error: float


@dataclass(frozen=True)
class Cause:
    """``where``: 'tracing', 'sharding', 'running' or 'unknown'. ``what``: the first tensor that is off there.

    ``operators``: those that made it, as 'linear in blocks.0'. ``why``: what that points to.
    """

    where: str
    what: str
    operators: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Verification:
    """One strategy against one device.

    ``outcome``: 'equal', 'unequal', 'refused' (``reason`` says why the strategy cannot be used) or 'failed' (``reason``
    is the error, and ``cause`` is known where a replay meets it too). ``compared``: in the order a step makes them: loss,
    buffers, gradients backwards, then later losses, and parameters and buffers after the last step. ``tolerance``: the
    error allowed, for ``dtype``, the least precise one on the way of a gradient.
    """

    model: str
    strategy: str
    outcome: str
    configuration: str = ""
    dtype: str = ""
    tolerance: float = 0.0
    steps: int = 0
    optimizer: str = ""
    compared: tuple[ComparedTensor, ...] = ()
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def equal(self) -> bool:
        return self.outcome == "equal"

    @property
    def first(self) -> ComparedTensor | None:
        """The first tensor that differs."""
        return next((tensor for tensor in self.compared if tensor.error > self.tolerance), None)

    @property
    def worst(self) -> ComparedTensor | None:
        return max(self.compared, key=lambda tensor: tensor.error, default=None)

    def __str__(self) -> str:
        console = Console(width=WIDTH, color_system=None)
        with console.capture() as captured:
            console.print(verification_report(self))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich__(self) -> RenderableType:
        return verification_report(self)


STYLES = {"equal": "green", "unequal": "bold red", "refused": "yellow", "failed": "bold red"}
VERDICTS = {"equal": "equal to one device", "unequal": "NOT equal to one device"}


def verification_report(found: Verification) -> RenderableType:
    """A verdict, the largest error of each kind of tensor, and where it is not equal, the first tensor and the operator."""
    verdict = VERDICTS.get(found.outcome, found.outcome)
    head = Text.assemble((f"{found.model} under {found.strategy}: ", "bold"), (verdict, STYLES[found.outcome]))
    if found.outcome in ("refused", "failed"):
        return Group(head, Text(f"  {found.reason}"), *([_blame(found)] if found.cause is not None else []))
    parts: list[RenderableType] = [head, _facts(found), Text(""), _errors(found)]
    if found.outcome == "unequal":
        parts += [Text(""), _blame(found)]
    return Group(*parts)


def _facts(found: Verification) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("  plan", Text(found.configuration))
    grid.add_row("  training", Text(f"{found.steps} step{'s' * (found.steps != 1)} of {found.optimizer}"))
    grid.add_row("  allowed", Text(f"{found.tolerance:.0e} of a tensor's largest entry, for {found.dtype}"))
    for note in found.notes:
        grid.add_row("  note", Text(note))
    return grid


def _errors(found: Verification) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("  compared")
    table.add_column("tensors", justify="right")
    table.add_column("differ", justify="right")
    table.add_column("largest error", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    for kind in KINDS:
        tensors = [tensor for tensor in found.compared if tensor.kind == kind]
        if not tensors:
            continue
        worst = max(tensors, key=lambda tensor: tensor.error)
        differ = sum(tensor.error > found.tolerance for tensor in tensors)
        style = "bold red" if differ else ""
        name = worst.name if worst.error else ""
        table.add_row(
            f"  {WORDS[kind]}", str(len(tensors)), str(differ), error_words(worst.error), Text(name), style=style
        )
    return table


def _blame(found: Verification) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    first, cause = found.first, found.cause
    if first is not None:
        spoken = f"{first.kind} of {first.name}" if first.kind in ("loss", "gradient") else f"{first.kind} {first.name}"
        grid.add_row("  first to differ", Text(f"{spoken}: {error_words(first.error)}"))
    if cause is not None:
        words = {"unknown": "cannot be told"}
        grid.add_row("  arises in", Text(words.get(cause.where, cause.where)))
        grid.add_row("  tensor", Text(cause.what))
        if cause.operators:
            grid.add_row("  operator", Text("; ".join(cause.operators), style="bold"))
        grid.add_row("  because", Text(cause.why))
    return grid


def error_words(error: float) -> str:
    if math.isinf(error):
        return "missing or not finite"
    return f"{error:.1e}" if error else "0"


def verification_figures(rows: Sequence[Verification]) -> list[dict[str, Any]]:
    """For scripts: plain data, an infinite error as None."""
    figures = []
    for row in rows:
        first, cause = row.first, row.cause
        figures.append(
            {
                "model": row.model,
                "strategy": row.strategy,
                "outcome": row.outcome,
                "configuration": row.configuration or None,
                "dtype": row.dtype or None,
                "tolerance": row.tolerance,
                "steps": row.steps,
                "optimizer": row.optimizer or None,
                "reason": row.reason or None,
                "notes": list(row.notes),
                "first": None
                if first is None
                else {"kind": first.kind, "name": first.name, "error": _finite(first.error)},
                "cause": None
                if cause is None
                else {
                    "where": cause.where,
                    "what": cause.what,
                    "operators": list(cause.operators),
                    "why": cause.why,
                },
                "compared": [{"kind": t.kind, "name": t.name, "error": _finite(t.error)} for t in row.compared],
            }
        )
    return figures


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
