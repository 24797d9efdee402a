"""The search against brute force over every plan its space holds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from costmodels.hardware import Cluster, Device, Link
from examples import gpt
from planner.errors import Infeasible, OutOfTime
from planner.ir.graph import Graph
from planner.ir.mesh import Mesh
from planner.ir.plan import Estimate, Plan, Searched
from planner.ir.verify import verify_plan
from planner.sizes import format_bytes
from planner.solve import search as search_module
from planner.solve.configuration import Evaluator
from planner.solve.letters import whole_letters
from planner.solve.linear_program import NoSolution
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.solve.space import Configuration, Region, Space
from planner.strategies import plan_by_hand
from planner.trace import Batch, trace
from tests.models import gpt_tied
from tests.search_cases import cluster as made_up
from tests.search_cases import every_configuration, every_estimate, graph_of, traced
from tests.search_cases import problem as made_problem

GPUS, ROWS, WIDTH = 4, 8, 256


def small_graph() -> Graph:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH))
    return trace(model, Batch((torch.empty(ROWS, WIDTH),), {}, torch.empty(ROWS, 2 * WIDTH)), F.mse_loss).graph


def cluster(bandwidth: float) -> Cluster:
    device = Device("small", 10**9, {"float32": 1e12}, 1e11, 2e-6, 1.0)
    link = Link(bandwidth, 1e-6)
    return Cluster("small", device, GPUS, GPUS, link, link)


def every_plan(evaluator: Evaluator, configuration: Configuration) -> Iterator[Estimate]:
    """Every split and every choice of recomputation, under all variants of the strategies."""
    for variant in evaluator.variants(configuration):
        try:
            costs = evaluator.costs(configuration, evaluator.letters(configuration, variant))
        except NoSolution:
            continue
        yield from every_estimate(costs, configuration, evaluator.problem.memory_limit_bytes)


def entry_of(plan: Plan, configuration: Configuration) -> Searched:
    """What the record says about a configuration: its own entry, or that of the part that holds it."""
    names = {str(configuration), str(configuration.shape)}
    regions = (Region(configuration.mesh.tp), Region(configuration.mesh.tp, configuration.shape.mesh))
    found = [item for item in plan.searched if item.configuration in names | {str(region) for region in regions}]
    own = [item for item in found if item.configuration == str(configuration)]
    assert own or len(found) == 1, configuration
    return (own or found)[0]


# Ample memory; only with recomputation, ZeRO or cut weights; the same on a slow link.
@pytest.mark.parametrize("limit_bytes", (10**9, 4_200_000, 3_000_000))
@pytest.mark.parametrize("bandwidth", (1e11, 1e9))
def test_nothing_in_the_space_is_better(limit_bytes: int, bandwidth: float) -> None:
    problem = Problem("mlp", small_graph(), cluster(bandwidth), "adamw", "float32", limit_bytes)
    evaluator = Evaluator(problem)
    best: dict[str, float] = {}
    configurations = every_configuration(problem, evaluator.segments)
    for configuration in configurations:
        fitting = [e.step_time_s for e in every_plan(evaluator, configuration) if e.fits]
        if fitting:
            best[str(configuration)] = min(fitting)
    if not best:
        with pytest.raises(Infeasible, match="does not fit"):
            search(problem)
        return
    plan = search(problem)
    verify_plan(plan, problem.graph)
    assert plan.objective_s == pytest.approx(min(best.values()), rel=1e-9)
    assert plan.bound_s <= plan.objective_s * (1 + 1e-9)
    for configuration in configurations:
        entry = entry_of(plan, configuration)
        if str(configuration) in best:
            assert entry.outcome != "infeasible", configuration
            assert entry.bound_s <= best[str(configuration)] * (1 + 1e-9), f"the bound of {configuration} is not one"


def test_a_plan_is_the_same_every_time() -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 10**9)
    assert search(problem).to_json() == search(problem).to_json()


def test_what_does_not_fit_says_by_how_much() -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 700_000)
    with pytest.raises(Infeasible, match=r"does not fit .* is .*B over"):
        search(problem)


def test_ample_memory_and_a_large_batch_want_data_parallelism() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    batch = Batch((torch.empty(65536, 64),), {}, torch.empty(65536, 64))
    graph = trace(model, batch, F.mse_loss).graph
    plan = search(Problem("mlp", graph, cluster(1e12), "adamw", "float32", 10**9))
    assert plan.mesh.pp == 1 and plan.gap == 0.0
    assert plan.mesh.dp == GPUS or all(row.tp.startswith(("d", "b", "R")) for row in plan.layouts)


# --- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_bytes", (10**9, 3_000_000))
def test_every_configuration_is_in_the_record_once(limit_bytes: int) -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", limit_bytes)
    plan = search(problem)
    for configuration in every_configuration(problem, len(plan.segments)):
        entry_of(plan, configuration)
    names = [item.configuration for item in plan.searched]
    assert len(set(names)) == len(names)
    assert [item.outcome for item in plan.searched].count("best") == 1
    assert plan.searched[0].outcome == "best" and plan.searched[0].objective_s == plan.objective_s
    for item in plan.searched:
        assert item.outcome != "open"
        if item.outcome == "pruned":
            assert item.bound_s >= plan.objective_s * (1 - 1e-9)
        if item.outcome == "solved":
            assert item.objective_s is not None and item.objective_s >= plan.objective_s * (1 - 1e-9)
        if item.outcome == "infeasible":
            assert item.reason


def test_the_space() -> None:
    found = list(Space(made_up(4), 8, 3))
    assert len(set(found)) == len(found)
    assert {str(c.mesh) for c in found} == {"tp4", "dp2.tp2", "dp4", "pp2.tp2", "pp2.dp2"}  # 3 segments: no pp4
    assert {c.micro_batches for c in found if c.mesh.dp == 2} == {1, 2, 4}
    for c in found:
        assert c.zero == 0 or c.mesh.dp > 1
        assert c.schedule == "gpipe" or c.micro_batches >= c.mesh.pp or c.mesh.pp > 1
        assert c.mesh.pp > 1 or c.schedule == "1f1b"
        assert c.stages <= 3
    assert list(Space(made_up(1), 3, 1)) == [Configuration(Mesh(), m, 0, "1f1b") for m in (1, 3)]
    assert not list(Space(made_up(1), 8, 0))


def test_orders_that_differ_in_links_are_told_apart() -> None:
    one_node, two_nodes = Space(made_up(8), 8, 4), Space(made_up(8, gpus_per_node=4), 8, 4)
    mesh = Mesh(2, 2, 2)
    assert one_node.orders(mesh) == (mesh,)
    assert {str(m) for m in two_nodes.orders(mesh)} == {
        "pp2.dp2.tp2", "dp2.pp2.tp2", "pp2.tp2.dp2", "tp2.pp2.dp2", "dp2.tp2.pp2", "tp2.dp2.pp2"
    }  # fmt: skip
    assert {str(m) for m in two_nodes.orders(Mesh(dp=4, tp=2))} == {"dp4.tp2", "tp2.dp4"}


def test_on_one_stage_more_micro_batches_need_less_memory() -> None:
    """They run one after the other, forward and backward, as the runtime does."""
    evaluator = Evaluator(Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 10**9))
    peaks = []
    for configuration in (
        c for c in every_configuration(evaluator.problem, evaluator.segments) if str(c.mesh) == "tp4"
    ):
        letters = whole_letters(evaluator.split(1, configuration.micro_batches).graph)
        plan = evaluator.build_plan(configuration, letters, ((0, 4),), ("none",) * 4, "x")
        peaks.append(plan.estimate.stages[0].memory.activations_bytes)
    assert peaks == [peaks[0], peaks[0] // 2, peaks[0] // 4, peaks[0] // 8]


# --- limits of time ---------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_when_time_runs_out_the_best_so_far_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 3_000_000)
    whole = search(problem)
    outcomes = set()
    for seconds in (0, 1, 4, 8, 16, 32, 64, 10_000):
        monkeypatch.setattr(search_module, "time", Clock())
        try:
            plan = search(problem, time_limit_s=seconds)
        except OutOfTime as error:
            assert "time_limit" in str(error)
            outcomes.add("none")
            continue
        verify_plan(plan, problem.graph)
        assert plan.bound_s <= whole.objective_s * (1 + 1e-9)
        assert plan.objective_s >= whole.objective_s * (1 - 1e-9)
        outcomes.add("open" if any(item.outcome == "open" for item in plan.searched) else "whole")
    assert outcomes == {"none", "open", "whole"}


def test_an_interrupt_gives_the_best_so_far_or_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 10**9)
    whole, real, calls = search(problem), Evaluator.rank_costs, itertools.count()

    def interrupted_at(number: int) -> Callable[..., object]:
        def costs(self: Evaluator, *arguments: object) -> object:
            if next(calls) == number:
                raise KeyboardInterrupt
            return real(self, *arguments)  # type: ignore[arg-type]

        return costs

    monkeypatch.setattr(Evaluator, "rank_costs", interrupted_at(0))
    with pytest.raises(KeyboardInterrupt):
        search(problem)
    calls = itertools.count()
    monkeypatch.setattr(Evaluator, "rank_costs", interrupted_at(12))
    plan = search(problem)
    verify_plan(plan, problem.graph)
    assert any(item.outcome == "open" for item in plan.searched)
    assert plan.bound_s <= whole.objective_s <= plan.objective_s


def test_progress_counts_up() -> None:
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", 10**9)
    seen: list[tuple[int, int]] = []
    plan = search(problem, progress=lambda what, done, total: seen.append((done, total)))
    assert seen and seen == sorted(seen) and seen[-1][0] == len(plan.searched) <= seen[-1][1]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_the_missing_bytes_are_those_of_the_plan_that_comes_nearest() -> None:
    limit = 700_000
    problem = Problem("mlp", small_graph(), cluster(1e10), "adamw", "float32", limit)
    evaluator = Evaluator(problem)
    peaks = [
        estimate.peak_memory_bytes
        for configuration in every_configuration(problem, evaluator.segments)
        for estimate in every_plan(evaluator, configuration)
    ]
    with pytest.raises(Infeasible) as refused:
        search(problem)
    message = str(refused.value)
    assert f"is {format_bytes(min(peaks) - limit)} over" in message
    shortage = refused.value.shortage
    assert shortage is not None
    assert (shortage.missing_bytes, shortage.memory_limit_bytes) == (min(peaks) - limit, limit)


# --- byte for byte ----------------------------------------------------------------------------------------------------


def gpt_plan() -> Plan:
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    graph = traced(gpt.GPT(96, 16, 32, 3, 4), tokens, target=tokens, loss_fn=gpt.loss_fn)
    return search(made_problem(graph, made_up(4, kind="cpu"), 300_000))


def test_another_process_writes_the_same_bytes() -> None:
    """With other hashes of texts, and so another order of every set."""
    own = hash("meshwright")
    seed = next(s for s in ("1", "2") if s != os.environ.get("PYTHONHASHSEED"))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent.parent)}
    script = "from tests.test_search import gpt_plan; print(hash('meshwright'), gpt_plan().to_json())"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    other, text = done.stdout.split(" ", 1)
    assert int(other) != own
    plan = gpt_plan()
    assert text == plan.to_json() + "\n"
    assert plan.searched and plan.estimate.fits


# --- known answers ----------------------------------------------------------------------------------------------------


def test_a_gpt_with_fast_links_and_much_memory_is_data_parallel() -> None:
    on = made_up(4, flops_per_s=1e11, link_bytes_per_s=1e12, latency_s=1e-7, launch_s=1e-7)
    plan = search(made_problem(graph_of(gpt_tied), on), time_limit_s=60.0)
    assert plan.mesh == Mesh(dp=4) and not [item for item in plan.searched if item.outcome == "open"]
    assert plan.micro_batches == 1 and set(plan.recompute) == {"none"}


@pytest.mark.parametrize("link_bytes_per_s", [1e12, 1e8])
def test_little_memory_shards_the_weights(link_bytes_per_s: float) -> None:
    """Weights, gradients and moments are four times the weights; the limit holds less than that on one device."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    graph = traced(model, torch.empty(8, 256), target=torch.empty(8, 256), loss_fn=F.mse_loss)
    states = 4 * 4 * 256 * 256 * 4
    plan = search(made_problem(graph, made_up(4, link_bytes_per_s=link_bytes_per_s), states // 2))
    held = plan.estimate.stages[0].memory
    assert plan.zero == 3 or plan.mesh.pp > 1 or plan.mesh.tp > 1
    assert held.weights_bytes + held.gradients_bytes + held.optimizer_bytes <= states // 2
    ample = search(made_problem(graph, made_up(4, link_bytes_per_s=link_bytes_per_s)))
    assert ample.objective_s <= plan.objective_s


def test_one_row_gains_nothing_from_stages() -> None:
    """A batch of one has one micro-batch: stages take turns, and a step is no faster than on one device."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    graph = traced(model, torch.empty(1, 512), target=torch.empty(1, 512), loss_fn=F.mse_loss)
    on = made_up(4, flops_per_s=1e9, link_bytes_per_s=1e12, latency_s=1e-8, launch_s=1e-8)
    problem = made_problem(graph, on)
    alone = search(replace(problem, cluster=on.with_gpus(1)))
    plan = search(problem)
    assert plan.mesh == Mesh(tp=4)
    assert plan.objective_s < 0.3 * alone.objective_s
    piped = plan_by_hand(Evaluator(problem), "pp4")
    work = alone.estimate.stages[0]
    assert piped.objective_s >= work.forward_s + work.backward_s
    assert piped.estimate.bubble_s > 0.5 * piped.objective_s
