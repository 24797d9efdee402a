"""What the tests of the search share: a made-up cluster, and the best split of a chain by trying every one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from costmodels.hardware import Cluster, Device, Link
from costmodels.mixed import Machine, MixedCluster
from planner.ir.graph import Graph
from planner.ir.plan import Estimate
from planner.schedules import ZERO_BUBBLE, held
from planner.segment_cost import RankCosts, SegmentCost, of_each_rank, stage_estimates
from planner.simulate import estimate_step
from planner.solve.problem import Problem
from planner.solve.space import Configuration, Space
from planner.trace import Batch, trace

MB = 10**6
AMPLE = 10**12


def cluster(
    gpus: int = 4,
    *,
    flops_per_s: float = 1e12,
    memory_bytes_per_s: float = 1e11,
    link_bytes_per_s: float = 1e10,
    latency_s: float = 1e-6,
    launch_s: float = 1e-6,
    gpus_per_node: int = 64,
    inter_bytes_per_s: float = 1e9,
    kind: str = "gpu",
    serial_share: float = 0.5,
) -> Cluster:
    """Round numbers, nothing measured."""
    device = Device(
        "made-up",
        AMPLE,
        {"float32": flops_per_s},
        memory_bytes_per_s,
        launch_s,
        1.0,
        kind,
        serial_share=serial_share,
    )
    intra, inter = Link(link_bytes_per_s, latency_s), Link(inter_bytes_per_s, 10 * latency_s)
    return Cluster("made-up", device, gpus, gpus_per_node, intra, inter)


def traced(model: torch.nn.Module, *inputs: torch.Tensor, target: Any = None, loss_fn: Any = None) -> Graph:
    return trace(model, Batch(inputs, {}, target), loss_fn).graph


@cache
def graph_of(make: Callable[..., Any]) -> Graph:
    """The graph of one of tests.models."""
    case = make()
    return trace(case.model, Batch(case.inputs, case.kwargs, case.target), case.loss_fn).graph


def mixed(*groups: Cluster, inter_bytes_per_s: float = 1e9, latency_s: float = 1e-5) -> MixedCluster:
    """Groups named a, b, c, joined by a link."""
    named = (replace(group, name=name) for name, group in zip("abcd", groups, strict=False))
    return MixedCluster("made-up mix", tuple(named), Link(inter_bytes_per_s, latency_s))


def problem(graph: Graph, on: Machine, memory_limit_bytes: int = AMPLE, optimizer: str = "adamw") -> Problem:
    return Problem("model", graph, on, optimizer, "fp32", memory_limit_bytes)


def tight_problem(on: Cluster | None = None) -> Problem:
    """Three layers of 64 x 64 with activations, 64 rows, and less memory than a whole copy with all of them takes."""
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    x = torch.empty(64, 64)
    graph = traced(torch.nn.Sequential(*layers), x, target=x, loss_fn=torch.nn.functional.mse_loss)
    return problem(graph, on or cluster(4, flops_per_s=1e10), 110_000)


@dataclass(frozen=True)
class Tried:
    """Every figure of one choice of stages and recomputation."""

    stages: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...]
    step_time_s: float
    memory_bytes: tuple[int, ...]


def splits(segments: int, pp: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for cuts in itertools.combinations(range(1, segments), pp - 1):
        edges = (0, *cuts, segments)
        yield tuple(zip(edges, edges[1:], strict=False))


def every_choice(segments: Sequence[SegmentCost], pp: int, micro_batches: int, schedule: str) -> Iterator[Tried]:
    """All splits x all ways to recompute each segment."""
    for stages in splits(len(segments), pp):
        for recompute in itertools.product(*(s.recomputations for s in segments)):
            estimates = stage_estimates(segments, stages, recompute, held(schedule, pp, micro_batches))
            step_time_s = estimate_step(estimates, schedule, micro_batches, 0).step_time_s
            yield Tried(stages, recompute, step_time_s, tuple(e.memory.total_bytes for e in estimates))


def best_step_s(segments: Sequence[SegmentCost], pp: int, micro_batches: int, schedule: str, limit_bytes: int) -> float:
    """The least step time of all choices that fit; infinite when none does."""
    tried = every_choice(segments, pp, micro_batches, schedule)
    return min((x.step_time_s for x in tried if max(x.memory_bytes) <= limit_bytes), default=math.inf)


def every_estimate(
    costs: RankCosts, configuration: Configuration, limit_bytes: int | Sequence[int]
) -> Iterator[Estimate]:
    """Every split and every choice of recomputation; with several stages a rank, evenly filled and recomputed in one way.

    ``costs``, ``limit_bytes``: one a pipeline rank, where they differ.
    """
    pp, m = configuration.mesh.pp, configuration.micro_batches
    schedule, chunks = configuration.schedule, configuration.chunks
    most = held(schedule, pp, m, chunks)
    words = ("none",) if schedule == ZERO_BUBBLE else ("none", "selective", "full")
    (chain, *_) = of_each_rank(costs, pp)
    for stages in splits(len(chain), pp * chunks):
        sizes = [end - first for first, end in stages]
        if chunks > 1 and max(sizes) - min(sizes) > 1:
            continue
        for recompute in itertools.product(words, repeat=len(chain)):
            if chunks > 1 and any(len(set(recompute[first:end])) > 1 for first, end in stages):
                continue
            if all(word in cost.recomputations for word, cost in zip(recompute, chain, strict=True)):
                parts = stage_estimates(costs, stages, recompute, most)
                yield estimate_step(parts, schedule, m, limit_bytes, chunks)


def every_configuration(problem: Problem, segments: int) -> list[Configuration]:
    return list(Space(problem.cluster, problem.graph.batch_size, segments))
