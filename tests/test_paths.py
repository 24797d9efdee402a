"""Paths through schedules of several stages a rank: sums that bound every step from below."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.paths import critical_path, fill_and_drain_paths
from planner.simulate import StageTimes, step_time_s
from tests.test_simulate import ONE_TIMES, SECONDS, runs

Run = tuple[list[StageTimes], str, int, int]


def figures(data: st.DataObject, count: int) -> tuple[list[StageTimes], list[float]]:
    exactly = {"min_size": count, "max_size": count}
    return data.draw(st.lists(ONE_TIMES, **exactly)), data.draw(st.lists(SECONDS, **exactly))


@given(runs(), st.data())
@settings(max_examples=150)
def test_the_critical_path_is_the_step_and_bounds_every_other(run: Run, data: st.DataObject) -> None:
    count = len(run[0])
    times, once = figures(data, count)
    path = critical_path(times, once, *run[1:])
    assert path.length_s(times, once) == step_time_s(times, once, *run[1:])
    others, later = figures(data, count)
    assert path.length_s(others, later) <= step_time_s(others, later, *run[1:])


@given(runs(), st.data())
@settings(max_examples=60)
def test_likely_paths_are_lower_bounds(run: Run, data: st.DataObject) -> None:
    times, schedule, micro_batches, chunks = run
    once = data.draw(st.lists(SECONDS, min_size=len(times), max_size=len(times)))
    step_s = step_time_s(*run[:1], once, *run[1:])
    paths = fill_and_drain_paths(schedule, len(times) // chunks, micro_batches, chunks)
    assert paths
    assert max(path.length_s(times, once) for path in paths) <= step_s


@given(runs())
@settings(max_examples=40)
def test_likely_paths_hold_the_longest_of_equal_stages(run: Run) -> None:
    times, schedule, micro_batches, chunks = run
    equal = [StageTimes(1.0, 2.0, 0.0, 1.0)] * len(times)
    once = [0.0] * len(times)
    paths = fill_and_drain_paths(schedule, len(times) // chunks, micro_batches, chunks)
    assert max(p.length_s(equal, once) for p in paths) == step_time_s(equal, once, schedule, micro_batches, chunks)
