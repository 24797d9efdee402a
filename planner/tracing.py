"""From a model and a request to its graph, and to the problem that is searched.

trace_model(model, batch, request)      the graph of one step
retracing(model, batch, request)        the same with another batch, or in another precision
problem_of(model, graph, request)       what the search is asked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from costmodels.hardware import Cluster
from costmodels.mixed import memory_bytes_of
from planner.discover import with_discovered_rules
from planner.errors import BadInput
from planner.garbage import uncollected
from planner.inputs import (
    cast,
    example_batch,
    guess_target,
    moved_to,
    on_device_of,
    paths_of,
    takes_target,
)
from planner.ir.graph import Graph
from planner.options import PRECISIONS, Request, cast_model, dtype_to_trace
from planner.solve.problem import Problem
from planner.trace import Batch, Traced, trace
from runtime.measure import kept_at, measured_cluster
from runtime.tables import TABLES, read_tables


def retracing(
    model: torch.nn.Module, batch: tuple[Any, ...], request: Request, samplewise: bool | Sequence[str]
) -> Callable[[int | None, str | None], Graph]:
    """Traces the model again with another number of rows, or in another precision."""

    def again(rows: int | None, precision: str | None) -> Graph:
        inputs, kwargs, target, given = batch
        other = request if precision is None else replace(request, dtype=PRECISIONS[precision])
        return trace_model(model, (inputs, kwargs, target, given if rows is None else rows), other, samplewise)[0].graph

    return again


def trace_model(
    model: torch.nn.Module, batch: tuple[Any, ...], request: Request, samplewise: bool | Sequence[str] = ()
) -> tuple[Traced, Batch]:
    """The graph of one step, and the example batch it was traced with, its values kept."""
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    inputs, kwargs, target, rows = batch
    if rows is None and request.plan is not None:
        rows = request.plan.global_batch
    example = example_batch(model, inputs, kwargs, target, rows, request.not_batched)
    fixed = paths_of(model, example, request.not_batched)
    return trace_batch(model, example, request, rows, samplewise, fixed)


def trace_batch(
    model: torch.nn.Module,
    example: Batch,
    request: Request,
    rows: int | None,
    samplewise: bool | Sequence[str],
    not_batched: tuple[str, ...],
) -> tuple[Traced, Batch]:
    dtype, weights = dtype_to_trace(model, request), None
    if dtype is not None:
        model, weights, example = cast_model(model, dtype), model, cast(example, dtype)
    stand_ins, real = on_device_of(model, example), moved_to(model, example)
    if request.loss_fn is not None and example.target is None and takes_target(request.loss_fn):
        guessed = guess_target(model, stand_ins, request.loss_fn, real)
        example, stand_ins = replace(example, target=guessed), replace(stand_ins, target=guessed)
    request.say("tracing the model")
    with uncollected():
        traced = trace(model, stand_ins, request.loss_fn, rows, samplewise, real, weights, not_batched)
        return replace(traced, graph=with_discovered_rules(traced.graph)), example


def problem_of(model: torch.nn.Module, graph: Graph, request: Request) -> Problem:
    cluster = request.cluster
    if cluster is None:
        cluster = this_machine(request)
    limit = request.memory_limit_bytes
    return Problem(
        name=type(model).__name__,
        graph=graph,
        cluster=cluster,
        optimizer=request.optimizer,
        precision=_main_dtype(graph) if request.dtype is None else str(request.dtype).removeprefix("torch."),
        memory_limit_bytes=limit if limit is not None else memory_bytes_of(cluster),
        seed=request.seed,
    )


def this_machine(request: Request) -> Cluster:
    """This machine, measured, with the tables that ``planner measure`` made of it."""
    cluster = measured_cluster(request.gpus, progress=request.say)
    return replace(cluster, measured=read_tables(kept_at(request.gpus).with_suffix(TABLES)))


def _main_dtype(graph: Graph) -> str:
    """The dtype most parameters have."""
    counts: dict[str, int] = {}
    for leaf in graph.leaves_of("parameter"):
        counts[leaf.value.dtype] = counts.get(leaf.value.dtype, 0) + leaf.value.numel
    return max(counts, key=lambda dtype: counts[dtype])
