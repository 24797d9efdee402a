"""What the memory of all ranks together must hold, whatever the stages.

Rank r has M bytes for its states (weights, gradients, optimizer state) and what it keeps of the micro-batches in flight. Add
these up over ranks with any weights l_r: what holds for each holds for the sum. A ``Pool`` is one such sum:

    states * (all states)  +  sum_i flights[i] * (kept by segment i of one micro-batch)  <=  M * devices

One stage a rank, f_r micro-batches in flight there: with l_r = 1 / min(f_r, c), every state counts at least 1/c and every
segment at least once, for each c that some f_r has. Several stages a rank are evenly filled, so it is nearly known which
segments a stage holds: l_r = 1, and a segment counts as often as the stage that might hold it with the fewest in flight, at the
moment when its rank holds most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.schedules import held


@dataclass(frozen=True)
class Pool:
    """``flights``: one a segment."""

    states: float
    flights: tuple[float, ...]
    devices: float


@lru_cache(maxsize=4096)
def pools(schedule: str, pp: int, micro_batches: int, chunks: int, segments: int) -> tuple[Pool, ...]:
    """The pools of a schedule over so many segments."""
    vectors = held(schedule, pp, micro_batches, chunks)
    if chunks == 1:
        flights = [most for ((most,),) in vectors]
        ones = (1.0,) * segments
        return tuple(Pool(1 / c, ones, sum(1 / min(f, c) for f in flights)) for c in sorted(set(flights)))
    fullest = [max(mine, key=sum) for mine in vectors]
    fewest = [micro_batches] * segments
    for stage in range(pp * chunks):
        for first, end in even_intervals(segments, pp * chunks, stage):
            for i in range(first, end):
                fewest[i] = min(fewest[i], fullest[stage % pp][stage // pp])
    return (Pool(1.0, tuple(float(f) for f in fewest), float(pp)),)


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
