"""Why a plan: every answer is a search of its own, within a part of the space or on another machine.

    families        the space within degrees of the mesh:  pure dp (with or without ZeRO), tp, pp, and their mixes
    binding         the plan's own estimate; a link's share by pricing the plan again with that link free
    changes         the whole space with one more GB, more devices, links and devices twice as fast
    operators       the plan's configuration with one strategy of one operator forced, all others free

So a family's price, or the price of a letter, is that of the best plan that has it, proven like the plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from costmodels.hardware import Cluster, Device, Link
from costmodels.mixed import Machine, MixedCluster, of_each_group
from planner.costing import Pricing, node_cost
from planner.errors import BadInput, Infeasible, OutOfTime
from planner.ir.graph import Node
from planner.ir.mesh import Mesh
from planner.ir.plan import OperatorLayout, Plan
from planner.layouts import strategy_names
from planner.placement import FREE
from planner.pricing_again import configuration_of, price_again, price_on
from planner.report.explanation import (
    Binding,
    Change,
    Explanation,
    Family,
    Forced,
    OperatorReason,
    Traffic,
    letter_words,
)
from planner.report.parts import step_parts
from planner.segments import node_classes
from planner.sharding_rules import Strategy
from planner.sizes import format_bytes
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.ways_out import ways_out_by_hand

Say = Callable[[str], None]
GB = 10**9
UNLIMITED = 10**18
INSIDE, BETWEEN, JOINING = "inside nodes", "between nodes", "between groups"
DEFAULT_OPERATORS = 3
MOST_STRATEGIES = 8  # of one operator that are tried

FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tensor", ("tp",)),
    ("pipeline", ("pp",)),
    ("data + tensor", ("dp", "tp")),
    ("data + pipeline", ("pp", "dp")),
    ("tensor + pipeline", ("pp", "tp")),
    ("data + tensor + pipeline", ("pp", "dp", "tp")),
)


def explain(
    problem: Problem,
    plan: Plan | None = None,
    operators: Sequence[str] = (),
    *,
    time_limit_s: float | None = None,
    changes: bool = True,
    say: Say = lambda what: None,
) -> Explanation:
    """Why ``plan``, by default the solver's, is as it is.

    ``operators``: names, modules or torch names of those to explain; by default the costliest. ``time_limit_s``: of each
    search. ``changes``: solve for other machines too. Raises what a search raises for the problem itself; and BadInput for
    an operator that is not there.
    """
    evaluator = Evaluator(problem)
    say("searching")
    best = search(problem, time_limit_s, evaluator=evaluator)
    shown = best if plan is None else price_again(plan, evaluator)
    found_families = tuple(_families(evaluator, best, time_limit_s, say))
    found_changes = tuple(_changes(problem, time_limit_s, say)) if changes else ()
    reasons, note = _operators(evaluator, shown, operators, time_limit_s, say)
    ways = () if shown.estimate.fits else ways_out_by_hand(evaluator, shown, best)
    return Explanation(shown, best, found_families, _binding(evaluator, shown), found_changes, reasons, ways, note)


# --- families ---------------------------------------------------------------------------------------------------------


def family_of(mesh: Mesh, zero: int) -> str:
    """The family a configuration belongs to."""
    above_one = tuple(axis for axis in ("pp", "dp", "tp") if mesh.degree(axis) > 1)
    if above_one == ("dp",):
        return "data parallel, ZeRO" if zero else "data parallel"
    return next((name for name, axes in FAMILIES if axes == above_one), "one device")


def _families(evaluator: Evaluator, best: Plan, time_limit_s: float | None, say: Say) -> Iterator[Family]:
    gpus = evaluator.problem.cluster.gpus
    mine = family_of(best.mesh, best.zero)
    names = ("data parallel", "data parallel, ZeRO", *(name for name, _ in FAMILIES)) if gpus > 1 else ("one device",)
    for name in names:
        if name == mine:
            yield Family(name, best)
            continue
        say(f"the best plan of {name}")

        def within(configuration: Configuration, name: str = name) -> bool:
            return family_of(configuration.mesh, configuration.zero) == name

        found, refused = _tried(evaluator.problem, time_limit_s, within, evaluator)
        if found is not None or refused:
            yield Family(name, found, refused)


def _tried(
    problem: Problem,
    time_limit_s: float | None,
    within: Callable[[Configuration], bool] | None = None,
    evaluator: Evaluator | None = None,
) -> tuple[Plan | None, str]:
    """The best plan there, or why there is none ('' where nothing lies within)."""
    try:
        return search(problem, time_limit_s, within=within, evaluator=evaluator), ""
    except Infeasible as error:
        if error.shortage is not None:
            return None, f"{format_bytes(error.shortage.missing_bytes)} too much on its fullest device"
        return None, _reason(str(error))
    except OutOfTime:
        return None, "none found in the time allowed"


def _reason(message: str) -> str:
    reason = message.partition(": ")[2]
    return "" if reason.startswith("the batch or model cannot be split") else reason


# --- what binds -------------------------------------------------------------------------------------------------------


def _binding(evaluator: Evaluator, plan: Plan) -> Binding:
    cluster = evaluator.problem.cluster
    saved = {}
    for name, free in _with_links(cluster, lambda _: FREE):
        if name != INSIDE or plan.mesh.size > 1:
            saved[name] = max(0.0, plan.objective_s - price_on(plan, evaluator, free).objective_s)
    left = tuple(-over for over in plan.estimate.over_bytes)
    return Binding(left, step_parts(plan), _traffic(evaluator, plan), saved)


def _with_links(cluster: Machine, change: Callable[[Link], Link]) -> Iterator[tuple[str, Machine]]:
    """The cluster with its links of one kind changed, for each kind it has."""
    yield INSIDE, of_each_group(cluster, lambda group: with_link(group, "intra", change(group.intra)))
    groups = cluster.groups if isinstance(cluster, MixedCluster) else (cluster,)
    if any(group.nodes > 1 for group in groups):
        yield BETWEEN, of_each_group(cluster, lambda group: with_link(group, "inter", change(group.inter)))
    if isinstance(cluster, MixedCluster):
        yield JOINING, replace(cluster, inter=change(cluster.inter))


def _traffic(evaluator: Evaluator, plan: Plan) -> tuple[Traffic, ...]:
    """The communication of a step by purpose. What ZeRO adds inside the micro-batches: by pricing the plan without it."""
    parts, mesh = step_parts(plan), plan.mesh
    inside = parts["inside layers"]
    letters = inside
    if plan.zero and mesh.dp > 1:
        letters = min(inside, step_parts(price_again(replace(plan, zero=0), evaluator))["inside layers"])
    gathered = inside - letters
    on = "tp" if mesh.tp > 1 else "dp"
    shared = next((axis for axis in ("dp", "tp", "pp") if mesh.degree(axis) > 1), "dp")
    rows = (
        ("operators' results", on, letters),
        (f"weights (ZeRO-{plan.zero})", "dp", gathered),
        ("gradients", shared, parts["gradients"]),
        ("tensors between stages", "pp", parts["between stages"]),
    )
    cluster = evaluator.problem.cluster
    groups = cluster.in_order(plan.groups) if isinstance(cluster, MixedCluster) else (cluster,)
    return tuple(Traffic(name, axis, link_of(mesh, axis, groups), seconds) for name, axis, seconds in rows if seconds)


def link_of(mesh: Mesh, axis: str, groups: Sequence[Cluster]) -> str:
    """Whether ranks of the axis that talk are on several nodes, or groups of machines; ``groups`` in the order of ranks."""
    nodes = [(number, i // group.gpus_per_node) for number, group in enumerate(groups) for i in range(group.gpus)]
    talking = [{nodes[rank] for rank in ranks} for ranks in mesh.groups(axis)]
    if any(len({number for number, _ in there}) > 1 for there in talking):
        return JOINING
    return BETWEEN if any(len(there) > 1 for there in talking) else INSIDE


# --- other machines ---------------------------------------------------------------------------------------------------


def other_machines(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The changes that are tried: a name, and the problem then."""
    cluster, limit = problem.cluster, problem.memory_limit_bytes
    more = GB if limit >= 2 * GB else limit // 4
    yield f"{format_bytes(more)} more memory a device", problem.with_more_memory(more)
    for gpus in more_devices(cluster):
        count = gpus - cluster.gpus
        name = f"{count} more device{'s' if count > 1 else ''}: {gpus}"
        yield name, replace(problem, cluster=cluster.with_gpus(gpus))
    if cluster.gpus > 1:
        for name, faster in _with_links(cluster, faster_link):
            yield f"twice the bandwidth {name}", replace(problem, cluster=faster)
    faster = of_each_group(cluster, twice_as_fast)
    yield "devices twice as fast", replace(problem, cluster=faster)


def more_devices(cluster: Machine) -> tuple[int, ...]:
    """One more device; and the next count that divides well: one more node, or twice as many. Of a mixed cluster every
    group twice as large."""
    if isinstance(cluster, MixedCluster):
        return (2 * cluster.gpus,)
    gpus, node = cluster.gpus, cluster.gpus_per_node
    useful = gpus + node if gpus >= node and gpus % node == 0 else 2 * gpus
    return tuple(sorted({gpus + 1, useful}))


def twice_as_fast(cluster: Cluster) -> Cluster:
    measured = None if cluster.measured is None else cluster.measured.scaled(operators=0.5)
    return replace(cluster, device=faster_device(cluster.device), measured=measured)


def with_link(cluster: Cluster, side: str, link: Link) -> Cluster:
    """``cluster`` with another link ('intra' or 'inter'); messages that were measured take as much less in proportion."""
    changed = replace(cluster, intra=link) if side == "intra" else replace(cluster, inter=link)
    if cluster.measured is None:
        return changed
    old = cluster.intra if side == "intra" else cluster.inter
    ratio = old.bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
    return replace(changed, measured=cluster.measured.scaled(messages=ratio))


def faster_link(link: Link) -> Link:
    """Twice the bandwidth, the latency as it is."""
    return replace(
        link,
        bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s,
        peer_bandwidth_bytes_per_s=2 * link.peer_bandwidth_bytes_per_s,
    )


def faster_device(device: Device) -> Device:
    """Twice the arithmetic and twice the memory bandwidth; launching an operator costs what it does."""
    peaks = {dtype: 2 * peak for dtype, peak in device.peak_flops_per_s.items()}
    return replace(
        device,
        name=f"{device.name}, twice as fast",
        peak_flops_per_s=peaks,
        memory_bytes_per_s=2 * device.memory_bytes_per_s,
    )


def _changes(problem: Problem, time_limit_s: float | None, say: Say) -> Iterator[Change]:
    for name, other in other_machines(problem):
        say(f"solving with {name}")
        found, refused = _tried(other, time_limit_s)
        yield Change(name, found, refused)


# --- operators --------------------------------------------------------------------------------------------------------


def _operators(
    evaluator: Evaluator, plan: Plan, wanted: Sequence[str], time_limit_s: float | None, say: Say
) -> tuple[tuple[OperatorReason, ...], str]:
    """Why operators run their strategy on tp; and a note where none is cut."""
    costs = _operator_costs_s(evaluator, plan)
    rows = {row.name: row for row in plan.layouts if row.name in costs}
    picked = [name for text in wanted for name in _matching(text, rows, costs)]
    if plan.mesh.tp == 1:
        if wanted:
            return (
                (),
                "no operator is cut on tp in this plan, whose tp is 1; see the families with tensor for what it costs",
            )
        return (), ""
    if not wanted:
        picked = sorted(rows, key=lambda name: (-costs[name], name))[:DEFAULT_OPERATORS]
    graph = evaluator.split(plan.mesh.dp, plan.micro_batches).graph
    offered = strategy_names(graph, plan.mesh.tp)
    total, reasons = sum(costs.values()), []
    for name in dict.fromkeys(picked):
        row = rows[name]
        say(f"forcing other strategies of {name}")
        others = sorted(offered[name] - {row.tp})[:MOST_STRATEGIES]
        forced = tuple(_forced(evaluator, plan, row, other, time_limit_s) for other in others)
        words = letter_words(row.op, row.tp)
        reasons.append(OperatorReason(name, row.op, row.module, row.tp, words, costs[name] / total, forced))
    return tuple(reasons), ""


def _operator_costs_s(evaluator: Evaluator, plan: Plan) -> dict[str, float]:
    """Seconds of a micro-batch on one device, uncut, of each class of operators: by the name the plan knows it by."""
    graph = evaluator.split(plan.mesh.dp, plan.micro_batches).graph
    pricing = Pricing(
        evaluator.problem.any_rank(configuration_of(plan)), Mesh(dp=plan.mesh.dp), evaluator.problem.optimizer
    )
    weights = evaluator.folded.weights
    classes = node_classes(graph)
    known = {row.name for row in plan.layouts}
    name_of = {classes[node.name]: node.name for node in reversed(graph.nodes) if node.name in known}
    costs: dict[str, float] = {}
    for node in graph.nodes:
        name = name_of.get(classes[node.name])
        if name is not None and node.op != "convert" and node.segment >= 0:
            costs[name] = costs.get(name, 0.0) + weights[node.segment] * node_cost(node, graph.values, pricing).total_s
    return costs


def _matching(text: str, rows: dict[str, OperatorLayout], costs: dict[str, float]) -> tuple[str, ...]:
    """Operators of that name, else of that module, else of that torch name: the costliest first."""
    for same in (
        lambda row: row.name == text,
        lambda row: row.module == text or row.module.startswith(f"{text}."),
        lambda row: text in (row.op, row.op.removeprefix("aten.").rsplit(".", 1)[0]),
    ):
        found = [name for name, row in rows.items() if same(row)]
        if found:
            return tuple(sorted(found, key=lambda name: (-costs[name], name))[:DEFAULT_OPERATORS])
    costliest = sorted(rows, key=lambda name: (-costs[name], name))[:8]
    raise BadInput(
        f"the plan has no operator or module {text!r}; the costliest are "
        + ", ".join(f"{name} ({rows[name].module})" for name in costliest)
    )


def _forced(evaluator: Evaluator, plan: Plan, row: OperatorLayout, strategy: str, time_limit_s: float | None) -> Forced:
    """The best plan of the plan's configuration in which the operator, and its equals, run ``strategy``."""
    graph = evaluator.split(plan.mesh.dp, plan.micro_batches).graph
    classes = node_classes(graph)
    same = {node.name for node in graph.nodes if classes[node.name] == classes[row.name]}

    def keep(node: Node, option: Strategy) -> bool:
        return node.name not in same or option.name == strategy

    here, words, problem = configuration_of(plan), letter_words(row.op, strategy), evaluator.problem
    if not plan.estimate.fits:  # nor need the others
        problem = problem.with_more_memory(UNLIMITED)
    found, refused = _tried(problem, time_limit_s, lambda c: c == here, Evaluator(problem, keep))
    if found is not None and next(x.tp for x in found.layouts if x.name == row.name) != strategy:
        return Forced(strategy, words, None, "not offered where the batch is cut unevenly")
    return Forced(strategy, words, found, refused)
