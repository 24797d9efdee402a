"""Reports: golden text, figures, and readability at any width without colour."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from planner.errors import BadInput
from planner.ir.mesh import Mesh
from planner.ir.plan import MemoryEstimate, Plan, Searched, StageEstimate
from planner.report import (
    ComparisonRow,
    Verification,
    bindings,
    comparison_figures,
    comparison_report,
    plan_figures,
    plan_html,
    plan_text,
    summary,
    verification_figures,
    verification_report,
)
from planner.report.gantt import Gantt, blocks, windows
from planner.report.verification import Cause, ComparedTensor
from planner.report.words import collapse, counted, mesh_words, strategy_words
from planner.simulate import estimate_step
from planner.sizes import format_bytes, format_count, format_seconds, parse_bytes
from tests.plan_examples import GB, example_plan, interleaved_plan, plans, single_device_plan

GOLDEN = Path(__file__).parent / "golden"


def text_of(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("plan_report.txt", example_plan()),
        ("single_device_report.txt", single_device_plan()),
        ("interleaved_report.txt", interleaved_plan()),
    ],
)
def test_golden_report(name: str, plan: Plan) -> None:
    assert plan_text(plan, width=80) == (GOLDEN / name).read_text(encoding="utf-8")


def test_golden_comparison() -> None:
    overflowing = replace(single_device_plan(), strategy="ddp")
    overflowing = replace(overflowing, estimate=replace(overflowing.estimate, memory_limit_bytes=2 * GB))
    rows = [
        ComparisonRow("auto", example_plan(), measured_step_time_s=0.2),
        ComparisonRow("tp", None, "12 heads cannot be cut 8 ways"),
        ComparisonRow("ddp", overflowing, "not measured: it does not fit"),
    ]
    assert text_of(comparison_report(rows)) == (GOLDEN / "comparison.txt").read_text(encoding="utf-8")


@given(plans(), st.integers(80, 200))
@settings(max_examples=25, deadline=None)
def test_reports_of_any_plan_keep_their_width(plan: Plan, width: int) -> None:
    plan = replace(plan, model="m", notes=(), searched=(), layouts=())
    plan = replace(plan, segments=tuple(replace(segment, label="") for segment in plan.segments))
    assert max(map(len, plan_text(plan, width=width).splitlines())) <= width


def test_colour_only_when_asked() -> None:
    plan = example_plan()
    assert "\x1b[" not in plan_text(plan)
    coloured = plan_text(plan, width=80, color=True)
    assert "\x1b[" in coloured
    assert "<pre" in plan_html(plan) and "step" in plan_html(plan)


def test_summary_is_one_line() -> None:
    plan = example_plan()
    assert summary(plan) == (
        "gpt on 8 x a100-40gb: pp2.dp2.tp2 mb=4 zero=0 recompute=some schedule=1f1b, "
        "181 ms a step (within 17.13% of the proven bound), peak 15.0 GB of 16.0 GB"
    )
    assert "(proven fastest)" in summary(single_device_plan())
    assert "(hand-picked (fsdp))" in summary(replace(plan, strategy="fsdp"))


def with_stages(*stages: StageEstimate, limit: int = 100) -> Plan:
    return replace(
        example_plan(), mesh=Mesh(pp=len(stages)), estimate=estimate_step(stages, "gpipe", 4, limit), micro_batches=4
    )


def test_what_binds() -> None:
    full = MemoryEstimate(weights_bytes=91)
    assert bindings(with_stages(StageEstimate(1.0, 1.0, memory=full))) == (
        ("memory", "stage 0 uses 91% of 100 B"),
        ("compute", "100% of the step"),
    )
    assert bindings(with_stages(StageEstimate(1.0, 1.0, memory=MemoryEstimate(90)))) == (
        ("compute", "100% of the step"),
    )
    assert bindings(with_stages(StageEstimate(1.0, 1.0, 0.6, 0.6)))[0] == ("communication", "60% of the step")
    assert bindings(with_stages(StageEstimate(1.0, 1.0), StageEstimate(0.0, 0.0)))[0] == ("compute", "50% of the step")
    assert bindings(with_stages(StageEstimate(1.0, 1.0, 0.4, 0.4), StageEstimate(0.0, 0.0)))[0][0] == "bubble"


def test_figures_are_plain_data_that_agree_with_the_plan() -> None:
    plan = example_plan()
    figures = json.loads(json.dumps(plan_figures(plan)))
    assert figures["step_time_s"] == plan.objective_s
    assert figures["binds"] == ["memory", "compute"]
    assert [stage["memory"]["total_bytes"] for stage in figures["stages"]] == [15 * GB, 12 * GB]
    assert figures["stages"][1]["labels"] == ["layers.2", "layers.3", "head"]
    assert figures["stages"][0]["parameters"] == 5_000_000


def test_searched_is_ordered_and_cut_short() -> None:
    many = tuple(Searched(f"dp{i}", i / 10, "pruned" if i % 3 else "infeasible") for i in range(1, 31))
    plan = replace(
        example_plan(), searched=(*many, Searched("tp8", 0.1, "best", 0.18), Searched("pp8", 0.1, "solved", 0.19))
    )
    text = plan_text(plan, width=80)
    table = text[text.index("Configurations searched: 32") :].splitlines()
    assert [line.split()[:2] for line in table[3:7]] == [
        ["tp8", "best"],
        ["pp8", "solved"],
        ["dp1", "pruned"],
        ["dp2", "pruned"],
    ]
    assert "and 20 more: 10 pruned, 10 infeasible" in table


def test_an_overflow_is_said() -> None:
    plan = replace(
        example_plan(), strategy="ddp", estimate=replace(example_plan().estimate, memory_limit_bytes=12 * GB)
    )
    assert "stage 0 lacks 3.00 GB on each device" in plan_text(plan)
    assert "125.0%" in plan_text(plan)


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("micro_batches", [1, 4, 64])
def test_gantt_rows(width: int, micro_batches: int) -> None:
    """Every row is the full width; with the whole step drawn, cells busy in the row agree with the busy time."""
    stages = [StageEstimate(0.01, 0.02, 0, 0, 0, 0.0, 0.005, 0.002)] * 3
    plan = replace(
        example_plan(), mesh=Mesh(pp=3), micro_batches=micro_batches, schedule="gpipe",
        estimate=estimate_step(stages, "gpipe", micro_batches, 1),
    )  # fmt: skip
    rows = text_of(Gantt(plan), width).splitlines()[:3]
    inside = width - len("stage 0 ||")
    parts = windows(plan, inside)
    for row, own in zip(rows, blocks(plan), strict=True):
        assert len(row) == width and row[-1] == "|"
        drawn = row.split("|")[1]
        if len(parts) == 1:
            busy = sum(block.end_s - block.start_s for block in own) / plan.estimate.step_time_s
            assert abs(sum(cell != " " for cell in drawn) / inside - busy) < 0.1
        else:
            assert drawn.count("…") == 1
            assert parts[-1].end_s == pytest.approx(plan.estimate.step_time_s)


def test_gantt_by_hand() -> None:
    stages = [StageEstimate(1.0, 2.0), StageEstimate(1.0, 2.0)]
    plan = replace(
        example_plan(), mesh=Mesh(pp=2), micro_batches=2, schedule="1f1b", estimate=estimate_step(stages, "1f1b", 2, 1)
    )
    assert text_of(Gantt(plan), len("stage 0 ||") + 36).splitlines() == [
        "stage 0 |0░░░1░░░        0▓▓▓▓▓▓▓    1▓▓▓▓▓▓▓|",
        "stage 1 |    0░░░0▓▓▓▓▓▓▓1░░░1▓▓▓▓▓▓▓        |",
        "         0 s                           9.00 s",
        "         0░░ forward   0▓▓ backward",
    ]


def test_gantt_of_several_stages_a_device() -> None:
    stages = [StageEstimate(1.0, 2.0, weight_backward_s=1.0)] * 4
    plan = replace(
        example_plan(),
        mesh=Mesh(pp=2),
        micro_batches=2,
        schedule="zero-bubble",
        chunks=2,
        estimate=estimate_step(stages, "zero-bubble", 2, 1, 2),
    )
    drawn = text_of(Gantt(plan), len("stages 0, 2 ||") + 39).splitlines()
    assert drawn[:3] == [
        "stages 0, 2 |0a░1a░0b░1b░   0b▓0b▒1b▓1b▒0a▒▒▒▒1a▒▒▒▒|",
        "stages 1, 3 |   0a░1a░0b░0b▓1b░1b▓0b▒0a▓1b▒1a▓0a▒1a▒|",
        "             0 s                              13.0 s",
    ]
    assert " ".join(map(str.strip, drawn[3:])) == "0░░ forward   0▓▓ input gradient   0▒▒ weight gradient"


def test_many_stages_are_cut_short() -> None:
    stages = [StageEstimate(1.0, 2.0)] * 40
    plan = replace(
        example_plan(),
        mesh=Mesh(pp=40),
        micro_batches=40,
        schedule="1f1b",
        estimate=estimate_step(stages, "1f1b", 40, 1),
    )
    lines = text_of(Gantt(plan)).splitlines()
    assert len(lines) == 16 + 1 + 2
    assert "24 more stages" in lines[8]
    assert lines[9].startswith("stage 32 |")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["embed", "layers.0", "layers.1", "layers.2", "head"], "embed, layers.0 … layers.2, head"),
        (["h.0.mlp", "h.1.mlp"], "h.0.mlp, h.1.mlp"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.1"], "a.0.b.0, a.0.b.1, a.1.b.1"),
        (["l.9", "l.10", "l.11", "l.13"], "l.9 … l.11, l.13"),
        ([], ""),
    ],
)
def test_collapse(labels: list[str], words: str) -> None:
    assert collapse(labels) == words


def test_words() -> None:
    assert mesh_words(Mesh(dp=4)) == "dp4: 4 shards of the batch = 4 devices"
    assert mesh_words(Mesh()) == "one device"
    assert counted(["mul", "add", "mul"]) == "mul x2, add"
    assert strategy_words("aten.linear.default", "o@3", "tp") == "output features, in each of 3 parts"
    assert strategy_words("aten.linear.default", "i", "tp") == "input features, summed"
    assert strategy_words("aten.mul.Tensor", "RP", "tp") == "whole, partial gradient"
    assert strategy_words("aten.mul.Tensor", "d0", "tp") == "cut along d0"
    assert strategy_words("aten.view.default", "d0", "dp") == "batch"


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GB", 40 * 10**9), ("24 GiB", 24 * 2**30), ("512MB", 512 * 10**6), ("1.5gb", 15 * 10**8), ("1024", 1024),
     (" 2 tib ", 2**41), ("9007199254740993", 9007199254740993)],
)  # fmt: skip
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "40 G B", "-1GB", "0", "0.0GB", "40GHz", "4e9", "1.2.3GB", "nan", "40Gb/s"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(BadInput, match="write for example 40GB, 24GiB or 512MB"):
        parse_bytes(text)


def test_formats() -> None:
    assert [format_bytes(size) for size in (0, 999, 1000, 999_600, 15 * GB, 1.5e12)] == [
        "0 B", "999 B", "1.00 kB", "1.00 MB", "15.0 GB", "1.50 TB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.0, 1e-9, 4.5e-5, 0.0184, 0.9996, 12.3, 1234.0)] == [
        "0 s", "1.00 ns", "45.0 us", "18.4 ms", "1.00 s", "12.3 s", "1234 s",
    ]  # fmt: skip
    assert [format_count(n) for n in (980, 124_000_000, 6_740_000_000)] == ["980", "124 M", "6.74 B"]


def test_comparison_figures() -> None:
    slow = replace(example_plan(), estimate=replace(example_plan().estimate, step_time_s=0.01, memory_limit_bytes=1))
    rows = comparison_figures(
        [ComparisonRow("auto", example_plan()), ComparisonRow("tp", slow), ComparisonRow("pp", None, "no")]
    )
    assert [row.get("relative_to_best") for row in rows] == [1.0, 0.01 / example_plan().objective_s, None]
    assert [row.get("fits") for row in rows] == [True, False, None]
    assert rows[2]["refused"] == "no"


# --- verifications ----------------------------------------------------------------------------------------------------


def verification(errors: dict[str, float], **changes: object) -> Verification:
    names = {"loss": "step 1", "gradient": "blocks.0.up.weight", "parameter": "blocks.0.up.weight, step 3"}
    compared = tuple(ComparedTensor(kind, names[kind], error) for kind, error in errors.items())
    made = Verification(
        "GPT", "dp2.tp2", "equal", "dp2.tp2 mb=1 zero=0 recompute=none", "float32", 1e-5, 3, "AdamW", compared
    )
    return replace(made, **changes)  # type: ignore[arg-type]


EQUAL = verification({"loss": 0.0, "gradient": 3e-7, "parameter": 2e-8}, notes=("dropout was switched off",))
CAUSE = Cause("sharding", "the value of %gelu (R:R on tp), off by 2.0e-01", ("gelu in blocks.0",), "its rule is wrong")
UNEQUAL = verification({"loss": 1e-6, "gradient": math.inf, "parameter": 0.25}, outcome="unequal", cause=CAUSE)
REFUSED = Verification("GPT", "tp", "refused", reason="12 heads cannot be cut 8 ways")


def test_golden_verifications() -> None:
    text = "\n".join(text_of(verification_report(row)) for row in (EQUAL, UNEQUAL, REFUSED))
    assert text == (GOLDEN / "verifications.txt").read_text(encoding="utf-8")


def test_the_first_that_differs_is_in_the_order_of_the_step() -> None:
    assert EQUAL.equal and EQUAL.first is None
    assert not UNEQUAL.equal and UNEQUAL.first is not None and UNEQUAL.first.kind == "gradient"
    assert UNEQUAL.worst == UNEQUAL.compared[1]
    assert REFUSED.first is None and REFUSED.worst is None


def test_figures_of_verifications_are_plain_json() -> None:
    equal, unequal, refused = json.loads(json.dumps(verification_figures([EQUAL, UNEQUAL, REFUSED]), allow_nan=False))
    assert equal["first"] is None and equal["cause"] is None and equal["notes"] == ["dropout was switched off"]
    assert unequal["first"] == {"kind": "gradient", "name": "blocks.0.up.weight", "error": None}
    assert unequal["cause"]["operators"] == ["gelu in blocks.0"]
    assert refused["outcome"] == "refused" and "heads" in refused["reason"]
