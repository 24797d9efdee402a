"""A plan as a report a person reads: in a terminal, in a notebook, in a log file (80 columns, no colour needed)."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.plan import OperatorLayout, Plan, Searched
from planner.report.figures import bindings, proof, share_of_limit, shares
from planner.report.gantt import Gantt
from planner.report.words import (
    collapse,
    counted,
    device_words,
    limit_words,
    mesh_words,
    operator_name,
    placement_words,
    plural,
    rank_words,
    recompute_words,
    relative_module,
    schedule_words,
    stages_words,
    strategy_words,
    zero_words,
)
from planner.schedules import ZERO_BUBBLE
from planner.sizes import format_bytes, format_count, format_seconds

BAR_CELLS = 24
MOST_SEARCHED = 12
PART_STYLES = {"compute": "green", "communication": "yellow", "bubble": "red"}


def plan_report(plan: Plan) -> RenderableType:
    """The whole report. Wants a legal plan (``planner.ir.verify``)."""
    parts: list[RenderableType] = [_headline(plan), _settings(plan)]
    parts += [_heading("Time of one step" + f", mean over the {_rows_are(plan)}" * (plan.mesh.pp > 1)), _time(plan)]
    parts += [_heading("Stages"), _stages(plan)]
    parts += [_heading("Times of one micro-batch; sync and update once a step"), _stage_times(plan)]
    parts += [_heading("Who is busy when"), Gantt(plan)]
    parts += [_heading(f"Memory of one device, limit {limit_words(plan.estimate)}"), _memory(plan)]
    parts += list(_layouts(plan))
    if plan.searched:
        parts += [_heading(f"Configurations searched: {len(plan.searched)}"), *_searched(plan)]
    if plan.notes:
        parts += [_heading("Notes"), *(Text(f"- {note}") for note in plan.notes)]
    return Group(*parts)


def plan_text(plan: Plan, width: int = 100, color: bool = False) -> str:
    """The report as text ``width`` columns wide; with ``color``, with terminal colours."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(plan_report(plan))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def plan_html(plan: Plan, width: int = 100) -> str:
    """The report as an HTML fragment for a notebook, colours inline."""
    console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False, _environ={})
    console.print(plan_report(plan))
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _headline(plan: Plan) -> Text:
    line = Text(plan.model, style="bold")
    line.append(f" on {plan.mesh.size} x {plan.cluster}: ")
    line.append(format_seconds(plan.estimate.step_time_s), style="bold green")
    line.append(f" a step, {proof(plan)}")
    return line


def _table(*columns: str) -> Table:
    """A table whose columns named with a leading ``>`` are flush right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=right)
    return table


def _settings(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    estimate = plan.estimate
    per_shard, longer = divmod(plan.global_batch, plan.mesh.dp * plan.micro_batches)
    each = f"{per_shard} to {per_shard + 1}" if longer else str(per_shard)
    parts = f"{plural(plan.mesh.dp, 'shard')} x {plural(plan.micro_batches, 'micro-batch', 'micro-batches')}"
    speed = f", {plan.global_batch / estimate.step_time_s:.4g} samples/s" if estimate.step_time_s else ""
    rows = [
        ("plan", plan.configuration),
        ("mesh", mesh_words(plan.mesh, plan.chunks)),
        *([("machines", placement_words(plan))] if plan.placement else []),
        ("batch", f"{plan.global_batch} = {parts} of {each}{speed}"),
        ("schedule", schedule_words(plan)),
        ("ZeRO", zero_words(plan)),
        ("recompute", recompute_words(plan)),
        ("numbers", f"{plan.precision}, optimizer {plan.optimizer}, graph {plan.graph_digest[:12]}"),
        ("bound", _bound(plan)),
        ("binds", ", ".join(f"{kind} ({reason})" for kind, reason in bindings(plan))),
    ]
    if not estimate.fits:
        missing = max(estimate.over_bytes)
        rank = estimate.over_bytes.index(missing)
        rows.append(("does not fit", f"{device_words(plan, rank)} lacks {format_bytes(missing)} on each device"))
    for label, words in rows:
        grid.add_row(label, words)
    return grid


def _rows_are(plan: Plan) -> str:
    return "stages" if plan.chunks == 1 else "devices"


def _bound(plan: Plan) -> str:
    if not plan.bound_s:
        return "none computed"
    return f"no plan in the space is faster than {format_seconds(plan.bound_s)} (gap {plan.gap:.2%})"


def _bar(share: float, style: str = "") -> Text:
    cells = min(BAR_CELLS, max(0, round(share * BAR_CELLS)))
    return Text("█" * cells + "·" * (BAR_CELLS - cells), style=style)


def _time(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    for right in (False, True, True, False):
        table.add_column(justify="right" if right else "left", no_wrap=True)
    names = {"communication": "exposed communication"}
    step = plan.estimate.step_time_s
    for part, seconds in shares(plan).items():
        share = seconds / step if step else 0.0
        table.add_row(names.get(part, part), format_seconds(seconds), f"{share:.1%}", _bar(share, PART_STYLES[part]))
    return table


def _stages(plan: Plan) -> Table:
    on = ["on"] if plan.placement else []
    table = _table(">stage", "ranks", *on, ">parameters", "layers")
    for index, (first, end) in enumerate(plan.stages):
        inside = plan.segments[first:end]
        parameters = format_count(sum(segment.parameters for segment in inside))
        layers = Text(collapse(segment.label or "." for segment in inside))
        where = [Text(plan.placement[index % plan.mesh.pp])] if on else []
        table.add_row(str(index), rank_words(plan.mesh, index), *where, parameters, layers)
    return table


def _stage_times(plan: Plan) -> Table:
    """Columns ``comm`` are the communication inside the column before them, ``again`` the recomputation in
    backward, ``weights`` the part of backward for gradients of weights only."""
    split = plan.schedule == ZERO_BUBBLE
    headers = ("forward", "comm", "backward", "comm", "weights" if split else "again", "transfer", "sync", "update")
    table = _table(">stage", *(f">{header}" for header in headers))
    for index, stage in enumerate(plan.estimate.stages):
        times = (
            stage.forward_s,
            stage.forward_communication_s,
            stage.backward_s,
            stage.backward_communication_s,
            stage.weight_backward_s if split else stage.recomputation_s,
            stage.transfer_s,
            stage.gradient_sync_per_step_s,
            stage.optimizer_per_step_s,
        )
        table.add_row(str(index), *map(format_seconds, times))
    return table


def _memory(plan: Plan) -> Table:
    table = _table(
        ">stage" + "s" * (plan.chunks > 1),
        ">weights",
        ">gradients",
        ">optimizer",
        ">activations",
        ">temporary",
        ">total",
        ">share",
    )
    for rank, memory in enumerate(plan.estimate.devices):
        share = share_of_limit(plan, rank)
        kinds = (
            memory.weights_bytes,
            memory.gradients_bytes,
            memory.optimizer_bytes,
            memory.activations_bytes,
            memory.temporary_bytes,
            memory.total_bytes,
        )
        style = "red" if share > 1 else "yellow" if share > 0.9 else ""
        table.add_row(stages_words(plan, rank), *map(format_bytes, kinds), Text(f"{share:.1%}", style=style))
    return table


def _layouts(plan: Plan) -> Iterator[RenderableType]:
    """One table for each distinct segment: what each operator cuts on each axis of degree above one."""
    axes = [axis for axis in ("dp", "tp") if plan.mesh.degree(axis) > 1]
    if not axes or not plan.layouts:
        return
    for kind in sorted({layout.kind for layout in plan.layouts}):
        labels = [segment.label for segment in plan.segments if segment.kind == kind]
        yield _heading(f"Layouts in {collapse(label or '.' for label in labels)}")
        table = _table("operators", "module", *(f"{axis}: cuts" for axis in axes), *(["result on tp"] * ("tp" in axes)))
        for group in _groups([layout for layout in plan.layouts if layout.kind == kind], axes):
            modules = dict.fromkeys(relative_module(layout, labels[0]) for layout in group)
            table.add_row(
                Text(counted([operator_name(layout.op) for layout in group])),
                Text(collapse(module for module in modules if module)),
                *(strategy_words(group[-1].op, getattr(group[-1], axis), axis) for axis in axes),
                *([group[-1].output] * ("tp" in axes)),
            )
        yield table


def _groups(layouts: list[OperatorLayout], axes: list[str]) -> list[list[OperatorLayout]]:
    """Neighbours in the same words stand in one row, when they are of one module or are the same operator."""

    def words(layout: OperatorLayout) -> tuple[str, ...]:
        return (*(strategy_words(layout.op, getattr(layout, axis), axis) for axis in axes), layout.output)

    groups: list[list[OperatorLayout]] = []
    for layout in layouts:
        last = groups[-1][-1] if groups else None
        if last and words(last) == words(layout) and (last.module == layout.module or last.op == layout.op):
            groups[-1].append(layout)
        else:
            groups.append([layout])
    return groups


_ORDER = {"best": 0, "solved": 1, "tried": 2, "open": 3, "pruned": 4, "infeasible": 5}


def _searched(plan: Plan) -> Iterator[RenderableType]:
    def rank(entry: Searched) -> tuple[int, float, str]:
        cost = entry.bound_s if entry.objective_s is None else entry.objective_s
        return _ORDER.get(entry.outcome, len(_ORDER)), cost, entry.configuration

    ordered = sorted(plan.searched, key=rank)
    table = _table("configuration", "outcome", ">step time", ">lower bound", "why")
    for entry in ordered[:MOST_SEARCHED]:
        objective = "" if entry.objective_s is None else format_seconds(entry.objective_s)
        outcome = Text(entry.outcome, style="green" if entry.outcome == "best" else "")
        table.add_row(Text(entry.configuration), outcome, objective, format_seconds(entry.bound_s), _why(entry))
    yield table
    rest = ordered[MOST_SEARCHED:]
    if rest:
        counts = ", ".join(
            f"{n} {outcome}" for outcome in _ORDER if (n := sum(entry.outcome == outcome for entry in rest))
        )
        yield Text(f"and {len(rest)} more: {counts}")


def _why(entry: Searched) -> Text:
    words = {"pruned": "bound no better than the best", "tried": "nothing better found", "open": "not reached"}
    return Text(entry.reason or words.get(entry.outcome, ""))
