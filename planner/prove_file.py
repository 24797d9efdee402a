"""A plan's proof checked again from the file alone: no solver, no torch, no graph.

    the plan is legal                 planner.ir.verify, law by law
    its step time                     the event simulation of its schedule over its stages' times
    its memory                        the sums of every device against the limit
    its bound and gap                 the claim: no plan of the space is faster than ``bound_s``

The claim rests on the record of the search. Each part of the space in it must bear it:

    best, solved    objective_s >= that of the plan     and    bound_s >= bound_s of the plan
    pruned          bound_s >= objective of the plan: that is what pruned it
    open            bound_s >= bound_s of the plan
    infeasible      says why

and the record must hold every configuration of the space for the plan's devices, batch and segments, or a part of the space
that contains it (planner.solve.space). Which orders of axes there are depends on the cluster: a preset of the plan's name, or
one that is given.

Whether the recorded bounds are right is checked against the model (planner.prove_model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from costmodels.hardware import presets
from costmodels.mixed import Machine, load_machine, mixed_presets
from planner.ir.plan import Plan, Searched
from planner.ir.verify import LAWS
from planner.report.proof import Check, Proof
from planner.report.words import device_words
from planner.simulate import estimate_step
from planner.sizes import format_bytes, format_seconds
from planner.solve.space import Space

# Relative; the search calls two objectives equal that are closer.
TOLERANCE = 1e-9


def prove_file(plan: Plan, cluster: Machine | None = None) -> Proof:
    """Every check that the plan alone allows. Where it is not legal, only that: the rest would mean nothing.

    ``cluster``: the machine the plan is for, by default the preset of its name.
    """
    laws = tuple(_laws(plan))
    if any(check.problem for check in laws):
        return Proof(plan, laws)
    if cluster is None and plan.cluster in (*presets(), *mixed_presets()):
        cluster = load_machine(plan.cluster)
    claim = tuple(_claim(plan))
    if plan.strategy == "auto":
        claim = (*claim, _coverage(plan, cluster))
    return Proof(plan, (*laws, _step_time(plan), _memory(plan), *claim))


def _laws(plan: Plan) -> Iterator[Check]:
    for name, law in LAWS:
        problem = next(iter(law(plan)), "")
        yield Check(f"legal: {name}", "as it must be", problem)
        if problem:
            return


def _step_time(plan: Plan) -> Check:
    stored = plan.estimate
    again = estimate_step(stored.stages, plan.schedule, plan.micro_batches, stored.limits_bytes, plan.chunks)
    off = abs(again.step_time_s - stored.step_time_s) > TOLERANCE * again.step_time_s
    found = f"{format_seconds(again.step_time_s)}, simulated from the times of {len(stored.stages)} stages"
    return Check("step time", found, f"stored {stored.step_time_s:.9g} s, simulated {again.step_time_s:.9g} s" * off)


def _memory(plan: Plan) -> Check:
    over, sizes = plan.estimate.over_bytes, [x.total_bytes for x in plan.estimate.devices]
    rank = max(range(len(sizes)), key=over.__getitem__)
    limit = plan.estimate.limits_bytes[rank]
    most = f"{device_words(plan, rank)} holds {format_bytes(sizes[rank])} of {format_bytes(limit)}"
    return Check("memory", most, f"{most}, which does not fit" if over[rank] > 0 else "")


def _claim(plan: Plan) -> Iterator[Check]:
    if plan.strategy != "auto":
        yield Check("bound", f"a hand-picked strategy ({plan.strategy}) claims none")
        return
    found = f"no plan is faster than {format_seconds(plan.bound_s)}: gap {plan.gap:.2%}"
    yield Check("bound", found, "" if plan.searched else "the plan has no record of a search to rest on")
    for name, outcomes, laws in (
        ("best", ("best",), _best(plan)),
        ("solved", ("best", "solved"), _solved(plan)),
        ("pruned", ("pruned",), _pruned(plan)),
        ("open", ("open", "tried"), _open(plan)),
        ("infeasible", ("infeasible",), _infeasible(plan)),
    ):
        count = sum(entry.outcome in outcomes for entry in plan.searched)
        yield Check(f"record: {name}", f"{count} in the record", next(iter(laws), ""))


def _of(plan: Plan, outcomes: Sequence[str]) -> Iterator[Searched]:
    return (entry for entry in plan.searched if entry.outcome in outcomes)


def _best(plan: Plan) -> Iterator[str]:
    found = list(_of(plan, ("best",)))
    if len(found) != 1:
        yield f"{len(found)} configurations are called the best"
        return
    mine = set(plan.configuration.split())
    words = {word for word in found[0].configuration.split() if not word.startswith("recompute=")}
    if not words <= mine:
        yield f"the best is {found[0].configuration}, the plan is {plan.configuration}"
    objective = found[0].objective_s
    if objective is None or abs(objective - plan.objective_s) > TOLERANCE * plan.objective_s:
        yield f"the best costs {objective} s, the plan {plan.objective_s:.9g} s"


def _solved(plan: Plan) -> Iterator[str]:
    for entry in _of(plan, ("best", "solved")):
        if entry.objective_s is None:
            yield f"{entry.configuration} was solved, but has no objective"
        elif entry.objective_s < plan.objective_s * (1 - TOLERANCE):
            yield f"{entry.configuration} costs {entry.objective_s:.9g} s, less than the plan"
        elif entry.bound_s > entry.objective_s * (1 + TOLERANCE):
            yield f"the bound of {entry.configuration}, {entry.bound_s:.9g} s, is above its objective"
        elif entry.bound_s < plan.bound_s * (1 - TOLERANCE):
            yield f"{entry.configuration} is only bounded by {entry.bound_s:.9g} s, below the plan's bound"


def _pruned(plan: Plan) -> Iterator[str]:
    for entry in _of(plan, ("pruned",)):
        if entry.bound_s < plan.objective_s * (1 - TOLERANCE):
            yield f"{entry.configuration} was pruned with {entry.bound_s:.9g} s, which is below the plan's time"


def _open(plan: Plan) -> Iterator[str]:
    for entry in _of(plan, ("open", "tried")):
        if entry.bound_s < plan.bound_s * (1 - TOLERANCE):
            yield f"{entry.configuration} is {entry.outcome} with {entry.bound_s:.9g} s, below the plan's bound"


def _infeasible(plan: Plan) -> Iterator[str]:
    for entry in _of(plan, ("infeasible",)):
        if not entry.reason:
            yield f"{entry.configuration} is called infeasible without a reason"


def _coverage(plan: Plan, cluster: Machine | None) -> Check:
    name = "record: whole space"
    if cluster is None:
        return Check(name, f"not checked: {plan.cluster} is no preset; name its file with --cluster")
    space = Space(cluster.with_gpus(plan.mesh.size), plan.global_batch, len(plan.segments))
    recorded = {entry.configuration for entry in plan.searched}
    count, problem = 0, ""
    for part in _finest(space, recorded):
        count += 1
        if part not in recorded:
            problem = problem or f"{part} is not in the record, nor is a part of the space that contains it"
    return Check(name, f"{count} parts make up the space, each in the record", problem)


def _finest(space: Space, recorded: set[str]) -> Iterator[str]:
    """Parts that make up ``space``: the coarsest that are recorded, and configurations where none is."""
    for wide in space.regions():
        if str(wide) in recorded:
            yield str(wide)
            continue
        for region in space.narrower(wide):
            if str(region) in recorded:
                yield str(region)
                continue
            assert region.mesh is not None
            for shape in space.shapes(region.mesh):
                if str(shape) in recorded:
                    yield str(shape)
                else:
                    yield from map(str, space.configurations(shape))
