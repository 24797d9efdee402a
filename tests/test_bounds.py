"""Lower bounds against any strategies, splits and recomputation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.layout import REPLICATED, WHOLE
from planner.ir.mesh import Mesh
from planner.schedules import IN_ROUNDS
from planner.segments import node_classes
from planner.shard import SHARED
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.simulate import StageTimes, lower_bound_s
from planner.solve.bounds import Bounds, pipeline_bound_s
from planner.solve.configuration import FAST, LEAN, Evaluator
from planner.solve.letters import Letters
from planner.solve.space import Configuration, Region, Space
from tests.models import gpt_tied, mlp
from tests.search_cases import AMPLE, every_configuration, every_estimate, graph_of, traced
from tests.search_cases import cluster as made_up
from tests.search_cases import problem as made_problem


def any_letters(evaluator: Evaluator, configuration: Configuration, draw: random.Random) -> Letters:
    """Random strategies on tp, equal for operators of one class, and leaves stored as a reader may ask."""
    graph = evaluator.split(configuration.mesh.dp, configuration.micro_batches).graph
    k, cuts, classes = configuration.mesh.tp, find_cuts(graph), node_classes(graph)
    chosen: dict[object, Strategy] = {}
    for node in graph.nodes:
        found = strategies(rule_of(node, graph.values), node, graph.values, k, cuts[node.name])
        if node.segment == SHARED:
            found = tuple(s for s in found if s.name == "R")
        chosen.setdefault(classes[node.name], draw.choice(found))
    by_name = {node.name: chosen[classes[node.name]] for node in graph.nodes}
    leaves = {}
    for leaf in graph.leaves:
        pairs = [WHOLE] if leaf.value.differentiable else [WHOLE.without_gradient()]
        if leaf.kind == "parameter":
            asked = (
                pair
                for node in graph.consumers[leaf.name]
                for name, pair in zip(node.operands, by_name[node.name].operands, strict=True)
                if name == leaf.name and (pair.is_shard or pair == REPLICATED)
            )
            pairs += sorted(set(asked), key=str)
        leaves[leaf.name] = draw.choice(pairs)
    return Letters(by_name, leaves, 0.0, 0.0)


@pytest.mark.parametrize(("make", "configurations"), [(mlp, 20), (gpt_tied, 2)])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_bound_of_a_configuration_holds_for_any_strategies(
    make: Callable[..., object], configurations: int, kind: str
) -> None:
    """Not only for those the search looks at: random strategies, every split and recomputation, several limits."""
    graph, draw = graph_of(make), random.Random(0)
    on = made_up(4, kind=kind, gpus_per_node=2, launch_s=1e-8, latency_s=1e-7, flops_per_s=1e11)
    ample = Evaluator(made_problem(graph, on))
    compared = 0
    everything = every_configuration(ample.problem, ample.segments)
    in_rounds = [c for c in everything if c.schedule in IN_ROUNDS]
    of_one_stage = [c for c in everything if c.schedule not in IN_ROUNDS]
    for configuration in draw.sample(of_one_stage, configurations) + draw.sample(in_rounds, configurations):
        costs = ample.costs(configuration, any_letters(ample, configuration, draw))
        every = list(every_estimate(costs, configuration, AMPLE))
        sizes = sorted(x.peak_memory_bytes for x in every)
        for limit in (AMPLE, sizes[len(sizes) // 2], sizes[len(sizes) // 8], sizes[0]):
            evaluator = Evaluator(made_problem(graph, on, limit))
            bounds = Bounds(evaluator, Space(on, graph.batch_size, evaluator.segments))
            least_s = min(x.step_time_s for x in every if x.peak_memory_bytes <= limit)
            parts = (
                Region(configuration.mesh.tp),
                Region(configuration.mesh.tp, configuration.shape.mesh),
                configuration.shape,
                configuration.shape,
                configuration,
                configuration,
                configuration,
            )
            for sharpness, part in zip((0, 0, 0, 1, 0, 1, 2), parts, strict=True):
                bound_s = bounds.of(part, sharpness)
                assert bound_s <= least_s * (1 + 1e-9), (str(part), str(configuration), limit)
            compared += 1
    assert compared == 8 * configurations


@pytest.mark.parametrize("make", [mlp, gpt_tied])
def test_no_strategies_take_less_than_the_bound_of_the_fast_ones(make: Callable[..., object]) -> None:
    """Neither the lean ones nor random ones: work of all micro-batches, and what is paid once a step."""
    graph, draw = graph_of(make), random.Random(1)
    evaluator = Evaluator(made_problem(graph, made_up(4, kind="gpu", launch_s=1e-8, latency_s=1e-7, flops_per_s=1e11)))
    compared = 0
    for mesh in (Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(pp=2, tp=2)):
        configuration = Configuration(mesh, 2, 0, "1f1b")
        fast, lean = (evaluator.letters(configuration, variant) for variant in (FAST, LEAN))
        times = [
            sum(
                2 * (c.forward_s + c.backward_s) + c.gradient_sync_per_step_s + c.optimizer_per_step_s
                for c in evaluator.costs(configuration, letters)
            )
            for letters in (fast, lean, *(any_letters(evaluator, configuration, draw) for _ in range(10)))
        ]
        assert 0 < evaluator.least_s(mesh.tp, mesh.dp, 2) <= min(times) * (1 + 1e-9)
        compared += len(times)
    assert compared == 36


@pytest.mark.parametrize("make", [mlp, gpt_tied])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("launch_s", [1e-6, 0.0])
def test_many_small_runs_cost_no_less_than_one(make: Callable[..., object], tp: int, launch_s: float) -> None:
    """What makes the bound of a region one: prices are subadditive in the rows, and no ZeRO stage updates less than a share."""
    graph = graph_of(make)
    evaluator = Evaluator(made_problem(graph, made_up(8, gpus_per_node=4, launch_s=launch_s, memory_bytes_per_s=1e9)))
    whole_s = evaluator.least_s(tp, 1, 1)
    for dp, m in ((1, 2), (1, 4), (2, 1), (2, 2)):
        assert whole_s <= dp * evaluator.least_s(tp, dp, m) * (1 + 1e-9), (dp, m)


def test_a_region_is_not_bounded_by_its_deepest_pipeline() -> None:
    """Four rows and four segments: the deepest pipeline fills longest, others of the region may be faster."""
    on = made_up(4, flops_per_s=1e8, launch_s=0.0, latency_s=0.0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    x = torch.empty(4, 16)
    graph = traced(layers, x, target=x, loss_fn=torch.nn.functional.mse_loss)
    evaluator = Evaluator(made_problem(graph, on))
    space = Space(on, graph.batch_size, evaluator.segments)
    bounds = Bounds(evaluator, space)
    deepest, *others = (bounds.of(region) for region in space.narrower(Region(1)))
    assert others and min(others) < 0.9 * deepest
    assert bounds.of(Region(1)) <= min(others)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_bound_of_a_region_holds_where_dp_shares_out_the_update(zero: int) -> None:
    """Few rows, slow memory and fast links: the update takes most of the step."""
    on = made_up(4, launch_s=0.0, latency_s=0.0, memory_bytes_per_s=1e8, link_bytes_per_s=1e12)
    evaluator = Evaluator(made_problem(graph_of(mlp), on))
    configuration = Configuration(Mesh(dp=2, tp=2), 1, zero, "1f1b")
    costs = evaluator.costs(configuration, evaluator.letters(configuration))
    found_s = min(x.step_time_s for x in every_estimate(costs, configuration, AMPLE))
    region = Region(2, Mesh(dp=2, tp=2))
    assert Bounds(evaluator, Space(on, 8, evaluator.segments)).of(region) <= found_s * (1 + 1e-9)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 12))
def test_the_pipeline_bound_is_below_the_bound_of_any_split(times: list[float], micro_batches: int) -> None:
    least_s = pipeline_bound_s(sum(times), len(times), micro_batches)
    assert least_s <= lower_bound_s([StageTimes(t, 0.0) for t in times], micro_batches) * (1 + 1e-9)


def test_the_pipeline_bound_is_reached() -> None:
    """By stages that get shorter by 1 - 1/m each."""
    times = [StageTimes(0.75**i, 0.0) for i in range(3)]
    assert lower_bound_s(times, 4) == pytest.approx(pipeline_bound_s(1 + 0.75 + 0.75**2, 3, 4))
    assert pipeline_bound_s(6.0, 1, 5) == 30.0
    assert pipeline_bound_s(6.0, 3, 1) == 6.0
