"""The event simulation against closed forms, an independent longest-path computation, and hand-made cases."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.plan import MemoryEstimate, StageEstimate
from planner.ir.schedule import Action, parse_order
from planner.schedules import actions, check
from planner.simulate import (
    Deadlock,
    StageTimes,
    estimate_step,
    gpipe_makespan_s,
    lower_bound_s,
    replay,
    simulate,
    step_time_s,
    times_of,
)

SECONDS = st.integers(0, 50).map(float)
ONE_TIMES = st.builds(lambda f, i, t, w: StageTimes(f, i + w, t, w), SECONDS, SECONDS, SECONDS, SECONDS)
TIMES = st.lists(ONE_TIMES, min_size=1, max_size=6)
SCHEDULE = st.sampled_from(["gpipe", "1f1b"])
MICRO_BATCHES = st.integers(1, 12)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[StageTimes], str, int, int]:
    """Stage times, a schedule that exists for them, micro-batches and chunks."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    in_rounds = schedule in ("interleaved", "zero-bubble")
    pp = draw(st.integers(2 if in_rounds else 1, 4))
    chunks = draw(st.integers(2 if schedule == "interleaved" else 1, 3)) if in_rounds else 1
    least = pp if schedule == "1f1b" else 1
    micro_batches = draw(st.integers(least, 12).filter(lambda m: not check(schedule, pp, m, chunks)))
    times = draw(st.lists(ONE_TIMES, min_size=pp * chunks, max_size=pp * chunks))
    return times, schedule, micro_batches, chunks


def seconds_of(action: Action, times: list[StageTimes]) -> float:
    forward_s, backward_s, _, weight_s = times[action.stage]
    parts = {"I": backward_s - weight_s, "W": weight_s} if action.stage else {"I": 0.0, "W": backward_s}
    return {"F": forward_s, "B": backward_s, **parts}[action.kind]


def longest_path(times: list[StageTimes], schedule: str, micro_batches: int, chunks: int) -> float:
    """The makespan as the longest path of the precedence graph (edges: work of the source, then transfer)."""
    graph = nx.DiGraph()
    work: dict[str, float] = {}
    for order in actions(schedule, len(times) // chunks, micro_batches, chunks):
        words = [str(action) for action in order]
        work.update((str(action), seconds_of(action, times)) for action in order)
        for one, next_one in zip(words, words[1:], strict=False):
            graph.add_edge(one, next_one, delay=work[one])
    back = "I" if schedule == "zero-bubble" else "B"
    for stage in range(len(times) - 1):
        for i in range(micro_batches):
            for one, next_one in ((f"{stage}F{i}", f"{stage + 1}F{i}"), (f"{stage + 1}{back}{i}", f"{stage}{back}{i}")):
                graph.add_edge(one, next_one, delay=work[one] + times[stage].transfer_s)
    for word, seconds in work.items():
        graph.add_edge(word, "end", delay=seconds)
    for i in range(micro_batches):
        graph.add_edge(f"{len(times) - 1}F{i}", f"{len(times) - 1}{back}{i}", delay=times[-1].forward_s)
    return float(nx.dag_longest_path_length(graph, weight="delay"))


@given(runs())
@settings(max_examples=60)
def test_makespan_is_the_longest_path(run: tuple[list[StageTimes], str, int, int]) -> None:
    assert simulate(*run).makespan_s == longest_path(*run)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(1, 8),
    st.integers(1, 32),
    st.sampled_from([1, 2, 3, 4, 8]),
)
def test_no_schedule_that_exists_deadlocks(schedule: str, pp: int, micro_batches: int, chunks: int) -> None:
    """Every stage runs every micro-batch forward and backward, up to the sizes the search tries."""
    if check(schedule, pp, micro_batches, chunks):
        return
    stages = pp * chunks
    timeline = simulate([StageTimes(1.0, 2.0, 0.5, 1.0)] * stages, schedule, micro_batches, chunks)
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    every = {Action(stage, kind, i) for stage in range(stages) for kind in kinds for i in range(micro_batches)}
    assert len(timeline.events) == len(every) and {event.action for event in timeline.events} == every


@given(runs())
def test_never_below_the_bound(run: tuple[list[StageTimes], str, int, int]) -> None:
    times, schedule, micro_batches, chunks = run
    bound = lower_bound_s(times, micro_batches, chunks, split_backward=schedule == "zero-bubble")
    assert simulate(*run).makespan_s >= bound
    assert lower_bound_s(times, micro_batches, chunks, split_backward=True) <= lower_bound_s(
        times, micro_batches, chunks
    )


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaving_cuts_the_bubble_by_the_chunks(pp: int, chunks: int, rounds: int, f: float, b: float) -> None:
    # (m v + p - 1) (f + b) for p | m: Narayanan et al. 2021, section 2.2
    m = rounds * pp
    times = [StageTimes(f, b)] * (pp * chunks)
    assert simulate(times, "interleaved", m, chunks).makespan_s == (m * chunks + pp - 1) * (f + b)


@given(st.integers(2, 6), st.integers(0, 12), st.integers(1, 20))
def test_zero_bubble_of_equal_parts(pp: int, extra: int, unit: int) -> None:
    # ZB-H1 with F = I = W = t idles (p-1) (F + I - W), a third of 1f1b's: Qi et al. 2023, table 2. (The first stage, which
    # makes no gradient of its input, takes its whole backward as W, and never less work than the others.)
    m, t = pp + extra, float(unit)
    if check("zero-bubble", pp, m):
        m = pp * (m // pp)
    times = [StageTimes(t, 2 * t, 0.0, t)] * pp
    timeline = simulate(times, "zero-bubble", m)
    assert timeline.makespan_s <= 3 * m * t + (pp - 1) * t
    assert timeline.makespan_s < simulate(times, "1f1b", m).makespan_s


@given(TIMES, MICRO_BATCHES)
def test_gpipe_is_its_closed_form(times: list[StageTimes], micro_batches: int) -> None:
    assert simulate(times, "gpipe", micro_batches).makespan_s == gpipe_makespan_s(times, micro_batches)


@given(st.integers(1, 8), SECONDS, SECONDS, MICRO_BATCHES)
def test_1f1b_reaches_the_bound_for_equal_stages(stages: int, forward: float, backward: float, m: int) -> None:
    times = [StageTimes(forward, backward)] * stages
    assert simulate(times, "1f1b", m).makespan_s == lower_bound_s(times, m) == (stages + m - 1) * (forward + backward)


@given(runs())
def test_events_respect_the_rules(run: tuple[list[StageTimes], str, int, int]) -> None:
    times, schedule, micro_batches, chunks = run
    pp, last = len(times) // chunks, len(times) - 1
    timeline = simulate(*run)
    at = {str(event.action): event for event in timeline.events}
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    assert len(at) == len(timeline.events) == len(kinds) * len(times) * micro_batches
    for event in timeline.events:
        stage, kind, i = event.action.stage, event.action.kind, event.action.micro_batch
        assert event.end_s - event.start_s == seconds_of(event.action, times)
        if kind == "F" and stage:
            assert event.start_s >= at[f"{stage - 1}F{i}"].end_s + times[stage - 1].transfer_s
        if kind in "BI":
            source = at[f"{stage}F{i}"] if stage == last else at[f"{stage + 1}{kind}{i}"]
            assert event.start_s >= source.end_s + (0.0 if stage == last else times[stage].transfer_s)
        if kind == "W":
            assert event.start_s >= at[f"{stage}I{i}"].end_s
    for rank, order in enumerate(actions(schedule, pp, micro_batches, chunks)):
        events = [at[str(action)] for action in order]
        assert all(one.end_s <= two.start_s for one, two in zip(events, events[1:], strict=False))
        assert timeline.end_s[rank] == events[-1].end_s
        assert timeline.busy_s[rank] == micro_batches * sum(t.forward_s + t.backward_s for t in times[rank::pp])
        assert timeline.busy_s[rank] + timeline.transfer_wait_s[rank] + timeline.bubble_s[rank] == timeline.makespan_s
    assert [event.start_s for event in timeline.events] == sorted(event.start_s for event in timeline.events)


def test_two_stages_by_hand() -> None:
    # stage 0: F0 0-1, F1 1-2; stage 1: F0 2-4 (transfer 1), B0 4-6, F1 6-8, B1 8-10; stage 0: B0 7-8, B1 11-12
    timeline = simulate([StageTimes(1.0, 1.0, 1.0), StageTimes(2.0, 2.0)], "1f1b", 2)
    assert [(str(e.action), e.start_s, e.end_s) for e in timeline.events] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("1F0", 2, 4), ("1B0", 4, 6), ("1F1", 6, 8), ("0B0", 7, 8), ("1B1", 8, 10),
        ("0B1", 11, 12),
    ]  # fmt: skip
    assert timeline.makespan_s == 12
    assert timeline.busy_s == (4, 8)
    assert timeline.transfer_wait_s == (2, 1)
    assert timeline.bubble_s == (6, 3)


def test_a_transfer_hidden_behind_work_is_not_waited_for() -> None:
    # stage 0: F 0-4-8-12, waits for the first gradient until 20 (3 of the 8 on the way), B 20-24-28-32 without a pause
    timeline = simulate([StageTimes(4.0, 4.0, 3.0), StageTimes(1.0, 1.0)], "gpipe", 3)
    assert timeline.makespan_s == 32
    assert timeline.transfer_wait_s == (3, 9)
    assert timeline.bubble_s == (5, 17)


def test_deadlock_is_an_error() -> None:
    crossed = [parse_order("0F0 0B0 0F1 0B1"), parse_order("1F0 1F1 1B0 1B1")]
    with pytest.raises(Deadlock, match="waiting for ever at 0B0, 1F1"):
        replay([StageTimes(1.0, 1.0)] * 2, crossed)
    with pytest.raises(Deadlock, match="waiting for ever at 0B0"):
        replay([StageTimes(1.0, 1.0)], [parse_order("0B0 0F0")])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="cannot run 1F0"):
        replay([StageTimes(1.0, 1.0)], [parse_order("1F0 1B0")])
    with pytest.raises(ValueError, match="2 orders for 3 stages"):
        replay([StageTimes(1.0, 1.0)] * 3, [parse_order("0F0 0B0")] * 2)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stage 0 has times"):
            simulate([StageTimes(1.0, bad)], "gpipe", 1)
    with pytest.raises(ValueError, match="no more than all of it"):
        simulate([StageTimes(1.0, 1.0, 0.0, 1.5)], "gpipe", 1)
    with pytest.raises(ValueError, match="3 stages do not make whole ranks of 2"):
        simulate([StageTimes(1.0, 1.0)] * 3, "interleaved", 4, 2)


ONE_STAGE = st.builds(
    lambda f, b, w, fc, bc, t, g, u: StageEstimate(f + fc, b + bc + w, fc, bc, 0.0, t, g, u, weight_backward_s=w),
    SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS,
)  # fmt: skip


@given(runs(), st.data())
def test_estimate_splits_the_step(run: tuple[list[StageTimes], str, int, int], data: st.DataObject) -> None:
    times, schedule, micro_batches, chunks = run
    stages = data.draw(st.lists(ONE_STAGE, min_size=len(times), max_size=len(times)))
    pp = len(stages) // chunks
    estimate = estimate_step(stages, schedule, micro_batches, 10**9, chunks)
    timeline = simulate(times_of(stages), schedule, micro_batches, chunks)
    after = [s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in stages]
    assert estimate.step_time_s == max(end + sum(after[rank::pp]) for rank, end in enumerate(timeline.end_s))
    assert estimate.step_time_s == step_time_s(times_of(stages), after, schedule, micro_batches, chunks)
    useful = [
        micro_batches * (s.forward_s + s.backward_s - s.forward_communication_s - s.backward_communication_s)
        + s.optimizer_per_step_s
        for s in stages
    ]
    assert estimate.compute_s == pytest.approx(sum(useful) / pp, rel=1e-12, abs=1e-9)
    parts = estimate.compute_s + estimate.exposed_communication_s + estimate.bubble_s
    assert parts == pytest.approx(estimate.step_time_s, rel=1e-12)
    assert min(estimate.compute_s, estimate.exposed_communication_s, estimate.bubble_s) >= 0


def test_estimate_of_one_device() -> None:
    memory = MemoryEstimate(weights_bytes=10, activations_bytes=5)
    estimate = estimate_step([StageEstimate(0.1, 0.2, 0.02, 0.03, 0.05, 9.0, 0.5, 0.25, memory)], "gpipe", 4, 14)
    assert estimate.step_time_s == pytest.approx(4 * 0.3 + 0.75)
    assert estimate.exposed_communication_s == pytest.approx(4 * 0.05 + 0.5)
    assert estimate.bubble_s == 0
    assert estimate.compute_s == pytest.approx(4 * 0.25 + 0.25)
    assert (estimate.peak_memory_bytes, estimate.fits) == (15, False)


def test_the_stage_that_ends_last_need_not_be_the_slowest_to_synchronise() -> None:
    stages = [StageEstimate(1.0, 1.0, optimizer_per_step_s=1.0), StageEstimate(1.0, 1.0, gradient_sync_per_step_s=7.0)]
    # ends: stage 0 at 4, stage 1 at 3
    assert estimate_step(stages, "gpipe", 1, 0).step_time_s == 10.0


def test_zero_bubble_by_hand() -> None:
    # stage 0: F0 0-1, F1 1-2, waits for 1I0 until 3, W0 (its whole backward) 3-5, W1 5-7
    # stage 1: F0 1-2, I0 2-3, F1 3-4, then I1 before W0 (a turn later): 4-5 and 5-6, W1 6-7
    timeline = simulate([StageTimes(1.0, 2.0, 0.0, 1.0)] * 2, "zero-bubble", 2)
    assert [(str(e.action), e.start_s, e.end_s) for e in timeline.events if e.end_s > e.start_s] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("1F0", 1, 2), ("1I0", 2, 3), ("0W0", 3, 5), ("1F1", 3, 4), ("1I1", 4, 5),
        ("0W1", 5, 7), ("1W0", 5, 6), ("1W1", 6, 7),
    ]  # fmt: skip
    assert timeline.bubble_s == (1, 1)


def test_memory_of_a_device_is_that_of_its_stages() -> None:
    stages = [StageEstimate(1.0, 1.0, memory=MemoryEstimate(1, 2, 3, 4 * n, 0)) for n in range(4)]
    estimate = estimate_step(stages, "interleaved", 2, 30, 2)
    assert [device.total_bytes for device in estimate.devices] == [20, 28]
    assert (estimate.peak_memory_bytes, estimate.fits) == (28, True)
