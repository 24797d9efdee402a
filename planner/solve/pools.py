"""What the memory of all ranks together must hold, whatever the stages.

Rank r has M_r bytes for its states (weights, gradients, optimizer state) and what it keeps of the micro-batches in flight. Add
these up over ranks with any weights l_r: what holds for each holds for the sum. A ``Pool`` is one such sum:

    states * (all states)  +  sum_i flights[i] * (kept by segment i of one micro-batch)  <=  sum_r weights[r] * M_r

One stage a rank, f_r micro-batches in flight there: with l_r = 1 / min(f_r, c), every state counts at least 1/c and every
segment at least once, for each c that some f_r has. Several stages a rank are evenly filled, so it is nearly known which
segments a stage holds: l_r = 1, and a segment counts as often as the stage that might hold it with the fewest in flight, at the
moment when its rank holds most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.schedules import held
from planner.segment_cost import SegmentCost
from planner.solve.frontier import least_recomputation_s


@dataclass(frozen=True)
class Pool:
    """``flights``: one a segment; ``weights``: one a rank."""

    states: float
    flights: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def devices(self) -> float:
        """All weights together."""
        return sum(self.weights)

    def room_bytes(self, limits_bytes: Sequence[int]) -> float:
        """``limits_bytes``: of a device of each rank."""
        return sum(weight * limit for weight, limit in zip(self.weights, limits_bytes, strict=True))


@lru_cache(maxsize=4096)
def pools(schedule: str, pp: int, micro_batches: int, chunks: int, segments: int) -> tuple[Pool, ...]:
    """The pools of a schedule over so many segments."""
    vectors = held(schedule, pp, micro_batches, chunks)
    if chunks == 1:
        flights = [most for ((most,),) in vectors]
        ones = (1.0,) * segments
        return tuple(Pool(1 / c, ones, tuple(1 / min(f, c) for f in flights)) for c in sorted(set(flights)))
    fullest = [max(mine, key=sum) for mine in vectors]
    fewest = [micro_batches] * segments
    for stage in range(pp * chunks):
        for first, end in even_intervals(segments, pp * chunks, stage):
            for i in range(first, end):
                fewest[i] = min(fewest[i], fullest[stage % pp][stage // pp])
    return (Pool(1.0, tuple(float(f) for f in fewest), (1.0,) * pp),)


def even_intervals(segments: int, stages: int, stage: int) -> list[tuple[int, int]]:
    """The intervals [first, end) a stage may hold where no two stages differ by more than one segment."""
    least, longer = divmod(segments, stages)
    firsts = range(stage * least + max(0, longer - stages + stage), stage * least + min(stage, longer) + 1)
    found = []
    for first in firsts:
        for end in (first + least, first + least + 1):
            before = first - stage * least  # of the stages above, those that hold one more
            rest = longer - before - (end - first - least)  # of those below
            if 0 <= rest <= stages - stage - 1:
                found.append((first, end))
    return found


# Below, ``costs`` are those of the segments on one device, of which each of ``tp`` devices holds a share no less than 1/tp.


def least_excess_bytes(
    pools: Sequence[Pool], costs: Sequence[SegmentCost], tp: int, limits_bytes: Sequence[int]
) -> float:
    """By how much some device exceeds its limit at least, with everything recomputed that makes room; negative: not at all."""
    states = sum(c.states_bytes for c in costs)
    return max(
        ((pool.states * states + _least_kept_bytes(pool, costs)) / tp - pool.room_bytes(limits_bytes)) / pool.devices
        for pool in pools
    )


def most_states_bytes(
    pools: Sequence[Pool], costs: Sequence[SegmentCost], tp: int, limits_bytes: Sequence[int]
) -> float:
    """What the states on one device of each of pp tp groups can take together, with everything recomputed that makes room."""
    return min((pool.room_bytes(limits_bytes) - _least_kept_bytes(pool, costs) / tp) / pool.states for pool in pools)


def forced_recomputation_s(
    pools: Sequence[Pool], costs: Sequence[SegmentCost], tp: int, limits_bytes: Sequence[int]
) -> float:
    """Forward seconds of one device that must be run again: the cheapest recomputation, of parts of segments, that makes room
    in every pool."""
    states = sum(c.states_bytes for c in costs)
    again_s = 0.0
    for pool in pools:
        kept = sum(flight * c.activations_bytes for flight, c in zip(pool.flights, costs, strict=True))
        excess = pool.states * states + kept - pool.room_bytes(limits_bytes) * tp
        again_s = max(again_s, least_recomputation_s(costs, pool.flights, excess))
    return again_s


def _least_kept_bytes(pool: Pool, costs: Sequence[SegmentCost]) -> float:
    """What must be kept for backward at least."""
    return sum(flight * c.least_kept_bytes for flight, c in zip(pool.flights, costs, strict=True))
