"""What a stage may hold: intervals of the chain, which of them fit, and which can be part of a fast enough split.

    Interval(stage, first, end)     segments [first, end) on one stage: the fastest recomputation that fits, and its times

A split can only take less than T when every stage s, holding [i, j), has

    before(i) + m total(i, j) < T            the first micro-batch comes through the stages above, and the last gradient goes back
    m total(i, j) + per_step(i, j) < T

(planner.simulate.lower_bound_s), where total is forward plus backward, and before(i) that of the segments above i, or their
forward alone where the backward is in two parts. Where ranks differ, total is that of the stage's own rank, and before, of each
segment, the least of all ranks up to it: what comes before a stage then grows with i by no more than its own time would.
Both sides grow with j and shrink with growing i, so the starts that stage s can have lie between two ends, found greedily:

    latest[s + 1]      the farthest end of an interval that starts at latest[s]
    earliest[s]        the first start of an interval that ends at earliest[s + 1]

``Intervals.within(T)`` lists the intervals between them: a few around an even split where T is close to the best.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.ir.plan import RECOMPUTATIONS
from planner.segment_cost import SegmentCost, between_bytes, put_off
from planner.simulate import StageTimes
from planner.solve.frontier import Frontier, Label

# How near the greedy search comes to the least T at which a split fits.
EVEN_TO = 1e-6


@dataclass(frozen=True, slots=True)
class Interval:
    """A stage that may hold segments [first, end): its recomputation and times in seconds.

    ``total_s``: a lower bound of forward and backward where the frontier is not exact, else their sum.
    """

    first: int
    end: int
    label: Label
    forward_s: float
    total_s: float
    transfer_s: float
    per_step_s: float
    weight_backward_s: float = 0.0

    @property
    def times(self) -> StageTimes:
        backward_s = self.total_s - self.forward_s
        return StageTimes(self.forward_s, backward_s, self.transfer_s, min(self.weight_backward_s, backward_s))


class _Sums:
    """Of one chain of segments: sums up to each, and the frontier of recomputation."""

    def __init__(self, segments: Sequence[SegmentCost]) -> None:
        self.frontier = Frontier(segments)
        self.forward = [0.0, *accumulate(s.forward_s for s in segments)]
        self.backward = [0.0, *accumulate(s.backward_s for s in segments)]
        self.per_step = [0.0, *accumulate(s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in segments)]
        self.pending = [0, *accumulate(s.pending_bytes for s in segments)]
        self.weight = [0.0, *accumulate(s.weight_backward_s for s in segments)]


class Intervals:
    """The intervals of each of ``len(flights)`` stages, made when asked for.

    ``segments[s]``: what all segments cost on the rank of stage s, the same object where ranks are alike; ``limits_bytes[s]``:
    of a device there. ``flights[s]``: micro-batches that stage s holds at once. ``in_two``: the backward is in two parts, without
    recomputation (zero-bubble).
    """

    def __init__(
        self,
        segments: Sequence[Sequence[SegmentCost]],
        flights: Sequence[int],
        micro_batches: int,
        limits_bytes: Sequence[int],
        in_two: bool = False,
    ) -> None:
        self.segments, self.flights = segments, flights
        self.stages, self.m, self.limits_bytes = len(flights), micro_batches, limits_bytes
        self.count = len(segments[0])
        self.memory_binds = False
        self.in_two = in_two
        sums = {id(chain): _Sums(chain) for chain in segments}
        self._sums = [sums[id(chain)] for chain in segments]
        self.chains = tuple(sums.values())
        self._before = [[0.0, *accumulate(least)] for least in self._least_so_far()]
        self._between = [between_bytes(segments[i], i, self.stages, held) for i, held in enumerate(flights)]
        self._known: dict[tuple[int, int, int], Interval | None] = {}

    def _least_so_far(self) -> Iterator[list[float]]:
        """Of each stage what every segment makes it wait for at least, if it is above."""
        least: list[float] = []
        for number, chain in enumerate(self.segments):
            if number == 0 or chain is not self.segments[number - 1]:
                own = [s.forward_s + (0.0 if self.in_two else s.backward_s) for s in chain]
                least = [min(pair) for pair in zip(least, own, strict=True)] if least else own
            yield least

    @property
    def frontiers(self) -> tuple[Frontier, ...]:
        return tuple(sums.frontier for sums in self.chains)

    def at(self, stage: int, first: int, end: int) -> Interval | None:
        """None where it does not fit the memory."""
        key = (stage, first, end)
        if key not in self._known:
            self._known[key] = self._make(stage, first, end)
        return self._known[key]

    def _make(self, stage: int, first: int, end: int) -> Interval | None:
        flight, limit_bytes = self.flights[stage], self.limit_of(stage, first, end)
        frontier = self._sums[stage].frontier
        label = frontier.fastest(first, end, flight, limit_bytes)
        if label is None or (self.in_two and set(label.recompute) != {"none"}):
            return None
        extra_s = frontier.least_extra_s(first, end, flight, limit_bytes) if label.extra_s else 0.0
        return self._with(stage, first, end, label, extra_s)

    def limit_of(self, stage: int, first: int, end: int) -> int:
        """What is left for states, activations and temporary tensors."""
        pending = self._sums[stage].pending
        waiting = put_off(stage, self.flights[stage]) * (pending[end] - pending[first])
        return self.limits_bytes[stage] - self._between[stage] - waiting

    def each_way(self, stage: int, first: int, end: int) -> list[Interval]:
        """The interval with each way of recomputation for all its segments alike, whatever memory it takes."""
        part = self.segments[stage][first:end]
        found = []
        for word in RECOMPUTATIONS[:1] if self.in_two else RECOMPUTATIONS:
            if all(word in segment.recomputations for segment in part):
                ways = [segment.recomputation(word) for segment in part]
                label = Label(
                    sum(way.extra_s for way in ways),
                    sum(way.kept_bytes for way in ways),
                    max(way.temporary_bytes for way in ways),
                    (word,) * len(part),
                )
                found.append(self._with(stage, first, end, label, label.extra_s))
        return found

    def _with(self, stage: int, first: int, end: int, label: Label, extra_s: float) -> Interval:
        sums = self._sums[stage]
        forward_s = sums.forward[end] - sums.forward[first]
        return Interval(
            first,
            end,
            label,
            forward_s,
            forward_s + sums.backward[end] - sums.backward[first] + extra_s,
            0.0 if stage == self.stages - 1 else self.segments[stage][end - 1].transfer_s,
            sums.per_step[end] - sums.per_step[first],
            sums.weight[end] - sums.weight[first],
        )

    def before_s(self, stage: int, first: int) -> float:
        return self._before[stage][first]

    def over_bytes(self, stage: int, first: int, end: int) -> int:
        """By how much the interval exceeds the memory at least."""
        return self._sums[stage].frontier.least_bytes(first, end, self.flights[stage]) - self.limit_of(
            stage, first, end
        )

    def last_end(self, stage: int) -> int:
        """Where ``stage`` must end at the latest, to leave a segment for every stage behind it."""
        return self.count - (self.stages - stage - 1)

    def below(self, stage: int, first: int, end: int, below_s: float) -> bool:
        """Whether the interval fits, and a step with it can take less than ``below_s``."""
        m = self.m
        if math.isinf(below_s) and not self.in_two:
            frontier = self._sums[stage].frontier
            fits = frontier.may_fit(first, end, self.flights[stage], self.limit_of(stage, first, end))
            if fits is not None:
                return fits
        sums, before_s = self._sums[stage], self.before_s(stage, first)
        plain_s = sums.forward[end] - sums.forward[first] + sums.backward[end] - sums.backward[first]
        if before_s + m * plain_s >= below_s:
            return False
        x = self.at(stage, first, end)
        if x is None or x.label.extra_s > 0:
            self.memory_binds = True
        return x is not None and before_s + m * x.total_s < below_s and m * x.total_s + x.per_step_s < below_s

    def farthest(self, stage: int, first: int, below_s: float) -> int:
        """The last end of an interval of ``stage`` from ``first``; ``first`` where there is none."""
        ends = range(first + 1, self.last_end(stage) + 1)
        return first + bisect_left(ends, True, key=lambda end: not self.below(stage, first, end, below_s))

    def nearest(self, stage: int, end: int, below_s: float) -> int:
        """The first start of an interval of ``stage`` up to ``end``; ``end`` where there is none."""
        starts = range(stage, end)
        return stage + bisect_left(starts, True, key=lambda first: self.below(stage, first, end, below_s))

    def greedy(self, below_s: float) -> tuple[int, ...] | None:
        """The starts of the split in which every stage takes all it can; None where that leaves segments over."""
        starts = [0]
        for stage in range(self.stages):
            end = self.farthest(stage, starts[-1], below_s)
            if end == starts[-1]:
                return None
            starts.append(end)
        return tuple(starts) if starts[-1] == self.count else None

    def fitting(self) -> tuple[int, ...] | None:
        """The starts of a split that fits the memory; None when there is none."""
        found = self.greedy(math.inf)
        if found is not None:
            return found
        came: list[dict[int, int]] = []
        reached = [0]
        for stage in range(self.stages):
            row: dict[int, int] = {}
            for first in reached:
                for end in range(first + 1, self.farthest(stage, first, math.inf) + 1):
                    row.setdefault(end, first)
            came.append(row)
            reached = sorted(row)
        if self.count not in reached:
            return None
        starts = [self.count]
        for row in reversed(came):
            starts.append(row[starts[-1]])
        return tuple(reversed(starts))

    def even(self) -> tuple[tuple[int, ...] | None, float]:
        """The starts of a split that fits, greedy for the least T at which it fits, and a lower bound of any step."""
        found = self.fitting()
        total_s = self._least_total_s()
        low, high = total_s * self.m / self.stages, math.inf
        longest_s = max(sums.forward[-1] + sums.backward[-1] for sums in self.chains)
        if found is None or not total_s:
            return found, low
        step = low
        while high > low * (1 + EVEN_TO) and low < 1e3 * longest_s * self.m:
            middle = min(low + step, (low + high) / 2)
            split = self.greedy(middle)
            if split is not None:
                found, high = split, middle
            elif all(self.within(middle)):
                break  # memory, not time, stands in the way of the greedy split
            else:
                low, step = middle, step * 2
        return found, low

    def _least_total_s(self) -> float:
        """Forward and backward of the chain, each segment on the rank that takes least."""
        if len(self.chains) == 1:
            return self.chains[0].forward[-1] + self.chains[0].backward[-1]
        distinct = {id(chain): chain for chain in self.segments}.values()
        return sum(min(s.forward_s + s.backward_s for s in same) for same in zip(*distinct, strict=True))

    def within(self, below_s: float) -> list[list[Interval]]:
        """Of each stage, the intervals that a split of less than ``below_s`` may have, in order; [] where there is none.

        ``memory_binds`` then says whether others would be among them if there were more memory.
        """
        self.memory_binds = False
        n, stages = self.count, self.stages
        latest, earliest = [0], [n]
        for stage in range(stages):
            latest.append(max(self.farthest(stage, latest[-1], below_s), latest[-1]))
        for stage in reversed(range(stages)):
            earliest.append(min(self.nearest(stage, earliest[-1], below_s), earliest[-1]))
        earliest.reverse()
        rows: list[list[Interval]] = []
        reached = {0}
        for stage in range(stages):
            row: list[Interval] = []
            for first in sorted(x for x in reached if earliest[stage] <= x <= latest[stage]):
                end = self.farthest(stage, first, below_s)
                for stop in range(max(first + 1, earliest[stage + 1]), min(end, latest[stage + 1]) + 1):
                    x = self.at(stage, first, stop)
                    assert x is not None
                    row.append(x)
            rows.append(row)
            reached = {x.end for x in row}
        needed = {n}
        for stage in reversed(range(stages)):
            rows[stage] = [x for x in rows[stage] if x.end in needed]
            needed = {x.first for x in rows[stage]}
        return rows
