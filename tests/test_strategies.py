"""Hand-picked strategies: their grammar, and the plans they become."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner.errors import BadInput
from planner.ir.mesh import Mesh
from planner.ir.plan import RECOMPUTATIONS, Plan
from planner.ir.verify import verify_plan
from planner.segment_cost import SegmentCost
from planner.solve.configuration import Evaluator
from planner.solve.search import search
from planner.strategies import NAMED, HandPicked, even_stages, parse_strategy, plan_by_hand
from tests.models import gpt_tied, hf_llama, resnet_digits
from tests.search_cases import cluster, graph_of, problem, splits, traced

ON = cluster(4, latency_s=1e-8, launch_s=1e-8, flops_per_s=1e11)


def planned(text: str, gpus: int = 4, make: Callable[..., object] = gpt_tied) -> Plan:
    return plan_by_hand(Evaluator(problem(graph_of(make), ON.with_gpus(gpus))), text)


# --- the grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp", HandPicked("ddp", Mesh(dp=4))),
        ("fsdp", HandPicked("fsdp", Mesh(dp=4), zero=3)),
        ("tp", HandPicked("tp", Mesh(tp=4))),
        ("model", HandPicked("model", Mesh(pp=4), 1, schedule="gpipe")),
        ("gpipe", HandPicked("gpipe", Mesh(pp=4), schedule="gpipe")),
        ("1f1b", HandPicked("1f1b", Mesh(pp=4), schedule="1f1b")),
        ("1f1b mb=8", HandPicked("1f1b mb=8", Mesh(pp=4), 8, schedule="1f1b")),
        ("fsdp recompute=full", HandPicked("fsdp recompute=full", Mesh(dp=4), zero=3, recompute="full")),
        ("fsdp zero=0", HandPicked("fsdp zero=0", Mesh(dp=4))),
        ("  dp2.tp2   mb=2 ", HandPicked("  dp2.tp2   mb=2 ", Mesh(dp=2, tp=2), 2)),
        (
            "pp2.dp2 zero=3 schedule=gpipe",
            HandPicked("pp2.dp2 zero=3 schedule=gpipe", Mesh(2, 2), None, 3, "none", "gpipe"),
        ),
        (
            "pp2.dp2 mb=8 schedule=interleaved v=3",
            HandPicked("pp2.dp2 mb=8 schedule=interleaved v=3", Mesh(2, 2), 8, schedule="interleaved", chunks=3),
        ),
        ("pp4 schedule=zero-bubble", HandPicked("pp4 schedule=zero-bubble", Mesh(pp=4), schedule="zero-bubble")),
    ],
)
def test_it_reads(text: str, expected: HandPicked) -> None:
    assert parse_strategy(text, 4) == expected


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.none() | st.integers(1, 64),
    st.none() | st.sampled_from([0, 1, 2, 3]),
    st.none() | st.sampled_from(RECOMPUTATIONS),
    st.none() | st.sampled_from(["gpipe", "1f1b"]),
    st.randoms(use_true_random=False),
)
def test_it_reads_what_is_written(degrees, mb, zero, recompute, schedule, random) -> None:  # type: ignore[no-untyped-def]
    """Options in any order; what is left out has its default."""
    mesh = Mesh(*degrees)
    options = {"mb": mb, "zero": zero, "recompute": recompute, "schedule": schedule}
    words = [f"{key}={value}" for key, value in options.items() if value is not None]
    random.shuffle(words)
    text = " ".join([str(mesh), *words])
    expected = HandPicked(text, mesh, mb, zero or 0, recompute or "none", schedule)
    assert parse_strategy(text, mesh.size) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the strategy is empty; write one of ddp, fsdp"),
        ("  ", r"the strategy is empty"),
        ("zddp", r"strategy 'zddp' starts with 'zddp'; write auto, ddp, .* or a mesh such as pp2.dp2.tp2"),
        ("pp2,dp2", r"starts with 'pp2,dp2'"),
        ("dp2.dp2", r"starts with 'dp2.dp2'"),
        ("dp0", r"starts with 'dp0'"),
        ("dp2", r"strategy 'dp2' is for 2 devices, but 4 are to be used; make the degrees multiply to 4"),
        ("single", r"is for 1 devices, but 4"),
        ("ddp mb=0", r"strategy 'ddp mb=0': 'mb=0' is not an option; the options are mb=<number>, zero=0\|1\|2\|3, "),
        ("ddp mb=-1", r"'mb=-1' is not an option"),
        ("ddp mb=two", r"'mb=two' is not an option"),
        ("ddp mb", r"'mb' is not an option"),
        ("ddp zero=4", r"'zero=4' is not an option"),
        ("ddp recompute=some", r"'recompute=some' is not an option"),
        ("gpipe schedule=zb", r"'schedule=zb' is not an option; .* schedule=gpipe\|1f1b"),
        ("ddp tp", r"'tp' is not an option"),
        ("ddp MB=2", r"'MB=2' is not an option"),
        ("pp4 v=0", r"'v=0' is not an option; .* v=<stages a rank>"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_strategy(text, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp16", r"strategy 'dp16': a batch of 8 cannot be cut into 16 data-parallel shards .* use at least 16 rows"),
        ("pp16", r"strategy 'pp16' asks for 16 stages, but the model has only (\d) segments .*; use at most pp\1"),
        (
            "pp4.dp4 mb=4",
            r"a batch of 8 cannot be cut into 4 .* of 4 .*; use at least 16 rows, or plan with at most 2 micro-b.* \(mb=2\)",
        ),
        (
            "pp4.tp4 mb=9",
            r"a batch of 8 cannot be cut .* use at least 9 rows, or plan with at most 8 micro-batches \(mb=8\)",
        ),
        (
            "pp4.tp4 mb=2 schedule=1f1b",
            r"1f1b needs at least as many micro-batches as stages \(4\); use mb=4 or more, or",
        ),
        ("pp8.tp2 mb=8 v=2", r"asks for 16 stages, but the model has only \d .*; use at most \d ranks with v=2"),
        (
            "pp2.tp8 mb=5 v=2",
            r"interleaved runs its micro-batches in equal rounds, .*; use a multiple of 2, such as mb=4",
        ),
        ("pp2.tp8 mb=4 v=2 schedule=1f1b", r"1f1b runs one stage a rank, not 2"),
        ("pp2.tp8 mb=4 v=1 schedule=interleaved", r"interleaved needs at least 2 stages a rank"),
        ("pp2.dp8 mb=1 zero=3 schedule=zero-bubble", r"zero-bubble runs with zero=0 or 1 and recompute=none only"),
        (
            "pp2.tp8 mb=2 recompute=full schedule=zero-bubble",
            r"zero-bubble runs with zero=0 or 1 and recompute=none only",
        ),
    ],
)
def test_what_cannot_be_planned(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        planned(text, 16)


# --- the plans --------------------------------------------------------------------------------------------------------

MIXES = ("dp2.tp2", "pp2.dp2", "pp2.tp2 mb=8", "dp4 mb=2 zero=3 recompute=full", "pp4 mb=2 schedule=gpipe",
         "pp2.dp2 mb=2 schedule=interleaved", "pp2.tp2 v=2", "pp2.tp2 mb=4 schedule=zero-bubble")  # fmt: skip


@pytest.mark.parametrize("text", (*NAMED, *MIXES))
@pytest.mark.parametrize("make", [gpt_tied, hf_llama])
def test_every_strategy_is_a_legal_plan(text: str, make: Callable[..., object]) -> None:
    plan = planned(text, make=make)
    verify_plan(plan, graph_of(make))
    assert plan.strategy == text and plan.mesh.size == 4
    assert Plan.from_json(plan.to_json()) == plan
    # what the plan says of itself is a strategy for the same plan
    again = planned(plan.configuration, make=make)
    assert (again.estimate, again.stages, again.recompute) == (plan.estimate, plan.stages, plan.recompute)


def test_the_defaults() -> None:
    assert planned("ddp").configuration == "dp4 mb=1 zero=0 recompute=none"
    assert planned("fsdp").configuration == "dp4 mb=1 zero=3 recompute=none"
    assert planned("tp").configuration == "tp4 mb=1 zero=0 recompute=none"
    assert planned("model").configuration == "pp4 mb=1 zero=0 recompute=none schedule=gpipe"
    assert planned("gpipe").configuration == "pp4 mb=8 zero=0 recompute=none schedule=gpipe"
    assert planned("1f1b").configuration == "pp4 mb=8 zero=0 recompute=none schedule=1f1b"
    assert planned("pp2.dp2").configuration == "pp2.dp2 mb=4 zero=0 recompute=none schedule=1f1b"
    assert planned("pp2.dp2 v=2").configuration == "pp2.dp2 mb=4 zero=0 recompute=none schedule=interleaved v=2"
    assert planned("pp2.dp2 schedule=zero-bubble").configuration.endswith(
        "mb=4 zero=0 recompute=none schedule=zero-bubble"
    )
    assert planned("dp4 mb=2 schedule=zero-bubble v=2").configuration == "dp4 mb=2 zero=0 recompute=none"
    assert planned("pp4 mb=2").configuration == "pp4 mb=2 zero=0 recompute=none schedule=gpipe"
    assert planned("tp4 zero=3").configuration == "tp4 mb=1 zero=0 recompute=none"
    assert planned("pp4 recompute=full").configuration.endswith("recompute=full schedule=1f1b")
    assert planned("dp4 mb=2 schedule=gpipe").schedule == "1f1b"  # one stage: one micro-batch after the other


def test_a_plan_that_does_not_fit_comes_back_and_says_so() -> None:
    plan = plan_by_hand(Evaluator(problem(graph_of(gpt_tied), ON, 100_000)), "ddp")
    verify_plan(plan, graph_of(gpt_tied))
    assert not plan.estimate.fits


def test_none_is_faster_than_the_solver() -> None:
    """Here; weights cut by pattern on tp are strategies that the solver's space need not hold."""
    best = search(problem(graph_of(gpt_tied), ON))
    for text in (*NAMED, *MIXES):
        assert planned(text).objective_s >= best.objective_s * (1 - 1e-9), text


def test_recomputation_trades_time_for_memory() -> None:
    plans = [planned(f"dp4 recompute={word}") for word in RECOMPUTATIONS]
    assert [set(plan.recompute) for plan in plans] == [{word} for word in RECOMPUTATIONS]
    none, selective, full = (plan.estimate.stages[0] for plan in plans)
    assert none.backward_s < selective.backward_s < full.backward_s < none.backward_s + none.forward_s
    assert full.recomputation_s == pytest.approx(full.backward_s - none.backward_s)
    kept = [stage.memory.activations_bytes for stage in (none, selective, full)]
    assert kept[0] > kept[1] > kept[2]


def test_megatron_cuts_the_weights() -> None:
    """All but norms, positions of odd shape and biases behind a row cut: about a quarter on four devices."""
    whole, cut = planned("ddp", 1), planned("tp", 4)
    ratio = cut.estimate.stages[0].memory.weights_bytes / whole.estimate.stages[0].memory.weights_bytes
    assert 0.25 < ratio < 0.29
    rows = {row.name: row for row in cut.layouts}
    linears = [row for row in rows.values() if row.op == "aten.linear.default"]
    assert linears and all(row.tp.split("@")[0] in ("i", "o") for row in linears)
    embeddings = [row for row in rows.values() if row.op == "aten.embedding.default"]
    assert embeddings and all(row.tp in ("v", "h") for row in embeddings)


def test_megatron_of_one_block_is_column_then_row() -> None:
    """Shoeybi and others, 2019: two cuts by columns and two by rows a layer."""
    slow = cluster(2, flops_per_s=1e9, link_bytes_per_s=1e9, latency_s=1e-6, launch_s=1e-8)
    plan = plan_by_hand(Evaluator(problem(graph_of(gpt_tied), slow)), "tp")
    block = [row for row in plan.layouts if row.module.startswith("blocks.0.") and row.op == "aten.linear.default"]
    assert [(row.module.split(".", 2)[2], row.tp.split("@")[0]) for row in block] == [
        ("attention.qkv", "o"),
        ("attention.out", "i"),
        ("up", "o"),
        ("down", "i"),
    ]


def test_batch_norm_runs_in_one_micro_batch_and_says_so() -> None:
    for text in ("gpipe", "1f1b"):
        plan = planned(text, make=resnet_digits)
        verify_plan(plan, graph_of(resnet_digits))
        assert plan.micro_batches == 1 and plan.schedule == "gpipe"
        assert any(note.startswith("one micro-batch: buffer 'bn.running_mean'") for note in plan.notes)
    assert any("run as gpipe: 1f1b needs at least 4 micro-batches" in note for note in plan.notes)
    with pytest.raises(BadInput, match=r"buffer 'bn.running_mean' is written in every forward pass.*mb=1"):
        planned("gpipe mb=4", make=resnet_digits)
    with pytest.raises(BadInput, match="cannot be cut into micro-batches"):
        planned("dp2.tp2 mb=2", make=resnet_digits)
    assert planned("dp2.tp2 mb=1", make=resnet_digits).micro_batches == 1


def test_an_odd_width_is_cut_where_it_can_be() -> None:
    """Three heads on two devices: attention whole, the rest cut."""
    model = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8))
    graph = traced(model, torch.empty(4, 8), target=torch.empty(4, 8), loss_fn=F.mse_loss)
    plan = plan_by_hand(Evaluator(problem(graph, cluster(2))), "tp")
    verify_plan(plan, graph)
    assert [row.tp for row in plan.layouts if "linear" in row.op] == ["i", "o"]


# --- stages -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=7), st.data())
def test_even_stages_are_the_evenest(figures: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, len(figures)))
    costs = [SegmentCost(float(f), float(b)) for f, b, _ in figures]
    recompute = ["full" if again else "none" for *_, again in figures]
    times = [f + b + (f if again else 0) for f, b, again in figures]
    stages = even_stages(costs, recompute, pp)
    assert [end for _, end in stages[:-1]] == [first for first, _ in stages[1:]]
    assert stages[0][0] == 0 and stages[-1][1] == len(costs) and len(stages) == pp
    assert all(first < end for first, end in stages)
    slowest = max(sum(times[first:end]) for first, end in stages)
    assert slowest == min(max(sum(times[a:b]) for a, b in split) for split in splits(len(costs), pp))


def test_the_same_again() -> None:
    for text in itertools.islice(NAMED, 3):
        assert planned(text).to_json() == planned(text).to_json()
