"""What makes a plan legal. Knows no solver and no torch: run after every search, every load and before every launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from planner.errors import InvalidPlan
from planner.ir.graph import Graph
from planner.ir.layout import Pair
from planner.ir.plan import RECOMPUTATIONS, Estimate, Plan
from planner.schedules import ZERO_BUBBLE, check
from planner.simulate import estimate_step

ZERO_STAGES = (0, 1, 2, 3)
OUTCOMES = ("best", "solved", "tried", "pruned", "infeasible", "open")
REMEDY = "Undo the edit, or write the plan again with 'planner plan'."
TOLERANCE = 1e-9  # relative, between a stored figure and the same figure computed again


def verify_plan(plan: Plan, graph: Graph | None = None) -> None:
    """Raise InvalidPlan naming the first thing wrong with ``plan``, or that ``graph`` is not the one it is for."""
    for _, law in LAWS:
        for problem in law(plan):
            raise InvalidPlan(f"the plan for {plan.model} is not legal: {problem}. {REMEDY}")
    if graph is not None:
        _same_graph(plan, graph)


def _structure(plan: Plan) -> Iterator[str]:
    mesh, segments = plan.mesh, len(plan.segments)
    if not segments:
        yield "it has no segments"
    if plan.chunks < 1 or len(plan.stages) != mesh.pp * plan.chunks:
        each = "" if plan.chunks == 1 else f" of {plan.chunks} stages each"
        yield f"it has {len(plan.stages)} stages, but its mesh {mesh} has {mesh.pp}{each}"
    for name, given in (("placement", plan.placement), ("memory_limits_bytes", plan.estimate.memory_limits_bytes)):
        if given and len(given) != mesh.pp:
            yield f"{name} has {len(given)} entries for {mesh.pp} pipeline ranks"
    if plan.groups and not plan.placement:
        yield f"it orders the groups {', '.join(plan.groups)}, but has no placement"
    expected = 0
    for index, (first, end) in enumerate(plan.stages):
        if first != expected:
            yield f"stage {index} starts at segment {first} instead of {expected}; the stages must follow each other"
        if end <= first:
            yield f"stage {index} holds no segment ({first} to {end})"
        expected = end
    if expected != segments:
        yield f"its stages end at segment {expected}, but it has {segments} segments"
    if len(plan.recompute) != segments:
        yield f"recompute has {len(plan.recompute)} entries for {segments} segments"
    for word in plan.recompute:
        if word not in RECOMPUTATIONS:
            yield f"recompute holds {word!r}; a segment's word is one of {', '.join(RECOMPUTATIONS)}"
    if plan.micro_batches < 1 or plan.global_batch < 1:
        yield f"{plan.micro_batches} micro-batches of a batch of {plan.global_batch}; both must be at least 1"
    if plan.global_batch < mesh.dp * plan.micro_batches:
        parts = f"{mesh.dp} data shards x {plan.micro_batches} micro-batches"
        yield f"a batch of {plan.global_batch} cannot be cut into {parts}"
    refusal = check(plan.schedule, mesh.pp, plan.micro_batches, plan.chunks)
    if refusal:
        yield refusal
    if plan.zero not in ZERO_STAGES:
        yield f"ZeRO stage {plan.zero}; it must be one of {', '.join(map(str, ZERO_STAGES))}"
    if plan.schedule == ZERO_BUBBLE:
        yield from _zero_bubble(plan)


def _zero_bubble(plan: Plan) -> Iterator[str]:
    """What a backward in two parts cannot be mixed with: torch would run it twice, or lose gradients without a word."""
    if plan.zero > 1 and plan.mesh.dp > 1:
        yield f"zero-bubble runs with ZeRO 0 and 1 only, not {plan.zero}; use another schedule, or zero=1"
    if any(word != "none" for word in plan.recompute):
        yield "zero-bubble runs without recomputation only; use another schedule, or recompute=none"


def _layouts(plan: Plan) -> Iterator[str]:
    kinds = {segment.kind for segment in plan.segments}
    for layout in plan.layouts:
        if layout.kind not in kinds:
            yield f"operator {layout.name} is laid out for segments of kind {layout.kind}, but there are none"
        for axis, strategy in (("dp", layout.dp), ("tp", layout.tp)):
            degree = plan.mesh.degree(axis)
            if degree > 1 and not strategy:
                yield f"operator {layout.name} has no strategy on axis {axis}, of degree {degree}"
        if layout.output:
            try:
                Pair.parse(layout.output)
            except ValueError as error:
                yield f"the output of operator {layout.name}: {error}"


def _figures(plan: Plan) -> Iterator[str]:
    """Every number of the estimate is finite and not negative, and no part is larger than its whole."""
    records: list[tuple[str, Any]] = [("estimate", plan.estimate)]
    for index, stage in enumerate(plan.estimate.stages):
        records += [(f"estimate of stage {index}", stage), (f"memory of stage {index}", stage.memory)]
    for label, record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                yield f"{label}: {field.name} is {value}"
    for index, stage in enumerate(plan.estimate.stages):
        for name, whole_s, part_s in (
            ("forward", stage.forward_s, stage.forward_communication_s),
            ("backward", stage.backward_s, stage.backward_communication_s + stage.recomputation_s),
            ("backward", stage.backward_s, stage.weight_backward_s),
        ):
            if part_s > whole_s * (1 + TOLERANCE):
                yield f"estimate of stage {index}: the parts of its {name}, {part_s:.9g} s, exceed {whole_s:.9g} s"
    if not 0 <= plan.bound_s < math.inf:
        yield f"bound_s is {plan.bound_s}"


def _estimate(plan: Plan) -> Iterator[str]:
    stored = plan.estimate
    if (len(stored.stages), stored.chunks) != (len(plan.stages), plan.chunks):
        yield f"its estimate has {len(stored.stages)} stages, {stored.chunks} a device, the plan {len(plan.stages)}"
    again = estimate_step(stored.stages, plan.schedule, plan.micro_batches, stored.limits_bytes, plan.chunks)
    for name in ("step_time_s", "compute_s", "exposed_communication_s", "bubble_s"):
        ours, theirs = getattr(again, name), getattr(stored, name)
        if abs(ours - theirs) > TOLERANCE * again.step_time_s:
            yield f"its {name} is {theirs:.9g}, but its stages give {ours:.9g}"
    if plan.strategy == "auto" and not stored.fits:
        yield _overflow(stored)


def _overflow(estimate: Estimate) -> str:
    peaks, over = [memory.total_bytes for memory in estimate.devices], estimate.over_bytes
    worst = max(range(len(peaks)), key=over.__getitem__)
    stages = list(range(worst, len(estimate.stages), len(peaks)))
    name = f"stage {worst}" if len(stages) == 1 else f"the device of stages {', '.join(map(str, stages))}"
    return f"{name} needs {peaks[worst]} bytes a device, the limit is {estimate.limits_bytes[worst]}"


def _proof(plan: Plan) -> Iterator[str]:
    if plan.bound_s > plan.objective_s * (1 + TOLERANCE):
        yield f"its bound of {plan.bound_s:.9g} s is above its objective of {plan.objective_s:.9g} s"
    for searched in plan.searched:
        if searched.outcome not in OUTCOMES:
            yield f"configuration {searched.configuration} has the unknown outcome {searched.outcome!r}"


# What a legal plan keeps to, in the order in which each may rely on those before.
LAWS: tuple[tuple[str, Callable[[Plan], Iterator[str]]], ...] = (
    ("mesh, stages and schedule", _structure),
    ("layouts", _layouts),
    ("figures", _figures),
    ("estimate", _estimate),
    ("bound", _proof),
)


def _same_graph(plan: Plan, graph: Graph) -> None:
    if plan.graph_digest != graph.digest:
        raise InvalidPlan(
            f"the plan is for another model or another batch: it names graph {plan.graph_digest[:12]} "
            f"({plan.model}, batch {plan.global_batch}), this one is {graph.digest[:12]} (batch {graph.batch_size}). "
            "Give the model and the batch the plan was made for, or make a new plan with 'planner plan'."
        )
    last = max((node.segment for node in graph.nodes), default=0)
    if last and last + 1 != len(plan.segments):
        raise InvalidPlan(
            f"the plan for {plan.model} has {len(plan.segments)} segments, this model {last + 1}. "
            "Make a new plan with 'planner plan'."
        )
