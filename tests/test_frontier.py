"""The frontier of time against memory of an interval, against all ways to recompute its segments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.segment_cost import Recomputation, SegmentCost, stage_estimate
from planner.solve import frontier
from planner.solve.frontier import Frontier, hull_steps, least_recomputation_s

SIZES = st.integers(0, 12)
SECONDS = SIZES.map(float)
SEGMENT = st.builds(
    lambda f, a, i, w, t, selective: SegmentCost(
        f, 2.0 * f, activations_bytes=a, input_bytes=i, weights_bytes=w, temporary_bytes=t, selective=selective
    ),
    SECONDS, SIZES, SIZES, SIZES, SIZES, st.none() | st.builds(Recomputation, SECONDS, st.just(0.0), SIZES, SIZES),
)  # fmt: skip
CHAIN = st.lists(SEGMENT, min_size=1, max_size=3).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=6)
)


def all_choices(chain: list[SegmentCost], in_flight: int) -> list[tuple[float, int]]:
    """(extra seconds, bytes) of every choice of words."""
    found = []
    for words in itertools.product(*(segment.recomputations for segment in chain)):
        estimate = stage_estimate(chain, words, in_flight, True)
        found.append((estimate.recomputation_s, estimate.memory.total_bytes))
    return found


@given(CHAIN, st.integers(1, 4), st.integers(0, 120))
@settings(max_examples=150)
def test_the_fastest_label_is_the_fastest_choice(chain: list[SegmentCost], in_flight: int, limit: int) -> None:
    labels = Frontier(chain)
    choices = all_choices(chain, in_flight)
    fitting = [extra for extra, size in choices if size <= limit]
    found = labels.fastest(0, len(chain), in_flight, limit)
    assert labels.least_bytes(0, len(chain), in_flight) == min(size for _, size in choices)
    assert labels.exact
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.extra_s == min(fitting) == labels.least_extra_s(0, len(chain), in_flight, limit)
    estimate = stage_estimate(chain, found.recompute, in_flight, True)
    assert estimate.recomputation_s == found.extra_s
    assert estimate.memory.total_bytes == found.memory_bytes(in_flight, labels.fixed_bytes(0, len(chain))) <= limit


@given(CHAIN)
def test_labels_are_what_they_say_and_none_beats_another(chain: list[SegmentCost]) -> None:
    labels = Frontier(chain)
    for first, end in itertools.combinations(range(len(chain) + 1), 2):
        found = labels.labels(first, end)
        for label in found:
            estimate = stage_estimate(chain[first:end], label.recompute, 1, True)
            assert estimate.recomputation_s == label.extra_s
            assert estimate.memory.activations_bytes == label.kept_bytes
            assert estimate.memory.temporary_bytes == label.temporary_bytes
        for one, other in itertools.permutations(found, 2):
            better = (
                one.extra_s <= other.extra_s
                and one.kept_bytes <= other.kept_bytes
                and one.temporary_bytes <= other.temporary_bytes
            )
            assert not better
        assert [x.extra_s for x in found] == sorted(x.extra_s for x in found)


def test_equal_segments_make_one_label_a_count() -> None:
    chain = [SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=1)] * 30
    found = Frontier(chain).labels(0, 30)
    assert [x.extra_s for x in found] == [float(n) for n in range(31)]
    assert [x.kept_bytes for x in found] == [300 - 9 * n for n in range(31)]


@pytest.mark.parametrize("selective", [(0.25, 40), (0.6, 60), (0.9, 90)])
def test_many_equal_segments_with_three_ways_stay_exact(selective: tuple[float, int]) -> None:
    extra_s, kept = selective
    layer = SegmentCost(
        1.0, 2.0, activations_bytes=100, input_bytes=11, selective=Recomputation(extra_s, 0.0, kept, 100 - kept)
    )
    chain = [SegmentCost(0.1, 0.2, activations_bytes=7, input_bytes=3), *[layer] * 96, SegmentCost(3.0, 6.0)]
    labels = Frontier(chain)
    for first, end in itertools.combinations((0, 1, 30, 64, 97, 98), 2):
        assert 0 < len(labels.labels(first, end)) <= frontier.MOST_LABELS
    assert labels.exact


def test_equal_segments_are_recomputed_from_the_end() -> None:
    way = Recomputation(0.5, 0.0, 5, 5)
    chain = [SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=1, selective=way)] * 3
    words = [x.recompute for x in Frontier(chain).labels(0, 3)]
    assert ("none", "none", "selective") in words and ("selective", "selective", "full") in words


def test_recomputing_what_saves_nothing_is_never_a_label() -> None:
    chain = [
        SegmentCost(1.0, 2.0, activations_bytes=5, input_bytes=5),
        SegmentCost(1.0, 2.0, activations_bytes=9, input_bytes=1, selective=Recomputation(1.0, 0.0, 2, 9)),
    ]
    assert [x.recompute for x in Frontier(chain).labels(0, 2)] == [("none", "none"), ("none", "full")]


@given(CHAIN, st.integers(1, 4), st.integers(0, 120))
@settings(max_examples=100)
def test_with_labels_left_out_what_fits_is_known_and_the_time_is_bounded(
    chain: list[SegmentCost], in_flight: int, limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "MOST_LABELS", 3)
        labels, end = Frontier(chain), len(chain)
        choices = all_choices(chain, in_flight)
        fitting = [extra for extra, size in choices if size <= limit]
        found = labels.fastest(0, end, in_flight, limit)
        assert (found is None) == (not fitting)
        assert labels.least_bytes(0, end, in_flight) == min(size for _, size in choices)
        if found is not None:
            least = labels.least_extra_s(0, end, in_flight, limit)
            assert least <= min(fitting) * (1 + 1e-12) <= found.extra_s * (1 + 1e-12)
            assert stage_estimate(chain, found.recompute, in_flight, True).memory.total_bytes <= limit


@given(CHAIN, st.integers(1, 4), st.integers(-5, 120))
def test_the_relaxed_knapsack_bounds_every_choice(chain: list[SegmentCost], in_flight: int, excess: int) -> None:
    plain = in_flight * sum(s.activations_bytes for s in chain)
    least = least_recomputation_s(chain, [in_flight] * len(chain), excess)
    for words in itertools.product(*(segment.recomputations for segment in chain)):
        estimate = stage_estimate(chain, words, in_flight, True)
        if plain - estimate.memory.activations_bytes >= excess:
            assert least <= estimate.recomputation_s * (1 + 1e-12)


def test_the_relaxed_knapsack_takes_the_cheapest_bytes_first() -> None:
    chain = [
        SegmentCost(4.0, 8.0, activations_bytes=10, input_bytes=0, selective=Recomputation(1.0, 0.0, 4, 6)),
        SegmentCost(2.0, 4.0, activations_bytes=10, input_bytes=2, selective=Recomputation(1.9, 0.0, 8, 6)),
    ]
    assert hull_steps(chain[0]) == ((6, 1.0), (4, 3.0))
    assert hull_steps(chain[1]) == ((8, 2.0),)  # selectively it saves little for nearly the same time
    assert least_recomputation_s(chain, [1] * len(chain), 6) == 1.0
    assert least_recomputation_s(chain, [1] * len(chain), 10) == 1.0 + 2.0 * 4 / 8
    assert least_recomputation_s(chain, [2] * len(chain), 2 * 18) == 1.0 + 2.0 + 3.0


def test_labels_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "MOST_LABELS", 3)
    chain = [SegmentCost(2.0**n, 1.0, activations_bytes=2 ** (n + 1), input_bytes=0) for n in range(6)]
    labels = Frontier(chain)
    labels.labels(0, 6)
    assert not labels.exact


def test_least_memory_may_leave_the_largest_segment_alone() -> None:
    # recomputing the second holds 100 bytes while it runs, more than it saves
    chain = [
        SegmentCost(1.0, 1.0, activations_bytes=10, input_bytes=0),
        SegmentCost(1.0, 1.0, activations_bytes=100, input_bytes=95),
    ]
    sizes = {x.recompute: x.memory_bytes(1, 0) for x in Frontier(chain).labels(0, 2)}
    assert sizes == {("none", "none"): 110, ("full", "none"): 110, ("full", "full"): 195}
    assert Frontier([replace(s, weights_bytes=7) for s in chain]).least_bytes(0, 2, 3) == 14 + 310
