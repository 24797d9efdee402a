"""planner explain: each answer against a search of its own, known answers, reports and data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.errors import BadInput, Infeasible
from planner.explaining import explain, family_of, faster_device, faster_link, link_of, more_devices, other_machines
from planner.ir.graph import Graph
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan
from planner.pricing_again import configuration_of, price_again
from planner.report.difference import difference, difference_figures, difference_words, same_decisions
from planner.report.explanation import Explanation, Family, explanation_figures, grown
from planner.report.parts import PARTS, step_parts
from planner.solve.configuration import Evaluator
from planner.solve.search import search
from planner.strategies import plan_by_hand
from tests.models import gpt_tied, mlp
from tests.plan_examples import example_plan, interleaved_plan
from tests.search_cases import cluster, graph_of, problem, tight_problem, traced
from tests.test_report import GOLDEN, text_of


def square_layers(count: int, width: int, rows: int) -> Graph:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    return traced(model, torch.empty(rows, width), target=torch.empty(rows, width), loss_fn=F.mse_loss)


@cache
def explained() -> Explanation:
    return explain(tight_problem())


def families(found: Explanation) -> dict[str, Family]:
    return {row.name: row for row in found.families}


# --- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "zero", "family"),
    [
        (Mesh(), 0, "one device"),
        (Mesh(dp=4), 0, "data parallel"),
        (Mesh(dp=4), 3, "data parallel, ZeRO"),
        (Mesh(tp=4), 0, "tensor"),
        (Mesh(pp=4), 0, "pipeline"),
        (Mesh(dp=2, tp=2), 3, "data + tensor"),
        (Mesh(pp=2, dp=2), 0, "data + pipeline"),
        (Mesh(pp=2, tp=2), 0, "tensor + pipeline"),
        (Mesh(2, 2, 2), 0, "data + tensor + pipeline"),
    ],
)
def test_every_configuration_has_one_family(mesh: Mesh, zero: int, family: str) -> None:
    assert family_of(mesh, zero) == family


def test_the_families_are_searched_each_and_the_best_of_them_is_the_plan() -> None:
    found = explained()
    plans = [row.plan for row in found.families if row.plan is not None]
    assert min(plan.objective_s for plan in plans) == found.best.objective_s
    for row in found.families:
        if row.plan is not None:
            assert family_of(row.plan.mesh, row.plan.zero) == row.name and row.plan.estimate.fits
            assert row.plan.objective_s >= found.best.objective_s
    assert len({row.name for row in found.families}) == len(found.families)
    best = families(found)["data + tensor"].plan
    alone = search(
        tight_problem(), within=lambda c: c.mesh == Mesh(dp=2, tp=2)
    )  # the family has other orders of the axes too
    assert best is not None and best.bound_s <= alone.objective_s
    assert replace(best, bound_s=0.0, searched=()) == replace(alone, bound_s=0.0, searched=())
    refused = families(found)["data parallel"]
    assert refused.plan is None and refused.refused.endswith("kB too much on its fullest device")
    assert "data + tensor + pipeline" not in families(found)  # 4 devices make no three axes


def test_what_grows_is_named_with_its_seconds() -> None:
    fast, slow = example_plan(), example_plan()
    stages = tuple(replace(stage, forward_s=stage.forward_s + 0.001) for stage in slow.estimate.stages)
    estimate = replace(slow.estimate, stages=stages, step_time_s=slow.objective_s + 0.004)
    slow = replace(slow, estimate=replace(estimate, bubble_s=estimate.bubble_s + 0.004))
    assert grown(slow, fast) == "bubble +4.00 ms"
    assert grown(fast, slow) == "" and grown(fast, fast) == ""


@pytest.mark.parametrize("make", [example_plan, interleaved_plan, lambda: explained().best])
def test_the_parts_of_a_step_sum_to_it(make: Callable[[], Plan]) -> None:
    plan = make()
    parts = step_parts(plan)
    assert tuple(parts) == PARTS and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(plan.objective_s, rel=1e-9)


# --- what binds -------------------------------------------------------------------------------------------------------


def test_a_plan_priced_again_is_the_same_plan() -> None:
    found = problem(graph_of(gpt_tied), cluster(4))
    evaluator = Evaluator(found)
    for strategy in ("ddp", "dp2.tp2 zero=3 recompute=full", "pp2.tp2 mb=4", "pp2.dp2 mb=2 schedule=gpipe"):
        plan = plan_by_hand(evaluator, strategy)
        assert price_again(plan, Evaluator(found)) == plan


def test_a_free_link_saves_what_waits_for_it() -> None:
    """Two nodes of two: tp inside, dp between. A link that takes no time leaves only what the other link costs."""
    on = cluster(4, flops_per_s=1e12, gpus_per_node=2, launch_s=1e-8, link_bytes_per_s=1e10, inter_bytes_per_s=1e9)
    found = problem(square_layers(4, 256, 64), on)
    plan = plan_by_hand(Evaluator(found), "dp2.tp2")
    binding = explain(found, plan, changes=False).binding
    assert binding.parts_s == step_parts(plan)
    assert {row.name: (row.axis, row.link) for row in binding.traffic} == {
        "operators' results": ("tp", "inside nodes"),
        "gradients": ("dp", "between nodes"),
    }
    for link, row in (("inside nodes", "operators' results"), ("between nodes", "gradients")):
        seconds = next(traffic.step_s for traffic in binding.traffic if traffic.name == row)
        assert 0.4 * seconds < binding.saved_if_free_s[link] <= seconds * (1 + 1e-9)
    limit = plan.estimate.memory_limit_bytes
    assert binding.left_bytes == tuple(limit - memory.total_bytes for memory in plan.estimate.devices)


@pytest.mark.parametrize(
    ("axis", "node", "link"), [("tp", 2, "inside nodes"), ("dp", 2, "between nodes"), ("dp", 4, "inside nodes"),
                               ("pp", 4, "between nodes"), ("tp", 1, "between nodes")]
)  # fmt: skip
def test_which_link_an_axis_uses(axis: str, node: int, link: str) -> None:
    assert link_of(Mesh(2, 2, 2), axis, (cluster(8, gpus_per_node=node),)) == link


@pytest.mark.parametrize(("axis", "link"), [("tp", "inside nodes"), ("dp", "between nodes"), ("pp", "between groups")])
def test_which_link_an_axis_uses_on_unequal_machines(axis: str, link: str) -> None:
    group = cluster(4, gpus_per_node=2)
    assert link_of(Mesh(2, 2, 2), axis, (group, group)) == link


def test_zero_3_pays_for_its_weights() -> None:
    found = problem(square_layers(4, 256, 8), cluster(4, link_bytes_per_s=1e9))
    plan = plan_by_hand(Evaluator(found), "fsdp")
    traffic = {row.name: row.step_s for row in explain(found, plan, changes=False).binding.traffic}
    free = step_parts(plan_by_hand(Evaluator(found), "ddp"))["inside layers"]
    assert traffic["weights (ZeRO-3)"] == pytest.approx(step_parts(plan)["inside layers"] - free)


# --- what would change it ---------------------------------------------------------------------------------------------


def test_more_memory_pays_where_memory_binds_and_nowhere_else() -> None:
    tight = {row.name: row.plan for row in explained().changes}
    more = tight["27.5 kB more memory a device"]
    assert more is not None and more.objective_s < 0.98 * explained().best.objective_s
    assert more == search(replace(tight_problem(), memory_limit_bytes=137_500))
    ample = explain(problem(square_layers(2, 64, 8), cluster(2)))
    same = ample.changes[0]
    assert same.name == "1.00 GB more memory a device" and same.plan is not None
    assert same.plan.objective_s == ample.best.objective_s


def test_a_faster_link_pays_where_links_are_slow() -> None:
    """What travels over a link of 0.1 GB/s is much of the step, over 1000 GB/s nothing of it."""
    graph = square_layers(4, 256, 4096)
    for link_bytes_per_s, least, most in ((1e8, 1.05, 2.0), (1e12, 1.0, 1.02)):
        found = explain(problem(graph, cluster(2, flops_per_s=1e12, launch_s=1e-8, link_bytes_per_s=link_bytes_per_s)))
        twice = next(row.plan for row in found.changes if row.name == "twice the bandwidth inside nodes")
        assert twice is not None
        assert least <= found.best.objective_s / twice.objective_s <= most


def test_the_machines_that_are_tried() -> None:
    on = cluster(8, gpus_per_node=4)
    names = [name for name, _ in other_machines(tight_problem(on))]
    assert names == [
        "27.5 kB more memory a device",
        "1 more device: 9",
        "4 more devices: 12",
        "twice the bandwidth inside nodes",
        "twice the bandwidth between nodes",
        "devices twice as fast",
    ]
    assert [name for name, _ in other_machines(tight_problem(cluster(1)))] == [
        "27.5 kB more memory a device",
        "1 more device: 2",
        "devices twice as fast",
    ]
    assert more_devices(cluster(6, gpus_per_node=8)) == (7, 12)
    link = replace(on.intra, peer_bandwidth_bytes_per_s=3.0)
    assert faster_link(link).towards(10**9) == 2 * link.towards(10**9)
    assert faster_link(link).latency_s == link.latency_s
    assert faster_device(on.device).peak("float32") == 2 * on.device.peak("float32")


# --- operators --------------------------------------------------------------------------------------------------------


def test_forcing_another_letter_costs_what_its_own_search_says() -> None:
    """Two large products on one row: by columns, then by rows; anything else costs more."""
    width = 256
    model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))
    x = torch.empty(1, 64, width)
    found = problem(traced(model, x, target=x, loss_fn=F.mse_loss), cluster(4, link_bytes_per_s=1e11))
    why = explain(found, operators=("0", "linear_1"), changes=False)
    assert why.best.mesh == Mesh(tp=4)
    assert [(reason.module, reason.strategy) for reason in why.operators] == [("0", "o"), ("2", "i")]
    assert 0.8 < sum(reason.share for reason in why.operators) < 1
    for reason in why.operators:
        assert {row.strategy for row in reason.others} >= {"R"} and reason.others
        for row in reason.others:
            assert row.plan is not None and configuration_of(row.plan) == configuration_of(why.best)
            assert row.plan.objective_s > why.best.objective_s
            assert next(x.tp for x in row.plan.layouts if x.name == reason.name) == row.strategy
    whole = next(row for row in why.operators[0].others if row.strategy == "R")
    name = why.operators[0].name
    forced = Evaluator(found, lambda node, strategy: node.name != name or strategy.name == "R")
    assert whole.plan == search(found, evaluator=forced, within=lambda c: c.mesh == Mesh(tp=4))


def test_operators_that_are_not_there_or_not_cut() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    graph = traced(model, torch.empty(8, 64), target=torch.empty(8, 64), loss_fn=F.mse_loss)
    found = problem(graph, cluster(2))
    cut = plan_by_hand(Evaluator(found), "tp")
    with pytest.raises(BadInput, match=r"no operator or module 'nothing'; the costliest are linear"):
        explain(found, cut, ("nothing",), changes=False)
    by_torch_name = explain(found, cut, ("layer_norm",), changes=False)
    assert {reason.op for reason in by_torch_name.operators} == {"aten.layer_norm.default"}
    assert {reason.module for reason in by_torch_name.operators} == {"1"}
    whole = explain(found, plan_by_hand(Evaluator(found), "ddp"), ("linear",), changes=False)
    assert not whole.operators and "whose tp is 1" in whole.note


def test_a_plan_that_does_not_fit_is_told_what_would_make_it() -> None:
    found = replace(tight_problem(), memory_limit_bytes=130_000)
    plan = plan_by_hand(Evaluator(found), "ddp")
    assert not plan.estimate.fits
    why = explain(found, plan, changes=False)
    ways = {way.kind: way for way in why.ways_out}
    sharded = ways["ZeRO"].plan
    assert sharded is not None and sharded.estimate.fits and sharded.zero > 0 and sharded.mesh == plan.mesh
    assert ways["the solver's plan"].plan == why.best
    assert "What would make it fit" in text_of(why)


# --- two plans --------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_plans_is_in_words() -> None:
    first, second = example_plan(), interleaved_plan()
    assert text_of(difference(first, second)) == (GOLDEN / "difference.txt").read_text(encoding="utf-8")


def test_a_plan_does_not_differ_from_itself() -> None:
    plan = example_plan()
    same = difference(plan, replace(plan, notes=("a note",), searched=()))
    assert not same.decisions and not same.operators
    assert all(row.first == row.second for row in same.figures)
    assert difference_words(same) == "Both take the same time."
    assert same_decisions(plan, replace(plan, bound_s=0.0)) and not same_decisions(plan, interleaved_plan())


def test_operators_cut_otherwise_are_listed_on_axes_that_both_plans_have() -> None:
    plan = example_plan()
    layouts = tuple(replace(row, tp="R") if row.name == "linear_1" else row for row in plan.layouts)
    changed = difference(plan, replace(plan, layouts=layouts))
    assert [(row.name, row.first, row.second) for row in changed.operators] == [
        ("linear in layers.0.down, on tp", "input features, summed", "whole")
    ]
    figures = difference_figures(changed)
    assert json.loads(json.dumps(figures)) == figures and not figures["same"]


# --- report, data, call -----------------------------------------------------------------------------------------------


def test_the_report_has_every_part_and_the_data_its_schema() -> None:
    found = explained()
    shown = text_of(found, 100)
    for heading in ("The best plan of each family", "What binds", "What would change it (solved again)"):
        assert heading in shown
    figures = explanation_figures(found)
    assert json.loads(json.dumps(figures))["families"] == figures["families"]
    assert set(figures) == {
        "model", "plan", "best", "note", "ways_out", "families", "binding", "changes", "operators",
    }  # fmt: skip
    assert set(figures["binding"]) == {"left_bytes", "parts_s", "traffic", "saved_if_free_s"}
    for row in (*figures["families"], *figures["changes"]):
        if row["configuration"] is None:
            assert row["refused"]
        else:
            assert row["step_time_s"] >= row["bound_s"] > 0
            assert row["peak_memory_bytes"] <= row["memory_limit_bytes"]


def test_the_call_explains_a_model_or_a_plan_made_before(tmp_path: Path) -> None:
    case = mlp()
    given = {"example_inputs": case.inputs, "loss_fn": F.mse_loss, "cluster": "dgx-a100-80gb"}
    why = planner.explain(case.model, 2, changes=False, **given)
    assert why.plan == why.best and why.plan.mesh.size == 2
    by_hand = planner.explain(case.model, 2, strategy="tp", changes=False, **given)
    assert by_hand.plan.mesh == Mesh(tp=2) and by_hand.best == why.best
    by_hand.plan.save(tmp_path / "plan.json")
    again = planner.explain(case.model, plan=tmp_path / "plan.json", changes=False, **given)
    assert again.plan == by_hand.plan
    with pytest.raises(TypeError, match="unexpected argument 'measure'"):
        planner.explain(case.model, 2, measure=True)
    with pytest.raises(Infeasible, match="What would fit"):
        planner.explain(case.model, 2, memory_limit=50_000, **given)
