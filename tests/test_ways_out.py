"""Where nothing fits: each way out against searches of its own, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import Infeasible, Shortage
from planner.ir.graph import Graph
from planner.report.ways_out import WayOut, filling, ways_out_figures, ways_out_text
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.strategies import plan_by_hand
from planner.ways_out import infeasible_with_ways_out, least, least_states_bytes, ways_out, ways_out_by_hand
from tests.plan_examples import example_plan
from tests.search_cases import AMPLE, cluster, problem, traced

WIDTH, LAYERS, ROWS = 64, 4, 16
STATES = 4 * 4 * LAYERS * WIDTH * WIDTH  # bytes of weights, gradients and two moments in float32


def layers(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Graph:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    x = torch.empty(rows, WIDTH, dtype=dtype)
    return traced(model, x, target=x, loss_fn=F.mse_loss)


def again(rows: int | None, precision: str | None) -> Graph:
    return layers(rows or ROWS, torch.float32 if precision is None else getattr(torch, precision))


def made(limit_bytes: int, gpus: int = 2) -> Problem:
    found = problem(layers(), cluster(gpus), limit_bytes)
    return replace(found, precision="float32")


def refusal(found: Problem) -> Infeasible:
    with pytest.raises(Infeasible) as refused:
        search(found)
    return refused.value


def fits(found: Problem) -> bool:
    try:
        return search(found).estimate.fits
    except Infeasible:
        return False


def by_kind(ways: tuple[WayOut, ...]) -> dict[str, WayOut]:
    return {way.kind: way for way in ways}


def test_the_least_of_each_kind_is_found_by_solving() -> None:
    found = made(STATES // 4)
    error = refusal(found)
    ways = by_kind(ways_out(found, error.shortage, again))
    assert set(ways) == {"more memory", "more devices", "smaller batch", "lower precision"}

    more = ways["more memory"].plan
    assert more is not None and error.shortage is not None
    limit = more.estimate.memory_limit_bytes
    assert limit == found.memory_limit_bytes + error.shortage.missing_bytes
    assert more.estimate.peak_memory_bytes <= limit
    assert not fits(replace(found, memory_limit_bytes=limit - 1))

    devices = ways["more devices"].plan
    assert devices is not None
    sizes = [n for n in range(3, devices.mesh.size) if fits(replace(found, cluster=cluster(n)))]
    assert sizes == [] and fits(replace(found, cluster=cluster(devices.mesh.size)))

    half = ways["lower precision"].plan
    halved = replace(found, graph=again(None, "bfloat16"), precision="bfloat16")
    assert (half is not None) == fits(halved)


def test_a_smaller_batch_helps_where_activations_are_what_is_too_much() -> None:
    """BatchNorm couples the rows: no micro-batches, so what a device keeps grows with the batch."""

    def graph(rows: int | None, precision: str | None = None) -> Graph:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
        )
        x, y = torch.empty(rows or 64, 3, 8, 8), torch.empty(rows or 64, 4)
        return traced(model, x, target=y, loss_fn=F.mse_loss)

    whole = replace(problem(graph(None), cluster(1)), precision="int8")  # nothing lower than that
    limit = search(whole).estimate.peak_memory_bytes // 3
    tight = replace(whole, memory_limit_bytes=limit)
    ways = by_kind(ways_out(tight, refusal(tight).shortage, graph))
    assert "lower precision" not in ways
    smaller = ways["smaller batch"].plan
    assert smaller is not None and smaller.estimate.fits
    rows = smaller.global_batch
    assert rows in (1, 2, 4, 8, 16, 32) and ways["smaller batch"].change == f"{rows} samples instead of 64"
    assert not fits(replace(tight, graph=graph(2 * rows)))


def test_what_no_change_helps_is_told_for_each_kind() -> None:
    found = made(1000)
    ways = by_kind(ways_out(found, Shortage(10**6, "no such configuration", 0, 1000), again))
    assert not any(way.plan for way in ways.values())
    assert ways["more memory"].refused == ways["lower precision"].refused == "none fits"
    assert ways["more devices"].refused == "none up to 256 devices fits"
    assert ways["smaller batch"].refused == "not even a batch of 1 fits"
    assert by_kind(ways_out(found, None, None)).keys() == {"more devices"}


def test_when_time_is_up_what_was_found_comes_back() -> None:
    found = made(STATES // 4)
    ways = ways_out(found, refusal(found).shortage, again, time_limit_s=-1.0)
    assert [way.refused for way in ways] == ["not tried: out of time"] * 4


def test_an_interrupt_ends_the_looking() -> None:
    found = made(STATES // 4)
    said: list[str] = []

    def say(what: str) -> None:
        said.append(what)
        if what.startswith("solving on"):
            raise KeyboardInterrupt

    ways = ways_out(found, refusal(found).shortage, again, say)
    assert [way.kind for way in ways] == ["more memory"]
    assert said[-1].startswith("interrupted")


@pytest.mark.parametrize("threshold", range(2, 18))
def test_bisection_finds_the_least(threshold: int) -> None:
    plans = {n: replace(example_plan(), global_batch=n) for n in range(18)}
    tried: list[int] = []

    def at(n: int) -> object:
        tried.append(n)
        return plans[n] if n >= threshold else None

    found = least(1, 17, at, plans[17])  # type: ignore[arg-type]
    assert found.global_batch == threshold and len(tried) == len(set(tried)) <= 4


def test_no_plan_holds_less_than_equal_shares_of_the_states() -> None:
    found = made(AMPLE, 4)
    assert least_states_bytes(found) == STATES / 4
    evaluator = Evaluator(found)
    for strategy in ("fsdp", "tp", "pp4 mb=4", "dp2.tp2 zero=3"):
        memory = plan_by_hand(evaluator, strategy).estimate.devices
        held = max(m.weights_bytes + m.gradients_bytes + m.optimizer_bytes for m in memory)
        assert held >= least_states_bytes(found)


def test_a_strategy_by_hand_may_recompute_shard_or_take_smaller_micro_batches() -> None:
    graph = traced(
        nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.GELU()))),
        torch.empty(512, 64), target=torch.empty(512, 64), loss_fn=F.mse_loss,
    )  # fmt: skip
    ample = problem(graph, cluster(2))
    peak = plan_by_hand(Evaluator(ample), "ddp").estimate.peak_memory_bytes
    found = replace(ample, memory_limit_bytes=int(0.8 * peak))
    evaluator = Evaluator(found)
    plan, best = plan_by_hand(evaluator, "ddp"), search(found)
    ways = by_kind(ways_out_by_hand(evaluator, plan, best))
    for kind, change in (
        ("recomputation", "recompute="),
        ("micro-batches", "mb=2"),
        ("recomputation and ZeRO", "zero=3"),
    ):
        way = ways[kind]
        assert way.plan is not None and way.plan.estimate.fits and change in way.change
        assert plan_by_hand(evaluator, way.change).estimate == way.plan.estimate
    assert ways["ZeRO"].plan is None and ways["ZeRO"].refused.endswith("over")
    alone = plan_by_hand(evaluator, "tp")
    assert by_kind(ways_out_by_hand(evaluator, alone, best))["ZeRO"].refused == "does not apply"


# --- how it is told ---------------------------------------------------------------------------------------------------


def test_the_message_holds_the_table_and_the_figures_the_same() -> None:
    found = made(STATES // 4)
    error = infeasible_with_ways_out(refusal(found), found, again)
    message = str(error)
    assert "over on its fullest device (there: optimizer" in message
    assert "Recomputation, every ZeRO stage and every number of micro-batches were tried. What would fit:\n" in message
    assert json.loads(json.dumps(error.figures)) == error.figures
    assert error.figures["shortage"]["missing_bytes"] == error.shortage.missing_bytes  # type: ignore[index,union-attr]
    for way in error.figures["ways_out"]:  # type: ignore[attr-defined]
        assert way["kind"] in message
        assert (way["configuration"] is None) == bool(way.get("refused"))
    hopeless = made(1000)
    assert "Nothing tried would fit: more memory, more devices" in str(
        infeasible_with_ways_out(Infeasible("It is too large", Shortage(1, "none", 0, 1000)), hopeless)
    )


def test_the_table_is_plain_text() -> None:
    ways = (WayOut("more devices", "8 devices instead of 4", example_plan()), WayOut("smaller batch", "", None, "none"))
    assert ways_out_text(ways, 120).splitlines()[2:] == [
        "more devices   8 devices instead of 4  181 ms  15.0 GB  pp2.dp2.tp2 mb=4 recompute=some schedule=1f1b",
        "smaller batch  none                                     none",
    ]
    assert filling(example_plan()) == "activations 6.00 GB, optimizer 4.00 GB, weights 2.00 GB"
    assert ways_out_figures(None, ways)["shortage"] is None
