"""The pooled memory of all ranks against stages drawn at random."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.schedules import IN_ROUNDS, check, held
from planner.solve.pools import even_intervals, pools


@pytest.mark.parametrize("segments", range(1, 10))
def test_even_intervals_are_those_of_all_even_splits(segments: int) -> None:
    for stages in range(1, segments + 1):
        found: list[set[tuple[int, int]]] = [set() for _ in range(stages)]
        for cuts in itertools.combinations(range(1, segments), stages - 1):
            edges = list(itertools.pairwise((0, *cuts, segments)))
            sizes = [end - first for first, end in edges]
            if max(sizes) - min(sizes) <= 1:
                for stage, edge in enumerate(edges):
                    found[stage].add(edge)
        assert [set(even_intervals(segments, stages, stage)) for stage in range(stages)] == found


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    pp=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    chunks=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_what_fits_every_rank_fits_the_pools(
    schedule: str, pp: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    assume(chunks == 1 or schedule in IN_ROUNDS)
    assume(not check(schedule, pp, micro_batches, chunks))
    stages = pp * chunks
    if chunks == 1:
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    else:
        least = data.draw(st.integers(1, 2))
        sizes = data.draw(st.lists(st.integers(least, least + 1), min_size=stages, max_size=stages))
    segments = sum(sizes)
    states = data.draw(st.lists(st.integers(0, 9), min_size=segments, max_size=segments))
    kept = data.draw(st.lists(st.integers(0, 9), min_size=segments, max_size=segments))
    edges = list(itertools.pairwise([0, *itertools.accumulate(sizes)]))
    fullest = 0
    for rank, vectors in enumerate(held(schedule, pp, micro_batches, chunks)):
        mine = edges[rank::pp]
        own_states = sum(sum(states[first:end]) for first, end in mine)
        own_kept = [sum(kept[first:end]) for first, end in mine]
        most = max(sum(n * size for n, size in zip(vector, own_kept, strict=True)) for vector in vectors)
        fullest = max(fullest, own_states + most)
    for pool in pools(schedule, pp, micro_batches, chunks, segments):
        together = sum(flight * size for flight, size in zip(pool.flights, kept, strict=True))
        assert pool.states * sum(states) + together <= pool.devices * fullest * (1 + 1e-9)


def test_one_stage_a_rank_in_numbers() -> None:
    """1f1b on 2 ranks holds 2 and 1 micro-batches: M each, so kept <= M (1/2 + 1) - states / 2, or kept <= 2 M - states."""
    found = pools("1f1b", 2, 4, 1, 3)
    assert [(pool.states, pool.devices) for pool in found] == [(1.0, 2.0), (0.5, 1.5)]
    assert all(pool.flights == (1.0, 1.0, 1.0) for pool in found)
