"""The public calls that ask how long, why, and how large a cluster.

estimate(model, gpus=..., strategy=...) -> Estimate     predicted time and memory of one strategy
explain(model, gpus=...) -> Explanation     what a plan is made of, what else there is, what would change it
size(model, clusters=...) -> Sizing         the smallest and the cheapest cluster
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from costmodels.hardware import Cluster, ClusterError, load_cluster, presets
from costmodels.mixed import MixedCluster, mixed_presets
from costmodels.software import OURS, load_software, software_names
from planner.errors import BadInput, Infeasible
from planner.explaining import explain as explain_problem
from planner.garbage import uncollected
from planner.ir.plan import Estimate, Plan
from planner.ir.verify import verify_plan
from planner.options import asked
from planner.report.explanation import Explanation
from planner.report.sizing import Sizing
from planner.sizes import parse_bytes, parse_seconds
from planner.sizing import DEFAULT_MOST_DEVICES, Wanted, size_on
from planner.solve.configuration import Evaluator
from planner.solve.search import search
from planner.strategies import plan_by_hand
from planner.tracing import problem_of, retracing, trace_model
from planner.ways_out import infeasible_with_ways_out


def estimate(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    strategy: str = "auto",
    software: str = OURS.name,
    **options: Any,
) -> Estimate:
    """The predicted time of a training step under ``strategy``, and the peak memory of each stage, with their parts.

    ``strategy``: "auto", or as planner.strategies reads it, such as 'pp4.dp2.tp8 mb=16 recompute=full'. ``software``: what
    runs the step (costmodels.software): this project, or a framework whose times are to be predicted. ``options``: the other
    arguments of ``auto_parallelize``. A model on the meta device will do; a strategy that does not fit the memory is priced
    all the same (``fits`` is False). The figures are those of the plan ``auto_parallelize`` makes of the same arguments.

    Raises BadInput or TraceError, and for "auto" Infeasible or OutOfTime. Nothing is started.
    """
    if software not in software_names():
        raise BadInput(f"software {software!r} is unknown; use one of {', '.join(software_names())}")
    made = asked("estimate", gpus, strategy, None, options)
    request = made.request
    traced, _ = trace_model(model, made.batch, request, made.samplewise)
    problem = problem_of(model, traced.graph, request)
    problem = replace(problem, cluster=problem.cluster.run_by(load_software(software)))
    with uncollected():
        if strategy == "auto":
            return search(problem, request.time_limit_s, request.progress).estimate
        return plan_by_hand(Evaluator(problem), strategy).estimate


def explain(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    strategy: str = "auto",
    plan: Plan | str | Path | None = None,
    operators: Sequence[str] = (),
    changes: bool = True,
    **options: Any,
) -> Explanation:
    """Why a plan is as it is: every answer is solved for, none guessed. It prints as a report.

    The plan is the solver's; or that of ``strategy``; or ``plan``, one made before for this model. ``operators``: names,
    modules or torch names of operators whose strategy on tp is to be explained; by default the costliest few. ``changes``:
    also solve for more memory, more devices, faster links and devices. ``options``: the other arguments of
    ``auto_parallelize``; ``time_limit`` is that of each search.

    Raises BadInput, TraceError, InvalidPlan, Infeasible or OutOfTime. Nothing is started.
    """
    made = asked("explain", gpus, strategy, plan, options)
    request = made.request
    traced, _ = trace_model(model, made.batch, request, made.samplewise)
    problem = problem_of(model, traced.graph, request)
    with uncollected():
        shown = request.plan
        if shown is not None:
            verify_plan(shown, traced.graph)
        elif strategy != "auto":
            shown = plan_by_hand(Evaluator(problem), strategy)
        try:
            return explain_problem(
                problem, shown, operators, time_limit_s=request.time_limit_s, changes=changes, say=request.say
            )
        except Infeasible as error:
            retrace = retracing(model, made.batch, request, made.samplewise)
            raise infeasible_with_ways_out(error, problem, retrace, request.say) from None


def size(
    model: torch.nn.Module,
    *,
    clusters: Sequence[str | Path | Cluster] = (),
    step_time: float | str | None = None,
    steps: int | None = None,
    within: float | str | None = None,
    prices: Mapping[str, float] | None = None,
    most_devices: int = DEFAULT_MOST_DEVICES,
    **options: Any,
) -> Sizing:
    """The smallest and the cheapest cluster that trains ``model`` on its batch fast enough. It prints as a table.

    ``clusters``: presets, TOML files or Clusters; default: every preset. ``step_time``: the most a step may take, in seconds
    or as '500ms'; or ``steps`` of them ``within`` a time ('7d'). Without either, what fits at all. ``prices``: of one hour of
    one device, by cluster name. ``most_devices``: of one size. ``options``: the other arguments of ``auto_parallelize``;
    ``time_limit`` is that of each search, ``memory_limit`` holds where a device has more.

    The model is traced once. Raises BadInput or TraceError. Nothing is started.
    """
    machines = [_machine(cluster) for cluster in clusters or presets()]
    names = {cluster.name for cluster in machines}
    priced = dict(prices or {})
    for name, price in priced.items():
        if name not in names:
            raise BadInput(
                f"a price is given for {name!r}, which is not among the clusters: {', '.join(sorted(names))}"
            )
        if not price > 0:
            raise BadInput(f"the price of {name} is {price}; pass a positive number for an hour of one device")
    if most_devices < 1:
        raise BadInput(f"most_devices={most_devices}; pass at least 1")
    wanted = Wanted(_step_limit_s(step_time, steps, within), steps, priced, most_devices)
    limit = options.get("memory_limit")
    made = asked("size", 1, "auto", None, {**options, "cluster": machines[0]})
    request = made.request
    traced, _ = trace_model(model, made.batch, request, made.samplewise)
    problem = problem_of(model, traced.graph, request)
    with uncollected():
        return size_on(
            problem,
            machines,
            wanted,
            memory_limit_bytes=parse_bytes(limit) if isinstance(limit, str) else limit,
            time_limit_s=request.time_limit_s,
            say=request.say,
        )


def _machine(cluster: str | Path | Cluster | MixedCluster) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, MixedCluster) or str(cluster) in mixed_presets():
        name = cluster.name if isinstance(cluster, MixedCluster) else cluster
        raise BadInput(
            f"cluster {name} is made of unequal machines; sizes are counted in machines of one kind: "
            f"{', '.join(presets())}, or a file of one"
        )
    try:
        return load_cluster(cluster)
    except ClusterError as error:
        raise BadInput(str(error)) from None


def _step_limit_s(step_time: float | str | None, steps: int | None, within: float | str | None) -> float | None:
    if steps is not None and steps < 1:
        raise BadInput(f"steps={steps}; pass at least 1")
    if step_time is not None and within is not None:
        raise BadInput("give the time of a step, or a number of steps and the time they may take, not both")
    if step_time is not None:
        return _seconds(step_time)
    if within is None:
        return None
    if steps is None:
        raise BadInput("a time for all steps needs their number: steps=")
    return _seconds(within) / steps


def _seconds(value: float | str) -> float:
    if isinstance(value, str):
        return parse_seconds(value)
    if not value > 0:
        raise BadInput(f"a time of {value} s; pass more than 0")
    return value


__all__ = ["explain", "size"]
