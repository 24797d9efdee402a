"""Plans for clusters of unequal machines: where ranks lie, what prices them, and answers that are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import planner
from costmodels.collectives import collective_time_s
from costmodels.hardware import Cluster
from costmodels.mixed import MixedCluster
from costmodels.views import Views
from planner.errors import BadInput, Infeasible
from planner.explaining import explain
from planner.ir.graph import Graph
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan
from planner.ir.verify import verify_plan
from planner.placement import orders_of_groups, places
from planner.pricing_again import price_again
from planner.prove_file import prove_file
from planner.prove_model import prove_against
from planner.report import plan_figures, plan_text
from planner.sizes import format_bytes
from planner.solve.bounds import pipeline_bound_s
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.solve.space import Configuration, Space
from planner.strategies import even_stages, plan_by_hand
from planner.ways_out import ways_out
from tests.search_cases import cluster, mixed, problem, traced

FAST = cluster(2, flops_per_s=4e11, memory_bytes_per_s=1e13, launch_s=0.0, latency_s=1e-8)
SLOW = replace(FAST, device=replace(FAST.device, peak_flops_per_s={"float32": 1e11}))
MIX = mixed(FAST, SLOW, inter_bytes_per_s=1e10, latency_s=1e-8)


def layers(count: int = 20, width: int = 64, rows: int = 64) -> Graph:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    x = torch.empty(rows, width)
    return traced(model, x, target=x, loss_fn=torch.nn.functional.mse_loss)


def with_memory(group: Cluster, memory_bytes: int) -> Cluster:
    return replace(group, device=replace(group.device, memory_bytes=memory_bytes))


def lengths(plan: Plan) -> list[int]:
    return [end - first for first, end in plan.stages]


# --- where ranks lie --------------------------------------------------------------------------------------------------


def test_pipeline_ranks_lie_on_groups_in_order() -> None:
    on = mixed(replace(FAST, gpus=4), replace(SLOW, gpus=4))
    assert [p.words for p in places(on, (), Mesh(4, 2)) or ()] == ["a", "a", "b", "b"]
    assert [p.words for p in places(on, ("b", "a"), Mesh(4, 2)) or ()] == ["b", "b", "a", "a"]
    assert [p.words for p in places(on, (), Mesh(1, 8)) or ()] == ["a+b"]
    assert [p.words for p in places(on, (), Mesh(2, 2, 2, ("dp", "pp", "tp"))) or ()] == ["a+b", "a+b"]
    assert places(on, (), Mesh(2, 2, 2, ("tp", "pp", "dp"))) is None  # single operators over both groups
    assert orders_of_groups(on, Mesh(2, 4)) == ((), ("b", "a"))
    assert orders_of_groups(on, Mesh(1, 8)) == ((),)
    assert orders_of_groups(on, Mesh(tp=8)) == ()
    odd = mixed(replace(FAST, gpus=3), replace(SLOW, gpus=5))
    assert [p.words for p in places(odd, (), Mesh(4, 2)) or ()] == ["a", "a+b", "b", "b"]
    assert [tp.tp for tp in Space(odd, 8, 8).regions()] == [1]


def test_a_rank_is_priced_by_its_group_or_by_the_slowest_of_several() -> None:
    inside, across = (places(MIX, (), mesh) or () for mesh in (Mesh(2, 2), Mesh(1, 4)))
    assert [place.cluster for place in inside] == list(MIX.groups)
    (both,) = across
    assert isinstance(both.cluster, Views) and both.cluster.slowest
    assert {(view.gpus, view.device.peak("float32")) for view in both.cluster.clusters} == {(4, 4e11), (4, 1e11)}  # type: ignore[union-attr]


def test_memory_is_that_of_the_smallest_device() -> None:
    on = mixed(with_memory(FAST, 300), with_memory(SLOW, 200))
    assert [place.memory_bytes for place in places(on, (), Mesh(2, 2)) or ()] == [300, 200]
    assert [place.memory_bytes for place in places(on, (), Mesh(1, 4)) or ()] == [200]
    evaluator = Evaluator(problem(layers(2), on, 250))
    assert evaluator.problem.limits_bytes(Configuration(Mesh(2, 2), 2, 0, "1f1b")) == (250, 200)
    assert evaluator.problem.limits_bytes(Configuration(Mesh(2, 2), 2, 0, "1f1b", groups=("b", "a"))) == (200, 250)


def test_between_groups_tensors_take_the_link_that_joins_them() -> None:
    a, b = replace(FAST, gpus=4, gpus_per_node=4, nics_per_node=4), replace(SLOW, gpus=4, gpus_per_node=4)
    on = mixed(a, b, inter_bytes_per_s=1e8, latency_s=1e-3)
    first, second, third, last = places(on, (), Mesh(4, 2)) or ()
    assert first.onward.send_s(1e6) == collective_time_s("send", 1e6, 2, 2, on.groups[0])
    assert third.onward.send_s(1e6) == collective_time_s("send", 1e6, 2, 2, on.groups[1])
    assert second.onward.send_s(1e6) == pytest.approx(
        1e-3 + 1e6 / (1e8 / 2)
    )  # two senders share the one card of b's node
    assert last.onward == replace(second.onward, across=((on.groups[1], on.groups[0]),))
    assert first.to_the_end.add_s(1e6) == pytest.approx(2e-3 + 1e6 / (1e8 / 2))


# --- known answers ----------------------------------------------------------------------------------------------------


def test_a_slow_group_gets_fewer_layers() -> None:
    """20 equal layers, one group four times as fast: 16 and 4 of them keep both busy."""
    plan = plan_by_hand(Evaluator(problem(layers(), MIX)), "pp2.dp2 mb=16")
    assert plan.placement == ("a", "b") and lengths(plan) == [16, 4]
    turned = plan_by_hand(Evaluator(problem(layers(), MIX)), "pp2.dp2 mb=16 groups=b+a")
    assert turned.placement == ("b", "a") and lengths(turned) == [4, 16]
    assert turned.configuration.endswith("groups=b+a")


def test_the_search_gives_the_slow_group_fewer_layers() -> None:
    found = search(problem(layers(rows=256), MIX), within=lambda c: c.mesh.pp == 4 and c.schedule == "1f1b")
    fast, slow = (
        [n for n, where in zip(lengths(found), found.placement, strict=True) if where == group] for group in "ab"
    )
    assert min(fast) > max(slow) and sum(fast) + sum(slow) == 20
    assert found.gap < 1e-9
    rigid = plan_by_hand(Evaluator(problem(layers(rows=256), MIX)), f"pp4 mb={found.micro_batches} split=layers")
    assert rigid.objective_s > 1.5 * found.objective_s


def test_equal_groups_cost_what_one_cluster_does() -> None:
    """One stage a group, each on a node of its own, joined by the link between nodes: the plan and every figure are the same."""
    graph = layers()
    whole = replace(FAST, gpus=4, gpus_per_node=2, name="whole")
    on = MixedCluster("made-up mix", tuple(replace(whole, gpus=2, name=name) for name in "ab"), whole.inter)
    assert on.merged() == replace(whole, name="made-up mix")

    def within(configuration: Configuration) -> bool:
        return configuration.mesh.pp <= 2 and configuration.mesh.order[:1] != ("tp",) and configuration.mesh.tp < 4

    mine, theirs = (search(problem(graph, cluster), within=within) for cluster in (on, whole))
    assert mine.estimate == theirs.estimate and mine.stages == theirs.stages
    assert mine.bound_s == pytest.approx(theirs.bound_s, rel=1e-12)
    for text in ("dp4 zero=3", "pp2.dp2 mb=8 zero=2", "pp2.tp2 mb=4", "dp2.tp2 zero=1"):
        one, other = (plan_by_hand(Evaluator(problem(graph, cluster)), text) for cluster in (on, whole))
        assert one.estimate == other.estimate, text


def test_a_group_of_little_memory_gets_stages_that_fit() -> None:
    """Of the states of 20 equal layers the small group can hold no more than 3, though it is as fast."""
    graph = layers(rows=8)
    layer_bytes = 4 * 64 * 64 * 4  # weight, gradient, two moments
    small = with_memory(replace(FAST, gpus=1), 3 * layer_bytes + 40_000)
    on = mixed(replace(FAST, gpus=1), small, inter_bytes_per_s=1e10)
    plan = search(problem(graph, on), within=lambda c: c.mesh.pp == 2 and c.chunks == 1)
    by_place = dict(zip(plan.placement, lengths(plan), strict=True))
    assert by_place["b"] == 3 and by_place["a"] == 17
    assert plan.estimate.fits and plan.estimate.limits_bytes[plan.placement.index("b")] == small.device.memory_bytes
    alike = search(problem(graph, mixed(replace(FAST, gpus=1), replace(FAST, gpus=1), inter_bytes_per_s=1e10)))
    assert max(lengths(alike)) < 17


def test_what_does_not_fit_is_said_of_the_group() -> None:
    on = mixed(with_memory(replace(FAST, gpus=1), 1000), with_memory(replace(FAST, gpus=1), 2000))
    with pytest.raises(Infeasible, match=r"does not fit on 2 x made-up mix with .* on (a|b): the nearest plan"):
        search(problem(layers(4), on))


def test_data_parallel_over_unequal_groups_waits_for_the_slowest() -> None:
    graph = layers()
    all_slow = replace(SLOW, gpus=4, gpus_per_node=2, inter=MIX.inter)
    halves = mixed(replace(FAST, gpus_per_node=2, inter=MIX.inter), replace(SLOW, gpus_per_node=2, inter=MIX.inter))
    halves = replace(halves, inter=MIX.inter)
    mine, theirs = (plan_by_hand(Evaluator(problem(graph, on)), "ddp").objective_s for on in (halves, all_slow))
    assert mine == pytest.approx(theirs, rel=1e-12)


# --- strategies, plans and proofs -------------------------------------------------------------------------------------


def test_strategies_that_do_not_fit_the_groups_are_refused() -> None:
    evaluator, uniform = (Evaluator(problem(layers(4), on)) for on in (MIX, replace(FAST, gpus=4)))
    with pytest.raises(BadInput, match=r"tp4 would cut single operators over devices of several groups \(2 a \+ 2 b\)"):
        plan_by_hand(evaluator, "tp")
    with pytest.raises(BadInput, match=r"groups=a\+c does not fit the cluster; name each of a, b once"):
        plan_by_hand(evaluator, "pp2.dp2 groups=a+c")
    with pytest.raises(BadInput, match=r"groups=a\+b does not fit the cluster; made-up has no groups: leave it out"):
        plan_by_hand(uniform, "pp2.dp2 groups=a+b")
    assert plan_by_hand(evaluator, "pp2.dp2 groups=a+b").groups == ()


@pytest.fixture(scope="module")
def proven() -> tuple[Problem, Plan]:
    """Stages as good on b as on a would be: the order of groups matters."""
    head = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)), torch.nn.Linear(32, 512))
    graph = traced(head, torch.empty(16, 32), target=torch.empty(16, 512), loss_fn=torch.nn.functional.mse_loss)
    found = problem(graph, mixed(SLOW, FAST, inter_bytes_per_s=1e10))
    return found, search(found)


def test_a_plan_is_read_back_priced_again_and_proven(proven: tuple[Problem, Plan]) -> None:
    found, plan = proven
    verify_plan(plan, found.graph)
    assert Plan.from_json(plan.to_json()) == plan
    assert price_again(plan, Evaluator(found)).estimate == plan.estimate
    assert len(plan.placement) == plan.mesh.pp
    proof = prove_against(plan, found)
    assert proof.holds, proof
    missing = tuple(entry for entry in plan.searched if "groups=" not in entry.configuration)
    assert len(missing) < len(plan.searched)
    assert not prove_file(replace(plan, searched=missing), found.cluster).holds


def test_a_wrong_placement_is_no_legal_plan(proven: tuple[Problem, Plan]) -> None:
    _, plan = proven
    for wrong in (replace(plan, placement=("a",) * (plan.mesh.pp + 1)), replace(plan, placement=(), groups=("b", "a"))):
        assert not prove_file(wrong).holds


def test_even_stages_by_the_speed_of_each_rank() -> None:
    evaluator = Evaluator(problem(layers(12), MIX))
    at = Configuration(Mesh(2, 2), 2, 0, "1f1b")
    costs = evaluator.rank_costs(at, evaluator.letters(at))
    stages = even_stages(costs, ("none",) * 12, 2)
    slowest = max(
        sum(c.forward_s + c.backward_s for c in costs[rank][first:end]) for rank, (first, end) in enumerate(stages)
    )
    for cut in range(1, 12):
        parts = [
            sum(c.forward_s + c.backward_s for c in costs[r][i:j]) for r, (i, j) in enumerate(pairwise((0, cut, 12)))
        ]
        assert slowest <= max(parts)


def test_the_pipeline_bound_of_unequal_stages_is_reached() -> None:
    """Stages that each take all the step leaves them; and the bound of equal ones where rates are 1."""
    assert pipeline_bound_s(6.0, 3, 4, 1.0, (1.0,) * 3) == pytest.approx(pipeline_bound_s(6.0, 3, 4))
    rates, m, step = (1.0, 0.25, 1.0), 4, 1.0
    for slow_takes in (0.0, 1.0):  # of what is left to it
        left, done = step, 0.0
        for rate in rates:
            time_s = left / m * (slow_takes if rate < 1 else 1.0)
            done, left = done + rate * time_s, left - time_s
        assert pipeline_bound_s(done, 3, m, 1.0, rates) <= step * (1 + 1e-12)


# --- what people read -------------------------------------------------------------------------------------------------


def test_the_report_says_which_stage_lies_on_which_machines() -> None:
    on = mixed(with_memory(replace(FAST, gpus=4), 8 * 10**6), with_memory(replace(SLOW, gpus=2), 4 * 10**6))
    plan = plan_by_hand(Evaluator(problem(layers(), on)), "pp3.dp2 mb=8 groups=b+a")
    text = plan_text(plan)
    assert "machines   stage 0 on b, stages 1 to 2 on a" in text
    assert "Memory of one device, limit 4.00 MB or 8.00 MB" in text
    assert [line.split()[2] for line in text.split("Stages\n")[1].splitlines()[2:5]] == ["b", "a", "a"]
    figures = plan_figures(plan)
    assert figures["placement"] == ["b", "a", "a"] == [stage["on"] for stage in figures["stages"]]
    assert [stage["memory_limit_bytes"] for stage in figures["stages"]] == [4 * 10**6, 8 * 10**6, 8 * 10**6]


def test_the_report_says_on_which_machines_memory_is_short() -> None:
    on = mixed(with_memory(replace(FAST, gpus=1), 10**6), with_memory(replace(FAST, gpus=1), 300_000))
    plan = plan_by_hand(Evaluator(problem(layers(), on)), "pp2 mb=8 split=layers")
    assert not plan.estimate.fits
    lacks = plan.estimate.devices[1].total_bytes - 300_000
    assert f"stage 1 lacks {format_bytes(lacks)} on each device" in plan_text(plan)
    assert plan.estimate.devices[0].total_bytes < 10**6


@pytest.mark.parametrize("strategy", [None, "pp2.dp2 mb=4"])
def test_why_this_plan_on_unequal_machines(proven: tuple[Problem, Plan], strategy: str | None) -> None:
    found, _ = proven
    shown = None if strategy is None else plan_by_hand(Evaluator(found), strategy)
    told = explain(found, shown, changes=strategy is None)
    assert {"inside nodes", "between groups"} <= told.binding.saved_if_free_s.keys()
    assert all(left > 0 for left in told.binding.left_bytes)
    if strategy is None:
        names = [change.name for change in told.changes]
        assert names[1:] == [
            "4 more devices: 8",
            "twice the bandwidth inside nodes",
            "twice the bandwidth between groups",
            "devices twice as fast",
        ]
        for change in told.changes[2:]:
            assert change.plan is not None and change.plan.objective_s <= told.best.objective_s * (1 + 1e-9)


def test_a_little_more_memory_is_more_on_every_device() -> None:
    on = mixed(with_memory(FAST, 3000), with_memory(SLOW, 2000))
    more = problem(layers(2), on, 2500).with_more_memory(500)
    assert more.limits_bytes(Configuration(Mesh(2, 2), 2, 0, "1f1b")) == (3000, 2500)
    assert more.mean_limit_bytes == 2750


def test_ways_out_of_a_mixed_cluster() -> None:
    layer_bytes = 4 * 64 * 64 * 4
    sizes = (12 * layer_bytes, 4 * layer_bytes)
    on = mixed(*(with_memory(replace(FAST, gpus=1), size) for size in sizes), inter_bytes_per_s=1e10)
    found = problem(layers(rows=8), on)
    with pytest.raises(Infeasible) as refused:
        search(found)
    ways = {way.kind: way for way in ways_out(found, refused.value.shortage)}
    assert ways["more devices"].plan is not None and ways["more devices"].plan.mesh.size == 4
    assert ways["more memory"].plan is not None and ways["more memory"].plan.estimate.fits


def test_sizes_are_of_one_kind_of_machine() -> None:
    for machine in ("dgx-a100-v100", MIX):
        with pytest.raises(BadInput, match="is made of unequal machines; sizes are counted in machines of one kind"):
            planner.size(torch.nn.Linear(2, 2), clusters=(machine,), example_inputs=torch.empty(2, 2))  # type: ignore[arg-type]
