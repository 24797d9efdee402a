"""The event simulation against closed forms, an independent longest-path computation, and hand-made cases."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.plan import MemoryEstimate, StageEstimate
from planner.ir.schedule import parse_order
from planner.schedules import actions
from planner.simulate import (
    Deadlock,
    StageTimes,
    estimate_step,
    gpipe_makespan_s,
    lower_bound_s,
    replay,
    simulate,
)

SECONDS = st.integers(0, 50).map(float)
TIMES = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6)
SCHEDULE = st.sampled_from(["gpipe", "1f1b"])
MICRO_BATCHES = st.integers(1, 12)


def longest_path(times: list[StageTimes], schedule: str, micro_batches: int) -> float:
    """The makespan as the longest path of the precedence graph (edges: work of the source, then transfer)."""
    graph = nx.DiGraph()
    work = {}
    for stage, order in enumerate(actions(schedule, len(times), micro_batches)):
        words = [str(action) for action in order]
        for action in order:
            work[str(action)] = times[stage][0 if action.kind == "F" else 1]
        for one, next_one in zip(words, words[1:], strict=False):
            graph.add_edge(one, next_one, delay=work[one])
    for stage in range(len(times) - 1):
        for i in range(micro_batches):
            for one, next_one in ((f"{stage}F{i}", f"{stage + 1}F{i}"), (f"{stage + 1}B{i}", f"{stage}B{i}")):
                graph.add_edge(one, next_one, delay=work[one] + times[stage][2])
    for word, seconds in work.items():
        graph.add_edge(word, "end", delay=seconds)
    for i in range(micro_batches):
        graph.add_edge(f"{len(times) - 1}F{i}", f"{len(times) - 1}B{i}", delay=times[-1][0])
    return float(nx.dag_longest_path_length(graph, weight="delay"))


@given(TIMES, SCHEDULE, MICRO_BATCHES)
@settings(max_examples=60)
def test_makespan_is_the_longest_path(times: list[StageTimes], schedule: str, micro_batches: int) -> None:
    assert simulate(times, schedule, micro_batches).makespan_s == longest_path(times, schedule, micro_batches)


@given(TIMES, SCHEDULE, MICRO_BATCHES)
def test_never_below_the_bound(times: list[StageTimes], schedule: str, micro_batches: int) -> None:
    assert simulate(times, schedule, micro_batches).makespan_s >= lower_bound_s(times, micro_batches)


@given(TIMES, MICRO_BATCHES)
def test_gpipe_is_its_closed_form(times: list[StageTimes], micro_batches: int) -> None:
    assert simulate(times, "gpipe", micro_batches).makespan_s == gpipe_makespan_s(times, micro_batches)


@given(st.integers(1, 8), SECONDS, SECONDS, MICRO_BATCHES)
def test_1f1b_reaches_the_bound_for_equal_stages(stages: int, forward: float, backward: float, m: int) -> None:
    times = [(forward, backward, 0.0)] * stages
    assert simulate(times, "1f1b", m).makespan_s == lower_bound_s(times, m) == (stages + m - 1) * (forward + backward)


@given(TIMES, SCHEDULE, MICRO_BATCHES)
def test_events_respect_the_rules(times: list[StageTimes], schedule: str, micro_batches: int) -> None:
    timeline = simulate(times, schedule, micro_batches)
    last = len(times) - 1
    at = {str(event.action): event for event in timeline.events}
    assert len(at) == len(timeline.events) == 2 * len(times) * micro_batches
    for event in timeline.events:
        stage, i = event.action.stage, event.action.micro_batch
        assert event.end_s - event.start_s == times[stage][0 if event.action.kind == "F" else 1]
        if event.action.kind == "F" and stage:
            assert event.start_s >= at[f"{stage - 1}F{i}"].end_s + times[stage - 1][2]
        if event.action.kind == "B":
            source = at[f"{stage}F{i}"].end_s if stage == last else at[f"{stage + 1}B{i}"].end_s + times[stage][2]
            assert event.start_s >= source
    for stage, order in enumerate(actions(schedule, len(times), micro_batches)):
        events = [at[str(action)] for action in order]
        assert all(one.end_s <= two.start_s for one, two in zip(events, events[1:], strict=False))
        assert timeline.end_s[stage] == events[-1].end_s
        assert timeline.busy_s[stage] == micro_batches * sum(times[stage][:2])
        assert (
            timeline.busy_s[stage] + timeline.transfer_wait_s[stage] + timeline.bubble_s[stage] == timeline.makespan_s
        )
    assert [event.start_s for event in timeline.events] == sorted(event.start_s for event in timeline.events)


def test_two_stages_by_hand() -> None:
    # stage 0: F0 0-1, F1 1-2; stage 1: F0 2-4 (transfer 1), B0 4-6, F1 6-8, B1 8-10; stage 0: B0 7-8, B1 11-12
    timeline = simulate([(1.0, 1.0, 1.0), (2.0, 2.0, 0.0)], "1f1b", 2)
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
    timeline = simulate([(4.0, 4.0, 3.0), (1.0, 1.0, 0.0)], "gpipe", 3)
    assert timeline.makespan_s == 32
    assert timeline.transfer_wait_s == (3, 9)
    assert timeline.bubble_s == (5, 17)


def test_deadlock_is_an_error() -> None:
    crossed = [parse_order("0F0 0B0 0F1 0B1"), parse_order("1F0 1F1 1B0 1B1")]
    with pytest.raises(Deadlock, match="waiting for ever at 0B0, 1F1"):
        replay([(1.0, 1.0, 0.0)] * 2, crossed)
    with pytest.raises(Deadlock, match="waiting for ever at 0B0"):
        replay([(1.0, 1.0, 0.0)], [parse_order("0B0 0F0")])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="cannot run 1F0"):
        replay([(1.0, 1.0, 0.0)], [parse_order("1F0 1B0")])
    with pytest.raises(ValueError, match="1 orders for 2 stages"):
        replay([(1.0, 1.0, 0.0)] * 2, [parse_order("0F0 0B0")])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stage 0 has times"):
            simulate([(1.0, bad, 0.0)], "gpipe", 1)


STAGES = st.lists(
    st.builds(
        lambda f, b, fc, bc, t, g, u: StageEstimate(f + fc, b + bc, fc, bc, 0.0, t, g, u),
        SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS,
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(STAGES, SCHEDULE, MICRO_BATCHES)
def test_estimate_splits_the_step(stages: list[StageEstimate], schedule: str, micro_batches: int) -> None:
    estimate = estimate_step(stages, schedule, micro_batches, 10**9)
    timeline = simulate([(s.forward_s, s.backward_s, s.transfer_s) for s in stages], schedule, micro_batches)
    after = [s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in stages]
    assert estimate.step_time_s == max(end + more for end, more in zip(timeline.end_s, after, strict=True))
    useful = [
        micro_batches * (s.forward_s + s.backward_s - s.forward_communication_s - s.backward_communication_s)
        + s.optimizer_per_step_s
        for s in stages
    ]
    assert estimate.compute_s == pytest.approx(sum(useful) / len(stages), rel=1e-12, abs=1e-9)
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
