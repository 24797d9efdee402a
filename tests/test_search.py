"""The search against brute force over every plan its space holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from costmodels.hardware import Cluster, Device, Link
from planner.errors import Infeasible
from planner.ir.graph import Graph
from planner.ir.plan import Estimate
from planner.ir.verify import verify_plan
from planner.schedules import in_flight
from planner.segment_cost import stage_estimate
from planner.simulate import estimate_step
from planner.solve.configuration import FAST, LEAN, Configuration, Evaluator, Problem
from planner.solve.search import configurations, search
from planner.trace import Batch, trace

GPUS, ROWS, WIDTH = 4, 8, 256


def small_graph() -> Graph:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH))
    return trace(model, Batch((torch.empty(ROWS, WIDTH),), {}, torch.empty(ROWS, 2 * WIDTH)), F.mse_loss).graph


def cluster(bandwidth: float) -> Cluster:
    device = Device("small", 10**9, {"float32": 1e12}, 1e11, 2e-6, 1.0)
    link = Link(bandwidth, 1e-6)
    return Cluster("small", device, GPUS, GPUS, link, link)


def splits(segments: int, pp: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in itertools.combinations(range(1, segments), pp - 1):
        edges = (0, *inner, segments)
        yield tuple(itertools.pairwise(edges))


def every_plan(evaluator: Evaluator, configuration: Configuration) -> Iterator[Estimate]:
    """Every split and every choice of segments to recompute, under both variants of the strategies."""
    limit = evaluator.problem.memory_limit_bytes
    mesh, count = configuration.mesh, evaluator.segments
    for variant in (FAST, LEAN) if mesh.tp > 1 else (FAST,):
        costs = evaluator.costs(configuration, evaluator.letters(configuration, variant))
        for stages in splits(count, mesh.pp):
            for recompute in itertools.product((False, True), repeat=count):
                parts = [
                    stage_estimate(
                        costs[first:end],
                        recompute[first:end],
                        in_flight(configuration.schedule, mesh.pp, configuration.micro_batches, number),
                        number == mesh.pp - 1,
                    )
                    for number, (first, end) in enumerate(stages)
                ]
                yield estimate_step(parts, configuration.schedule, configuration.micro_batches, limit)


# Ample memory; only with recomputation, ZeRO or cut weights; the same on a slow link.
@pytest.mark.parametrize("limit_bytes", (10**9, 4_200_000, 3_000_000))
@pytest.mark.parametrize("bandwidth", (1e11, 1e9))
def test_nothing_in_the_space_is_better(limit_bytes: int, bandwidth: float) -> None:
    problem = Problem("mlp", small_graph(), cluster(bandwidth), "adamw", "float32", limit_bytes)
    evaluator = Evaluator(problem)
    best: dict[str, float] = {}
    for configuration in configurations(GPUS, ROWS, evaluator.segments):
        fitting = [e.step_time_s for e in every_plan(evaluator, configuration) if e.fits]
        if fitting:
            best[str(configuration)] = min(fitting)
    if not best:
        with pytest.raises(Infeasible, match="does not fit"):
            search(problem, suggest=False)
        return
    plan = search(problem)
    verify_plan(plan, problem.graph)
    assert plan.objective_s == pytest.approx(min(best.values()), rel=1e-9)
    assert plan.bound_s <= plan.objective_s * (1 + 1e-9)
    seen = {item.configuration: item for item in plan.searched}
    assert set(seen) == {str(c) for c in configurations(GPUS, ROWS, evaluator.segments)}
    for name, objective_s in best.items():
        assert seen[name].outcome != "infeasible", name
        assert seen[name].bound_s <= objective_s * (1 + 1e-9), f"the bound of {name} is not one"


def test_a_plan_is_the_same_every_time() -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 10**9)
    assert search(problem).to_json() == search(problem).to_json()


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 700_000)
    with pytest.raises(Infeasible, match=r"does not fit .* is .*B over .*What would fit: \d+ devices"):
        search(problem)


def test_ample_memory_and_a_large_batch_want_data_parallelism() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    batch = Batch((torch.empty(65536, 64),), {}, torch.empty(65536, 64))
    graph = trace(model, batch, F.mse_loss).graph
    plan = search(Problem("mlp", graph, cluster(1e12), "adamw", "float32", 10**9))
    assert plan.mesh.pp == 1 and plan.gap == 0.0
    assert plan.mesh.dp == GPUS or all(row.tp.startswith(("d", "b", "R")) for row in plan.layouts)
