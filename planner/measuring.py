"""The public calls that time this machine at the shapes a model needs, and correct its prices by runs.

measure(model, gpus=...) -> Measurement     operators, messages and the optimizer's step; kept for every later plan
    calibrate("trace.json") -> Calibration      prices corrected by training steps that ran
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from costmodels.hardware import Cluster
from costmodels.measured import MEASURED, MeasuredTables, operator_price
from planner.errors import BadInput
from planner.garbage import uncollected
from planner.options import asked, check_gpus
from planner.report.measurement import Calibration, Measurement
from planner.solve.configuration import Evaluator
from planner.step_trace import StepTrace, corrected, parts
from planner.timings import calls_of
from planner.tracing import problem_of, trace_model
from runtime.launch import rank_threads
from runtime.measure import THIS_MACHINE, kept_at, this_device, write_text
from runtime.tables import TABLES, Wanted, fill_tables, priced_with, read_tables


def measure(model: torch.nn.Module, gpus: int | None = None, *, refresh: bool = False, **options: Any) -> Measurement:
    """Time what training ``model`` on ``gpus`` local ranks is made of, all ranks at work at once, and keep it.

    Operators forward and backward at the local shapes of every strategy a search tries, messages of all kinds and sizes
    on every size of a mesh axis, and the optimizer's step. The times are kept in the user's cache folder by device, version of
    torch, ranks and threads; what is there already is not timed again (unless ``refresh``), and an interrupted call keeps
    what it has. From then on plans for this machine (cluster "auto") are priced by them. ``options``: the other arguments of
    ``auto_parallelize``.

    Raises BadInput, TraceError, or RankFailed when a rank ends early.
    """
    made = asked("measure", gpus, "auto", None, options)
    request = made.request
    if request.cluster is not None:
        raise BadInput("only this machine can be measured; leave cluster out")
    check_gpus(request.gpus)
    traced, _ = trace_model(model, made.batch, request, made.samplewise)
    problem = problem_of(model, traced.graph, request)
    kind, _ = this_device(request.gpus)
    path = kept_at(request.gpus).with_suffix(TABLES)
    before = problem.cluster.measured or _empty(request.gpus)
    request.say("listing what the strategies call")
    with uncollected():
        calls = calls_of(Evaluator(problem))
    wanted = Wanted(tuple((c.call, c.source, c.below) for c in calls), request.optimizer, refresh)
    say = request.progress or (lambda *_: None)
    tables, refused = fill_tables(path, before, wanted, kind, say)
    assert isinstance(problem.cluster, Cluster)
    device = problem.cluster.device
    hits = sum(operator_price(c.call, device, tables)[1] == MEASURED for c in calls)
    new = sum(len(getattr(tables, x)) - len(getattr(before, x)) for x in ("operators", "collectives", "updates"))
    return Measurement(tables, path, len(calls), hits, new, tuple(sorted(refused.items())))


def calibrate(trace: str | Path) -> Calibration:
    """Correct the prices for this machine by training steps that ran on it, as ``train(trace=)`` wrote them.

    Times of forward, backward, communication and update are held against the plan's estimate; what they differ by is kept
    beside the measured times, and multiplies every price of later plans for as many ranks. Several traces count alike.

    Raises BadInput where the file is no trace, or one of another machine or another kind of plan.
    """
    found = StepTrace.load(trace)
    gpus = found.plan.mesh.size
    path = kept_at(gpus).with_suffix(TABLES)
    machine, _ = priced_with(gpus)
    if found.machine != machine:
        raise BadInput(
            f"{trace} is of another machine, version of torch or number of threads: {found.machine}, here {machine}; trace here"
        )
    if not found.plan.cluster.startswith(THIS_MACHINE):
        raise BadInput(f"the plan in {trace} is priced for {found.plan.cluster}; trace one made for cluster auto")
    tables = read_tables(path) or _empty(gpus)
    corrections = corrected(found, tables.corrections)
    write_text(path, replace(tables, corrections=corrections).to_json())
    return Calibration(parts(found), tables.corrections, corrections, path)


def _empty(gpus: int) -> MeasuredTables:
    kind, name = this_device(gpus)
    return MeasuredTables(name, f"torch {torch.__version__}", gpus, rank_threads(gpus, kind))
