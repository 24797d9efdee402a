"""The checks of a plan's proof, each a line, and the record of the search, as data and as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.plan import Plan, Searched
from planner.report.figures import summary
from planner.report.tables import heading, table
from planner.sizes import format_seconds

ORDER = ("best", "solved", "tried", "open", "pruned", "infeasible")


@dataclass(frozen=True)
class Check:
    """``problem``: what is wrong; '' where nothing is. ``found``: what was computed."""

    name: str
    found: str
    problem: str = ""


@dataclass(frozen=True)
class Proof:
    plan: Plan
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return not any(check.problem for check in self.checks)

    def __rich__(self) -> RenderableType:
        return proof_report(self)


def proof_report(proof: Proof) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    for check in proof.checks:
        verdict = Text("wrong", style="red") if check.problem else Text("ok", style="green")
        rows.add_row(verdict, Text(check.name), Text(check.problem or check.found))
    end = Text("The proof holds.", style="bold") if proof.holds else Text("The proof does not hold.", style="bold red")
    return Group(Text(summary(proof.plan)), Text(""), rows, Text(""), end)


def record_report(plan: Plan) -> RenderableType:
    """Every configuration searched, with its bound and outcome, the best first."""
    rows = table("configuration", "outcome", ">step time", ">lower bound", "why")
    words = {"pruned": "bound no better than the best", "tried": "nothing better found", "open": "not reached"}
    for entry in sorted(plan.searched, key=_rank):
        rows.add_row(
            Text(entry.configuration),
            Text(entry.outcome, style="green" if entry.outcome == "best" else ""),
            "" if entry.objective_s is None else format_seconds(entry.objective_s),
            format_seconds(entry.bound_s),
            Text(entry.reason or words.get(entry.outcome, "")),
        )
    counts = ", ".join(f"{n} {word}" for word in ORDER if (n := sum(x.outcome == word for x in plan.searched)))
    return Group(heading(f"Configurations searched: {len(plan.searched)} ({counts})"), rows)


def _rank(entry: Searched) -> tuple[int, float, str]:
    place = ORDER.index(entry.outcome) if entry.outcome in ORDER else len(ORDER)
    return place, entry.bound_s if entry.objective_s is None else entry.objective_s, entry.configuration


def proof_figures(proof: Proof) -> dict[str, Any]:
    return {
        "model": proof.plan.model,
        "configuration": proof.plan.configuration,
        "objective_s": proof.plan.objective_s,
        "bound_s": proof.plan.bound_s,
        "gap": proof.plan.gap,
        "holds": proof.holds,
        "checks": [{**asdict(check), "ok": not check.problem} for check in proof.checks],
        "searched": [asdict(entry) for entry in proof.plan.searched],
    }
