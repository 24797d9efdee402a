"""A plan's proof checked against the model: everything that can be computed without a solver.

    graph           the digest of the model's graph is the plan's
    batch           what dp does to every operator follows from cutting the batch
    stages          every stage priced again from the graph, figure by figure
    bounds          of every part of the space in the record, by work alone:

        T >= m t                          one stage;  t = work of a micro-batch / tp
        T >= t / (1 - (1 - 1/m)^pp)       gpipe and 1f1b over pp stages
        T >= m t / pp                     schedules with several stages a device, or a backward in two parts
        T >= work of the batch / devices  parts of which only the degree of tp is known

    one stage       where no operator is cut (tp = 1), the best plan itself, by the frontier of recomputation

A part of the space whose bound here is no less than the plan's time cannot hold a faster plan, whatever the record says. The
others rest on the solver's bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from planner.errors import BadInput, InvalidPlan
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.ir.verify import verify_plan
from planner.layouts import check_on_dp
from planner.pricing_again import price_again
from planner.prove_file import TOLERANCE, prove_file
from planner.report.proof import Check, Proof
from planner.segment_cost import stage_estimate
from planner.simulate import estimate_step
from planner.sizes import format_seconds
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.frontier import Frontier
from planner.solve.problem import Problem

FILL_AND_DRAIN = ("gpipe", "1f1b")


def prove_against(plan: Plan, problem: Problem) -> Proof:
    """The checks of the file and those against the graph of ``problem``, priced on its cluster."""
    proof = prove_file(plan, problem.cluster)
    if not proof.holds:
        return proof
    evaluator = Evaluator(problem)
    checks = [*proof.checks, _graph(plan, evaluator)]
    if not checks[-1].problem:
        checks.append(_stages(plan, evaluator))
    if not checks[-1].problem and plan.strategy == "auto":
        checks += _bounds(plan, evaluator)
    return Proof(plan, tuple(checks))


def _graph(plan: Plan, evaluator: Evaluator) -> Check:
    found = f"the model's graph is {evaluator.problem.graph.digest[:12]}"
    try:
        verify_plan(plan, evaluator.problem.graph)
        split = evaluator.split(plan.mesh.dp, plan.micro_batches)
        check_on_dp(split.graph, plan.layouts, split.dp, plan.mesh.dp)
    except (InvalidPlan, BadInput) as error:
        return Check("model: graph", found, str(error))
    return Check("model: graph", found)


def _stages(plan: Plan, evaluator: Evaluator) -> Check:
    cluster = evaluator.problem.cluster
    name, found = "model: prices", f"{len(plan.stages)} stages priced again on {cluster.gpus} x {cluster.name}"
    try:
        again = price_again(plan, evaluator).estimate
    except (InvalidPlan, BadInput) as error:
        return Check(name, found, str(error))
    return Check(name, found, next(_differences(plan, again.stages), ""))


def _differences(plan: Plan, again: tuple[object, ...]) -> Iterator[str]:
    for number, (mine, theirs) in enumerate(zip(plan.estimate.stages, again, strict=True)):
        for record, other in ((mine, theirs), (mine.memory, getattr(theirs, "memory", None))):
            for field in fields(record):
                stored, computed = getattr(record, field.name), getattr(other, field.name)
                if not isinstance(stored, int | float):
                    continue
                if abs(stored - computed) > TOLERANCE * max(abs(stored), abs(computed)):
                    yield f"stage {number}: {field.name} is {stored:.9g} in the plan, {computed:.9g} from the graph"


# --- bounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the space as the record names it; None: every one."""

    tp: int
    mesh: Mesh | None = None
    micro_batches: int | None = None
    zero: int | None = None
    schedule: str | None = None
    chunks: int = 1
    groups: tuple[str, ...] = ()

    @property
    def configuration(self) -> Configuration | None:
        if self.mesh is None or self.micro_batches is None or self.zero is None:
            return None
        return Configuration(
            self.mesh, self.micro_batches, self.zero, self.schedule or "1f1b", self.chunks, self.groups
        )


def parse_part(text: str, devices: int) -> Part:
    """Read ``tp8``, ``pp4.dp2.tp8``, ``pp4.dp2.tp8 mb=16`` or a whole configuration. Raises ValueError."""
    first, *words = text.split()
    mesh = Mesh.parse(first)
    options = {}
    for word in words:
        match = re.fullmatch(r"(mb|zero|schedule|v|groups)=([\w.+-]+)", word)
        if match is None:
            raise ValueError(f"{text!r} is no part of the space: {word!r}")
        options[match[1]] = match[2]
    if "mb" not in options:
        if mesh.size == devices:
            return Part(mesh.tp, mesh)
        if mesh.pp > 1 or mesh.dp > 1 or devices % mesh.tp:
            raise ValueError(f"{text!r} is no part of the space")
        return Part(mesh.tp)
    if mesh.size != devices:
        raise ValueError(f"{text!r} is for {mesh.size} devices, not {devices}")
    zero = int(options["zero"]) if "zero" in options else None
    groups = tuple(options["groups"].split("+")) if "groups" in options else ()
    return Part(mesh.tp, mesh, int(options["mb"]), zero, options.get("schedule"), int(options.get("v", "1")), groups)


def work_bound_s(evaluator: Evaluator, part: Part) -> float:
    """No plan of ``part`` takes less: see the module. Raises BadInput where the batch cannot be cut so."""
    if part.mesh is None or part.micro_batches is None:
        return evaluator.work_s(1, 1) / evaluator.capacity()
    pp, m = part.mesh.pp, part.micro_batches
    micro_batch_s = evaluator.work_s(part.mesh.dp, m) / part.tp
    if pp == 1:
        return m * micro_batch_s
    if part.schedule in FILL_AND_DRAIN and part.chunks == 1:
        return micro_batch_s / (1.0 - (1.0 - 1.0 / m) ** pp)
    return m * micro_batch_s / pp


def _bounds(plan: Plan, evaluator: Evaluator) -> Iterator[Check]:
    alone: list[Searched] = []
    rest: list[Searched] = []
    problem = ""
    exact = 0
    for entry in plan.searched:
        try:
            part = parse_part(entry.configuration, plan.mesh.size)
        except ValueError as error:
            problem = problem or str(error)
            continue
        try:
            bound_s = work_bound_s(evaluator, part)
        except BadInput:
            bound_s = float("inf")  # the batch cannot be cut so
        wrong, is_exact = _one_stage(entry, part, plan, evaluator) if bound_s < plan.objective_s else ("", False)
        problem = problem or wrong
        exact += is_exact
        if not is_exact:
            (alone if bound_s >= plan.objective_s * (1 - TOLERANCE) else rest).append(entry)
    limit_s = format_seconds(plan.objective_s)
    yield Check("model: bounds", f"{len(alone)} parts of the space cannot beat {limit_s}, by their work alone", problem)
    if exact:
        yield Check("model: one stage", f"{exact} configurations priced exactly, none faster")
    open_ = [entry for entry in rest if entry.outcome != "best"]
    if open_:
        yield Check("model: solver", f"{len(open_)} parts rest on the bounds that the solver recorded")


def _one_stage(entry: Searched, part: Part, plan: Plan, evaluator: Evaluator) -> tuple[str, bool]:
    """Of a configuration of one stage and tp = 1, the best plan, which the record must agree with: (problem, was it one)."""
    configuration = part.configuration
    if configuration is None or configuration.mesh.pp > 1 or configuration.mesh.tp > 1:
        return "", False
    try:
        costs = evaluator.costs(configuration, evaluator.letters(configuration))
    except BadInput:
        return "", False
    frontier, segments, (limit,) = Frontier(costs), len(costs), evaluator.problem.limits_bytes(configuration)
    label = frontier.fastest(0, segments, 1, limit)
    if not frontier.exact:
        return "", False
    if label is None:
        found = entry.outcome in ("infeasible", "pruned", "tried", "open")
        return ("" if found else f"{entry.configuration} is called {entry.outcome}, but does not fit"), True
    stage = stage_estimate(costs, label.recompute, 1, True)
    best_s = estimate_step([stage], configuration.schedule, configuration.micro_batches, limit).step_time_s
    if entry.outcome == "infeasible":
        return f"{entry.configuration} is called infeasible, but takes {best_s:.9g} s and fits", True
    if best_s < plan.objective_s * (1 - TOLERANCE) and best_s < plan.bound_s * (1 - TOLERANCE):
        return f"{entry.configuration} takes {best_s:.9g} s, less than the plan's bound", True
    if entry.objective_s is not None and abs(best_s - entry.objective_s) > TOLERANCE * best_s:
        return f"{entry.configuration} takes {best_s:.9g} s, not the recorded {entry.objective_s:.9g} s", True
    return "", True
