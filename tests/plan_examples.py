"""Plans to test with: one with figures easy to check by hand, and any legal plan."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from planner.ir.mesh import Mesh
from planner.ir.plan import RECOMPUTATIONS, MemoryEstimate, OperatorLayout, Plan, Searched, SegmentInfo, StageEstimate
from planner.schedules import check
from planner.simulate import estimate_step

GB = 10**9


def example_plan() -> Plan:
    """A 4-layer GPT on pp2.dp2.tp2, 4 micro-batches."""
    stages = (
        StageEstimate(
            0.010, 0.020, 0.002, 0.004, 0.0, 0.001, 0.003, 0.002,
            MemoryEstimate(2 * GB, 2 * GB, 4 * GB, 6 * GB, GB),
        ),
        StageEstimate(
            0.012, 0.024, 0.002, 0.004, 0.008, 0.0, 0.003, 0.002,
            MemoryEstimate(2 * GB, 2 * GB, 4 * GB, 3 * GB, GB),
        ),
    )  # fmt: skip
    return Plan(
        model="gpt",
        graph_digest="0123456789abcdef" * 4,
        mesh=Mesh(2, 2, 2),
        micro_batches=4,
        schedule="1f1b",
        zero=0,
        stages=((0, 3), (3, 6)),
        recompute=("none",) * 3 + ("full",) * 3,
        segments=(
            SegmentInfo(0, "embed", 2, 1_000_000),
            *(SegmentInfo(1, f"layers.{i}", 4, 2_000_000) for i in range(4)),
            SegmentInfo(2, "head", 2, 0),
        ),
        layouts=(
            OperatorLayout("embedding", "aten.embedding.default", "embed", 0, "b", "v", "P:R"),
            OperatorLayout("add", "aten.add.Tensor", "", 0, "b", "R", "R:R"),
            OperatorLayout("layer_norm", "aten.layer_norm.default", "layers.0.norm", 1, "b", "R", "R:R"),
            OperatorLayout("linear", "aten.linear.default", "layers.0.up", 1, "b", "o", "S(2):S(2)"),
            OperatorLayout("gelu", "aten.gelu.default", "layers.0", 1, "b", "d2", "S(2):S(2)"),
            OperatorLayout("linear_1", "aten.linear.default", "layers.0.down", 1, "b", "i", "P:R"),
            OperatorLayout("linear_8", "aten.linear.default", "head", 2, "b", "o", "S(2):S(2)"),
            OperatorLayout("cross_entropy", "aten.cross_entropy_loss.default", "", 2, "b", "v", "R:R"),
        ),
        global_batch=64,
        cluster="a100-40gb",
        precision="bf16",
        optimizer="adamw",
        strategy="auto",
        estimate=estimate_step(stages, "1f1b", 4, 16 * GB),
        bound_s=0.150,
        searched=(
            Searched("pp2.dp2.tp2", 0.150, "best", 0.181),
            Searched("dp8", 0.170, "infeasible", None, "stage 0 lacks 4.0 GB"),
            Searched("dp4.tp2", 0.160, "solved", 0.210),
            Searched("tp8", 0.400, "pruned"),
            Searched("pp8", 0.300, "pruned"),
            Searched("pp4.tp2", 0.155, "open"),
        ),
        notes=("dropout p=0.1 is drawn from the same seed on all tp ranks",),
    )


def interleaved_plan(schedule: str = "interleaved") -> Plan:
    """The same model with two stages on each pipeline rank."""
    plan = example_plan()
    stages = tuple(
        StageEstimate(
            0.006 + 0.001 * i, 0.012, 0.001, 0.002, 0.0, 0.001 * (i < 3), 0.002, 0.001,
            MemoryEstimate(GB, GB, 2 * GB, (4 - i) * GB, GB * (i < 2)), 0.005,
        )
        for i in range(4)
    )  # fmt: skip
    estimate = estimate_step(stages, schedule, 4, 16 * GB, 2)
    return replace(
        plan,
        schedule=schedule,
        stages=((0, 2), (2, 3), (3, 4), (4, 6)),
        chunks=2,
        recompute=("none",) * 6,
        estimate=estimate,
        bound_s=estimate.step_time_s,
    )


def single_device_plan() -> Plan:
    plan = example_plan()
    stage = StageEstimate(0.010, 0.020, optimizer_per_step_s=0.002, memory=MemoryEstimate(GB, GB, 2 * GB, GB, 0))
    estimate = estimate_step([stage], "gpipe", 1, 16 * GB)
    return replace(
        plan,
        mesh=Mesh(),
        micro_batches=1,
        schedule="gpipe",
        stages=((0, 6),),
        recompute=("none",) * 6,
        layouts=(),
        estimate=estimate,
        bound_s=estimate.step_time_s,
        searched=(),
        notes=(),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any legal plan, small."""
    degree = st.sampled_from([1, 2, 4])
    mesh = Mesh(draw(degree), draw(degree), draw(degree))
    chunks = draw(st.sampled_from([1, 2])) if mesh.pp > 1 else 1
    schedules = ["gpipe", "1f1b"] if chunks == 1 else ["interleaved"]
    schedule = draw(st.sampled_from([*schedules, *(["zero-bubble"] * (mesh.pp > 1))]))
    micro_batches = draw(st.integers(mesh.pp, 8).filter(lambda m: not check(schedule, mesh.pp, m, chunks)))
    count = mesh.pp * chunks
    seconds, size_bytes = st.floats(0, 100), st.integers(0, 10**12)
    memory = st.builds(MemoryEstimate, *[size_bytes] * 5)
    stage = st.builds(
        lambda f, b, fc, bc, again, t, g, u, memory: StageEstimate(
            f + fc, b + bc + again, fc, bc, again, t, g, u, memory, b / 2
        ),
        *[seconds] * 8,
        memory,
    )
    stages = tuple(draw(st.lists(stage, min_size=count, max_size=count)))
    estimate = estimate_step(stages, schedule, micro_batches, 0, chunks)
    estimate = replace(estimate, memory_limit_bytes=estimate.peak_memory_bytes)
    lengths = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    cuts = [sum(lengths[:i]) for i in range(count + 1)]
    word = st.text(max_size=8)
    segment = st.builds(SegmentInfo, st.integers(0, 2), word, size_bytes, size_bytes)
    segments = tuple(draw(st.lists(segment, min_size=cuts[-1], max_size=cuts[-1])))
    kinds = st.sampled_from(sorted({segment.kind for segment in segments}))
    pair = st.sampled_from(["", "R:R", "P:R", "R:P", "S(1,3):S(1,3)", "R:-"])
    letter = st.sampled_from(["b", "R", "RP", "o"])
    layouts = draw(st.lists(st.builds(OperatorLayout, word, word, word, kinds, letter, letter, pair), max_size=4))
    searched = st.builds(
        Searched, word, seconds, st.sampled_from(["best", "solved", "pruned", "infeasible", "open"]),
        st.none() | seconds, word,
    )  # fmt: skip
    return Plan(
        model=draw(word),
        graph_digest=draw(word),
        mesh=mesh,
        micro_batches=micro_batches,
        schedule=schedule,
        zero=draw(st.sampled_from([0, 1] if schedule == "zero-bubble" else [0, 1, 2, 3])),
        stages=tuple(zip(cuts, cuts[1:], strict=False)),
        recompute=tuple(
            draw(
                st.lists(
                    st.sampled_from(RECOMPUTATIONS if schedule != "zero-bubble" else ("none",)),
                    min_size=cuts[-1],
                    max_size=cuts[-1],
                )
            )
        ),
        segments=segments,
        layouts=tuple(layouts),
        global_batch=mesh.dp * micro_batches * draw(st.integers(1, 4)),
        cluster=draw(word),
        precision="fp32",
        optimizer="adamw",
        strategy=draw(st.sampled_from(["auto", "fsdp"])),
        estimate=estimate,
        bound_s=estimate.step_time_s * draw(st.floats(0, 1)),
        searched=tuple(draw(st.lists(searched, max_size=3))),
        notes=tuple(draw(st.lists(word, max_size=2))),
        seed=draw(st.integers(0, 2**63)),
        chunks=chunks,
    )
