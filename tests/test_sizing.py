"""planner size: against a search of every size, the prices, the table and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from costmodels.hardware import Cluster, presets
from planner.errors import BadInput
from planner.report.sizing import SizeRow, Sizing, sizing_figures
from planner.sizes import parse_seconds
from planner.sizing import Wanted, size_on
from planner.solve.problem import Problem
from planner.solve.search import search
from tests.models import mlp
from tests.plan_examples import example_plan
from tests.search_cases import cluster, problem, traced
from tests.test_report import GOLDEN, text_of


@cache
def made() -> Problem:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    x = torch.empty(12, 128)
    return problem(traced(model, x, target=x, loss_fn=F.mse_loss), cluster(1))


def machine(name: str = "small", node: int = 4, memory_bytes: int = 10**9) -> Cluster:
    on = cluster(
        1, flops_per_s=1e9, memory_bytes_per_s=1e12, link_bytes_per_s=1e12, inter_bytes_per_s=1e12, latency_s=1e-8,
        launch_s=1e-8, gpus_per_node=node,
    )  # fmt: skip
    return replace(on, name=name, device=replace(on.device, memory_bytes=memory_bytes))


def step_s(on: Cluster, gpus: int) -> float:
    limit = on.device.memory_bytes
    return search(replace(made(), cluster=on.with_gpus(gpus), memory_limit_bytes=limit)).objective_s


def test_the_smallest_is_the_first_that_meets_the_limit() -> None:
    on = machine(node=2)
    limit_s = step_s(on, 6) * 1.0001
    found = size_on(made(), [on], Wanted(limit_s, most_devices=16))
    assert found.smallest is not None and found.smallest.devices == 6
    assert step_s(on, 4) > limit_s
    for row in found.rows:
        if row.plan is not None:
            assert row.plan.objective_s == step_s(on, row.devices)
            assert row.meets_limit == (row.plan.objective_s <= limit_s)
            assert row.device_hours == pytest.approx(row.devices * row.plan.objective_s * 1000 / 3600)
    refused = [row for row in found.rows if row.plan is None]
    assert all("the work alone takes" in row.refused and row.devices < 6 for row in refused) and refused


def test_the_cheapest_is_by_price_and_without_prices_by_hours() -> None:
    slow, fast = machine("slow"), machine("fast")
    fast = replace(fast, device=replace(fast.device, peak_flops_per_s={"float32": 1e10}))
    plain = size_on(made(), [slow, fast], Wanted(most_devices=2))
    assert plain.cheapest is not None and plain.cheapest.cluster == "fast" and plain.cheapest.price is None
    assert plain.smallest is not None and (plain.smallest.devices, plain.smallest.cluster) == (1, "fast")
    priced = size_on(made(), [slow, fast], Wanted(steps=3600, prices={"slow": 1.0, "fast": 100.0}, most_devices=2))
    cheapest = priced.cheapest
    assert cheapest is not None and cheapest.cluster == "slow" and cheapest.plan is not None
    assert cheapest.price == cheapest.device_hours == pytest.approx(cheapest.devices * cheapest.plan.objective_s)


def test_what_is_too_large_is_not_searched() -> None:
    states_bytes = 2 * 4 * 4 * 128 * 128
    on = machine(memory_bytes=states_bytes // 2)
    found = size_on(made(), [on], Wanted(most_devices=8))
    one = found.rows[0]
    assert one.plan is None and one.refused.startswith("weights and their state alone take 524 kB of 262 kB")
    assert found.smallest is not None and found.smallest.devices > 2
    tight = size_on(made(), [machine()], Wanted(most_devices=8), memory_limit_bytes=states_bytes // 2)
    assert [row.refused for row in tight.rows] == [row.refused for row in found.rows]


def test_no_size_may_do() -> None:
    found = size_on(made(), [machine()], Wanted(1e-12, most_devices=4))
    assert found.smallest is None and found.cheapest is None
    assert [row.devices for row in found.rows] == [1, 2, 4]
    assert "No size that was looked at meets the limit" in text_of(found)
    figures = sizing_figures(found)
    assert figures["smallest"] is None and len(figures["rows"]) == 3


def sizing() -> Sizing:
    plan = example_plan()
    faster = replace(plan, estimate=replace(plan.estimate, step_time_s=0.09))
    return Sizing(
        "gpt",
        64,
        0.2,
        1000,
        (
            SizeRow("a100", 4, 8, None, refused="2.00 GB of memory missing"),
            SizeRow("a100", 8, 8, plan, True, 0.402, 0.804),
            SizeRow("h100", 8, 8, faster, True, 0.2, None),
        ),
    )


def test_golden_table() -> None:
    assert text_of(sizing(), 100) == (GOLDEN / "sizing.txt").read_text(encoding="utf-8")


def test_the_data() -> None:
    figures = sizing_figures(sizing())
    assert json.loads(json.dumps(figures)) == figures
    assert figures["smallest"]["cluster"] == "h100"  # as many devices, and faster
    assert figures["cheapest"]["cluster"] == "a100"  # the only one with a price
    assert figures["rows"][0]["refused"] == "2.00 GB of memory missing"
    assert {"devices", "meets_limit", "device_hours", "price", "step_time_s"} <= set(figures["rows"][1])


def test_the_call() -> None:
    case = mlp()
    given = {"example_inputs": case.inputs, "loss_fn": F.mse_loss}
    found = planner.size(case.model, clusters=("l4", "dgx-h100"), prices={"l4": 0.8}, most_devices=2, **given)
    assert {row.cluster for row in found.rows} == {"l4", "dgx-h100"} and found.global_batch == 8
    assert found.cheapest is not None and found.cheapest.cluster == "l4"
    every = planner.size(case.model, most_devices=1, **given)
    assert tuple(row.cluster for row in every.rows) == presets()
    later = planner.size(case.model, clusters=("l4",), steps=10, within="1min", most_devices=1, **given)
    assert later.step_limit_s == 6.0 and later.rows[0].meets_limit
    for wrong, told in (
        ({"clusters": ("nothing",)}, "no cluster preset"),
        ({"prices": {"l5": 1.0}}, "is not among the clusters"),
        ({"clusters": ("l4",), "prices": {"l4": 0.0}}, "pass a positive number"),
        ({"step_time": "5 apples"}, "is not a time"),
        ({"step_time": 0.0}, "pass more than 0"),
        ({"within": "1h"}, "needs their number"),
        ({"steps": 0}, "pass at least 1"),
        ({"steps": 5, "within": "1h", "step_time": 1.0}, "not both"),
        ({"most_devices": 0}, "pass at least 1"),
    ):
        with pytest.raises(BadInput, match=told):
            planner.size(case.model, **given, **wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("0.5s", 0.5), (".5 s", 0.5), ("90min", 5400.0), ("12h", 43200.0), ("7d", 604800.0)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "-1s", "0s", "1e3s", "5 weeks", "infs"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="write for example 500ms"):
        parse_seconds(text)
