"""What the benchmarks say follows from what they found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import growth, hand_picked, plan_time, published_plans, rows, shapes
from costmodels.hardware import load_cluster
from planner.solve.search import search
from planner.strategies import parse_strategy

# Parameters as published, in billions.
PUBLISHED_SIZES = {
    "gpt2-small": 0.124, "gpt2-xl": 1.558, "gpt3-175b": 174.6, "llama-2-7b": 6.738, "llama-2-13b": 13.016,
    "llama-3-8b": 8.030, "nemotron-4-15b": 15.6, "bert-large": 0.335, "vit-l-16": 0.304, "resnet-50": 0.0256,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    model, _ = shapes.sample(shapes.SHAPES[name], 1)
    billions = sum(x.numel() for x in model.parameters()) / 1e9
    assert billions == pytest.approx(PUBLISHED_SIZES[name], rel=0.006)


@pytest.mark.parametrize("kind", sorted({shape.kind for shape in shapes.SHAPES.values()}) + ["experts"])
def test_every_kind_of_shape_is_planned(kind: str) -> None:
    """A thin one, with a loss."""
    chosen = next(s for s in shapes.SHAPES.values() if (s.experts > 0 if kind == "experts" else s.kind == kind))
    small = replace(
        chosen,
        layers=50 if kind == "resnet" else 2,
        width=32,
        heads=min(chosen.heads, 4),
        key_value_heads=min(chosen.key_value_heads, 2),
        inner=min(chosen.inner, 64),
        vocabulary=min(chosen.vocabulary, 100),
        length=min(chosen.length, 196),
        experts=min(chosen.experts, 4),
    )
    found = shapes.problem(kind, 8, "dgx-a100-80gb", 2, small)
    assert found.graph.batch_size == 8 and found.graph.notes == ()
    plan = search(found, time_limit_s=60.0)
    assert not [item for item in plan.searched if item.outcome == "open"]


# --- hand-picked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", hand_picked.PAIRS, ids=lambda pair: pair.name)
def test_twelve_strategies_for_every_pair(pair: hand_picked.Pair) -> None:
    cluster = load_cluster(pair.cluster, pair.gpus)
    strategies = hand_picked.hand_picked(pair.gpus, cluster.gpus_per_node, 20)
    assert len(set(strategies)) == 12
    for strategy in strategies:
        assert parse_strategy(strategy.split()[0], pair.gpus).mesh.size == pair.gpus


def test_devices_without_bfloat16_get_float16() -> None:
    thin = replace(shapes.SHAPES["wide-mlp"], width=16)
    for cluster, dtype in (("dgx-v100-32gb", "float16"), ("dgx-h100", "bfloat16")):
        found = shapes.problem("wide-mlp", 8, cluster, 2, thin)
        dtypes = {leaf.value.dtype for leaf in found.graph.leaves_of("parameter")}
        assert (found.precision, dtypes) == (dtype, {dtype})


def test_twenty_pairs() -> None:
    assert len({pair.name for pair in hand_picked.PAIRS}) == 20
    assert {pair.model for pair in hand_picked.PAIRS} <= set(shapes.SHAPES)


def test_the_rule_of_the_hand_picked() -> None:
    found = hand_picked.hand_picked(64, 8, 100)
    assert [text.split()[0] for text in found[5:]] == [
        "dp8.tp8", "dp8.tp8", "dp32.tp2", "pp8.dp8", "pp8.dp8", "pp8.tp8", "pp8.tp8",
    ]  # fmt: skip
    assert hand_picked.hand_picked(8, 8, 6)[-1] == "pp2.tp4 zero=1 recompute=selective schedule=interleaved v=2"
    assert hand_picked.largest_degree(24, 100) == 8


def test_micro_batches_of_a_strategy() -> None:
    assert list(hand_picked.with_micro_batches("dp4 zero=3", 32)) == [
        "dp4 mb=1 zero=3", "dp4 mb=2 zero=3", "dp4 mb=4 zero=3", "dp4 mb=8 zero=3",
    ]  # fmt: skip
    assert list(hand_picked.with_micro_batches("pp2 zero=1 schedule=1f1b", 1)) == ["pp2 mb=1 schedule=1f1b"]
    assert list(hand_picked.with_micro_batches("tp2 schedule=1f1b v=2", 2)) == ["tp2 mb=1", "tp2 mb=2"]
    assert list(hand_picked.with_micro_batches("dp8", 4)) == []


def small_pair(monkeypatch: pytest.MonkeyPatch) -> hand_picked.Row:
    thin = replace(shapes.SHAPES["gpt2-small"], layers=3, width=64, heads=4, inner=256, vocabulary=128, length=32)
    monkeypatch.setattr(shapes, "SHAPES", {"thin": thin})
    return hand_picked.compare({"model": "thin", "batch": 16, "cluster": "dgx-a100-80gb", "gpus": 4})


def test_a_pair_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = small_pair(monkeypatch)
    compared = hand_picked.Compared(hand_picked.Pair("thin", "dgx-a100-80gb", 4, 16), found)
    assert len(found["tried"]) == 12 and sum(x["step_time_s"] is not None for x in found["tried"]) >= 6
    assert compared.gain is not None and compared.gain >= 1 - 1e-9
    shown = hand_picked.cells(compared)
    assert len(shown) == len(hand_picked.HEADINGS) and shown[0] == "thin, batch 16, 4 x dgx-a100-80gb"


def compared(objective_s: float, *tried: float | None) -> hand_picked.Compared:
    each = [{"strategy": "ddp", "variant": "ddp mb=1", "step_time_s": time_s, "reason": ""} for time_s in tried]
    found = {"plan": "dp4", "objective_s": objective_s, "gap": 0.0, "search_s": 1.0, "tried": each}
    return hand_picked.Compared(hand_picked.PAIRS[0], found)


def test_a_strategy_that_beats_the_solver_is_told() -> None:
    better, equal, worse, none = compared(1.0, 2.0, None), compared(1.0, 1.0), compared(1.0, 3.0, 0.5), compared(1.0)
    assert [each.worse for each in (better, equal, worse, none)] == [False, False, True, False]
    assert hand_picked.cells(worse)[7] == "WORSE 0.500" and hand_picked.cells(better)[7:] == ("2.000", "1 of 2")
    assert hand_picked.cells(none)[5] == "none fits"
    failed = hand_picked.Compared(hand_picked.PAIRS[0], {"error": "it broke"})
    assert hand_picked.summary([better, equal, worse, none, failed]) == (
        "never worse: 2 of 3 pairs with a hand-picked strategy that fits; gain from 0.500 to 2.000, median 1.000; "
        "1 where none of the twelve fits; 1 failed"
    )


# --- published --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published_plans.read(), ids=lambda row: row.name)
def test_a_published_row_is_whole(row: published_plans.Published) -> None:
    gpus = int(row.gpus)
    assert int(row.pp) * int(row.dp) * int(row.tp) == gpus
    assert int(row.batch) % (int(row.dp) * int(row.micro_batch)) == 0
    assert row.model in shapes.SHAPES and row.source and float(row.measured_s) > 0
    load_cluster(row.cluster, gpus)
    layers = shapes.SHAPES[row.model].layers
    assert int(row.pp) * int(row.chunks) <= layers
    assert all(
        text.split()[1] == f"mb={int(row.batch) // int(row.dp) // int(row.micro_batch)}" for text in row.strategies()
    )


def test_what_is_not_stated_is_tried() -> None:
    row = replace(
        published_plans.read()[0], dp="4", tp="2", gpus="8", batch="64", micro_batch="4", zero="", recompute=""
    )
    found = list(row.strategies())
    assert len(found) == 6 and found[0] == "dp4.tp2 mb=4 zero=0 recompute=none"
    row = replace(row, pp="2", dp="1", tp="4", schedule="interleaved", chunks="3", recompute="full")
    assert list(row.strategies()) == ["pp2.tp4 mb=16 zero=0 recompute=full schedule=interleaved v=3"]


def plan_figures(step_time_s: float, over_bytes: int = 0, **chosen: Any) -> dict[str, Any]:
    names = {"pp": 1, "dp": 8, "tp": 1, "micro-batch": 2, "zero": 0, "recompute": "full", "schedule": "none", "v": 1}
    return {
        "configuration": "dp8", "step_time_s": step_time_s, "compute_s": step_time_s * 0.7,
        "communication_s": step_time_s * 0.3, "bubble_s": 0.0, "over_bytes": over_bytes, "choices": {**names, **chosen},
    }  # fmt: skip


def test_the_difference_of_two_plans() -> None:
    published, solver = plan_figures(2.0), plan_figures(1.0, zero=3, recompute="none")
    assert published_plans.differences(published, solver) == "zero 0 -> 3, recompute full -> none"
    assert published_plans.differences(published, published) == "none"
    assert published_plans.saved(published, solver) == "compute +35.0%, communication +15.0%"
    found = [
        {"plan": solver, "published": published},
        {"plan": published, "published": solver},
        {"plan": solver, "published": plan_figures(0.5, over_bytes=10)},
        {"plan": solver, "published": None},
        {"error": "it broke"},
    ]
    assert published_plans.summary(found) == (
        "never worse: 1 of 2 published configurations that fit; gain from 0.500 to 2.000, median 2.000; "
        "1 do not fit by the memory model; 2 failed"
    )


def test_a_published_row_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    thin = replace(shapes.SHAPES["gpt2-small"], layers=4, width=64, heads=4, inner=256, vocabulary=128, length=32)
    monkeypatch.setattr(shapes, "SHAPES", {"thin": thin})
    row = published_plans.Published(
        "thin", "dgx-a100-80gb", "40", "4", "16", "2", "2", "1", "2", "0", "full", "1f1b", "1", "1.5", "", "a book"
    )
    found = published_plans.compare(vars(row))
    assert found["published"]["configuration"] == "pp2.dp2 mb=4 zero=0 recompute=full schedule=1f1b"
    gained = published_plans.gain(found)
    assert gained is not None and gained > 1
    shown = published_plans.cells(row, found)
    assert len(shown) == len(published_plans.HEADINGS) and "recompute full -> none" in shown[8]


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_row_in_a_process_of_its_own() -> None:
    found = rows.made("benchmarks.growth", {"layers": 1, "gpus": 1}, 120)
    assert found["gap"] <= 1e-9 and found["memory_bytes"] > 0 and found["trace_s"] > 0
    assert found["pricing_s"] > 0 and found["solve_s"] >= 0
    assert growth.cells(1, 1, found)[:2] == ("1", "1")


def test_a_row_that_fails_says_why() -> None:
    assert rows.made("benchmarks.growth", {"layers": 1}, 60) == {"error": "KeyError: 'gpus'"}
    assert "no answer" in rows.made("benchmarks.growth", {"layers": 1, "gpus": 1}, 0.01)["error"]


def test_a_case_is_held_to_its_limit() -> None:
    case = plan_time.Case("gpt2.json", 8, "dgx-a100-80gb", 64, 5.0)
    found = {"trace_s": 2.0, "search_s": 2.0, "gap": 0.0, "memory_bytes": 1e9, "plan": "dp8"}
    verdicts = [
        plan_time.cells(case, found)[5],
        plan_time.cells(case, {**found, "search_s": 4.0})[5],
        plan_time.cells(case, {**found, "gap": 0.01})[5],
        plan_time.cells(replace(case, solve_only=True), {**found, "search_s": 4.0})[5],
        plan_time.cells(case, {"error": "it broke"})[5],
    ]
    assert verdicts == ["yes", "NO", "NO", "yes", "NO"]


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows.show(("a", "b"), iter([("1", "2")]), markdown=True)
    assert capsys.readouterr().out == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    rows.show(("a", "b"), iter([("one", "two")]), markdown=False)
    shown = capsys.readouterr()
    assert "one" in shown.out and "two" in shown.out and shown.err == "one\n"
    assert sorted(growth.sizes(False, False))[0] == (12, 512) and len(list(growth.sizes(False, True))) == 42


@pytest.mark.parametrize("module", [hand_picked, published_plans, plan_time])
def test_a_command_runs_the_rows_asked_for(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "made", lambda *arguments: asked.append(arguments) or {"error": "it broke"})
    shown = CliRunner().invoke(module.main, ["--only", "llama-3-8b", "--markdown"])
    assert shown.exit_code == 0 and asked and all("llama-3-8b" in row["model"] for _, row, _ in asked)
    lines = [line for line in shown.output.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(asked) and {line.count(" | ") for line in lines} == {len(module.HEADINGS) - 1}
