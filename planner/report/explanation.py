"""Why a plan: what it is made of, what else there is, and what would change it; as data and as a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.plan import Plan
from planner.report.figures import summary
from planner.report.parts import brief, step_parts
from planner.report.tables import heading, table
from planner.report.ways_out import WayOut, ways_out_figures, ways_out_report
from planner.report.words import operator_name, short_configuration, strategy_words
from planner.sizes import format_bytes, format_seconds

SAME = 1e-6  # relative difference of step times that counts as none


@dataclass(frozen=True)
class Family:
    """The best plan of a family of strategies. ``plan`` is None where there is none: ``refused`` says why."""

    name: str
    plan: Plan | None
    refused: str = ""


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind that a step waits for. ``axis``: of the mesh; ``link``: 'inside nodes' or 'between nodes'."""

    name: str
    axis: str
    link: str
    step_s: float


@dataclass(frozen=True)
class Binding:
    """What binds a plan. ``left_bytes``: of each pipeline rank's devices. ``saved_if_free_s``: link -> seconds that this plan
    would take less if that link took no time, all else as it is."""

    left_bytes: tuple[int, ...]
    parts_s: dict[str, float]
    traffic: tuple[Traffic, ...]
    saved_if_free_s: dict[str, float]


@dataclass(frozen=True)
class Change:
    """Something else about the machine, and the best plan then."""

    name: str
    plan: Plan | None
    refused: str = ""


@dataclass(frozen=True)
class Forced:
    """One operator made to run another strategy on tp, all others free, in the plan's configuration."""

    strategy: str
    words: str
    plan: Plan | None
    refused: str = ""


@dataclass(frozen=True)
class OperatorReason:
    """Why an operator runs ``strategy`` on tp: what each ``other`` would cost. ``share``: of all operators' time."""

    name: str
    op: str
    module: str
    strategy: str
    words: str
    share: float
    others: tuple[Forced, ...]


@dataclass(frozen=True)
class Explanation:
    """Why ``plan``. ``best``: the solver's plan, where ``plan`` was given. ``ways_out``: for a plan that does not fit."""

    plan: Plan
    best: Plan
    families: tuple[Family, ...]
    binding: Binding
    changes: tuple[Change, ...]
    operators: tuple[OperatorReason, ...]
    ways_out: tuple[WayOut, ...] = ()
    note: str = ""

    def __rich__(self) -> RenderableType:
        return explanation_report(self)


def grown(plan: Plan, against: Plan) -> str:
    """The parts of the step that make ``plan`` slower than ``against``, the largest first: at most two."""
    mine, theirs = step_parts(plan), step_parts(against)
    more = {part: mine[part] - theirs[part] for part in mine}
    slower_s = plan.objective_s - against.objective_s
    if slower_s <= SAME * against.objective_s:
        return ""
    parts = [part for part in sorted(more, key=more.__getitem__, reverse=True) if more[part] > 0.1 * slower_s]
    return ", ".join(f"{part} +{format_seconds(more[part])}" for part in parts[:2])


def times(value_s: float, of_s: float) -> str:
    return f"{value_s / of_s:.2f}x" if of_s else ""


# --- the report -------------------------------------------------------------------------------------------------------


def explanation_report(found: Explanation) -> RenderableType:
    parts: list[RenderableType] = [Text(summary(found.plan))]
    if found.note:
        parts.append(Text(found.note))
    if found.plan != found.best:
        parts.append(Text(f"the solver's plan: {summary(found.best)}"))
    if found.ways_out:
        parts += [heading("What would make it fit"), ways_out_report(found.ways_out)]
    parts += [heading("The best plan of each family"), _families(found)]
    parts += [heading("What binds"), *_binding(found)]
    if found.changes:
        parts += [heading("What would change it (solved again)"), _changes(found)]
    for reason in found.operators:
        parts += [heading(_operator_title(reason)), _others(reason, found.plan)]
    return Group(*parts)


def _families(found: Explanation) -> Table:
    rows = table("family", ">step", ">to best", ">memory", "plan, and what makes it slower")
    for row in found.families:
        if row.plan is None:
            rows.add_row(Text(row.name), "none", "", "", Text(row.refused))
            continue
        estimate = row.plan.estimate
        why = grown(row.plan, found.best)
        rows.add_row(
            Text(row.name),
            format_seconds(estimate.step_time_s),
            times(estimate.step_time_s, found.best.objective_s),
            format_bytes(estimate.peak_memory_bytes),
            Text(short_configuration(row.plan) + (f": {why}" if why else "")),
            style="" if why else "bold",
        )
    return rows


def _binding(found: Explanation) -> Iterator[RenderableType]:
    binding, step = found.binding, found.plan.objective_s
    rows = table("part of the step", ">seconds", ">share")
    for part, seconds in binding.parts_s.items():
        if seconds:
            rows.add_row(part, format_seconds(seconds), f"{seconds / step:.1%}")
    yield rows
    if binding.traffic:
        links = table("waiting for", "axis", "link", ">a step")
        for row in binding.traffic:
            links.add_row(Text(row.name), row.axis, row.link, format_seconds(row.step_s))
        yield Text("")
        yield links
    for link, saved in binding.saved_if_free_s.items():
        yield Text(f"links {link} that take no time: {format_seconds(saved)} less ({saved / step:.1%}) under this plan")
    left = min(binding.left_bytes)
    rank = binding.left_bytes.index(left)
    limit = found.plan.estimate.limits_bytes[rank]
    where = f"on the devices of pipeline rank {rank}, " if len(binding.left_bytes) > 1 else ""
    yield Text(f"memory: {where}{format_bytes(left)} of {format_bytes(limit)} left")


def _changes(found: Explanation) -> Table:
    rows = table("with", ">step", ">faster", "plan then")
    for row in found.changes:
        if row.plan is None:
            rows.add_row(Text(row.name), "none", "", Text(row.refused))
            continue
        gain = found.best.objective_s / row.plan.objective_s - 1
        same = _decided(row.plan) == _decided(found.best)
        rows.add_row(
            Text(row.name),
            format_seconds(row.plan.objective_s),
            f"{gain:+.1%}" if abs(gain) > SAME else "nothing",
            Text("the same" if same else short_configuration(row.plan)),
        )
    return rows


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.configuration, plan.stages, plan.recompute, plan.layouts


def _operator_title(reason: OperatorReason) -> str:
    where = f" in {reason.module}" if reason.module else ""
    return (
        f"Why {operator_name(reason.op)}{where} ({reason.name}) cuts on tp: {reason.words} "
        f"({reason.share:.0%} of the operators' time)"
    )


def _others(reason: OperatorReason, plan: Plan) -> Table:
    rows = table("made to cut", ">step", ">costs", "what grows")
    for row in reason.others:
        if row.plan is None:
            rows.add_row(Text(row.words), "none", "", Text(row.refused))
            continue
        more = row.plan.objective_s - plan.objective_s
        close = abs(more) <= SAME * plan.objective_s
        cost = "nothing" if close else ("+" if more > 0 else "") + format_seconds(more)
        rows.add_row(Text(row.words), format_seconds(row.plan.objective_s), cost, grown(row.plan, plan))
    return rows


# --- for scripts ------------------------------------------------------------------------------------------------------


def explanation_figures(found: Explanation) -> dict[str, Any]:
    return {
        "model": found.plan.model,
        "plan": brief(found.plan),
        "best": brief(found.best),
        "note": found.note or None,
        "ways_out": ways_out_figures(None, found.ways_out)["ways_out"],
        "families": [{"name": row.name, **brief(row.plan, row.refused)} for row in found.families],
        "binding": asdict(found.binding),
        "changes": [{"name": row.name, **brief(row.plan, row.refused)} for row in found.changes],
        "operators": [
            {
                "name": reason.name,
                "op": reason.op,
                "module": reason.module,
                "strategy": reason.strategy,
                "words": reason.words,
                "share": reason.share,
                "others": [
                    {"strategy": row.strategy, "words": row.words, **brief(row.plan, row.refused)}
                    for row in reason.others
                ],
            }
            for reason in found.operators
        ],
    }


def letter_words(op: str, strategy: str) -> str:
    """A strategy on tp in words, with its letter."""
    words = strategy_words(op, strategy, "tp")
    return words if words.startswith("cut along") else f"{words} ({strategy})"
