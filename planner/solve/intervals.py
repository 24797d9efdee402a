"""What a stage may hold: intervals of the chain, which of them fit, and which can be part of a fast enough split.

    Interval(stage, first, end)     segments [first, end) on one stage: the fastest recomputation that fits, and its times

A split can only take less than T when every stage s, holding [i, j), has

    before(i) + m total(i, j) < T            the first micro-batch comes through the stages above, and the last gradient goes back
    m total(i, j) + per_step(i, j) < T

(planner.simulate.lower_bound_s), where total is forward plus backward, and before(i) that of the segments above i, or their
forward alone where the backward is in two parts.
Both sides grow with j and shrink with growing i, so the starts that stage s can have lie between two ends, found greedily:

    latest[s + 1]      the farthest end of an interval that starts at latest[s]
    earliest[s]        the first start of an interval that ends at earliest[s + 1]

``Intervals.within(T)`` lists the intervals between them: a few around an even split where T is close to the best.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.ir.plan import RECOMPUTATIONS
from planner.segment_cost import SegmentCost
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


class Intervals:
    """The intervals of each of ``len(flights)`` stages, made when asked for.

    ``flights[s]``: micro-batches that stage s holds at once. ``in_two``: the backward is in two parts, without
    recomputation (zero-bubble).
    """

    def __init__(
        self,
        segments: Sequence[SegmentCost],
        flights: Sequence[int],
        micro_batches: int,
        limit_bytes: int,
        in_two: bool = False,
    ) -> None:
        self.segments, self.flights = segments, flights
        self.stages, self.m, self.limit_bytes = len(flights), micro_batches, limit_bytes
        self.frontier = Frontier(segments)
        self.memory_binds = False
        self.in_two = in_two
        self._forward = [0.0, *accumulate(s.forward_s for s in segments)]
        self._backward = [0.0, *accumulate(s.backward_s for s in segments)]
        self._per_step = [0.0, *accumulate(s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in segments)]
        self._weight = [0.0, *accumulate(s.weight_backward_s for s in segments)]
        self._known: dict[tuple[int, int, int], Interval | None] = {}

    def at(self, stage: int, first: int, end: int) -> Interval | None:
        """None where it does not fit the memory."""
        key = (stage, first, end)
        if key not in self._known:
            self._known[key] = self._make(stage, first, end)
        return self._known[key]

    def _make(self, stage: int, first: int, end: int) -> Interval | None:
        flight = self.flights[stage]
        label = self.frontier.fastest(first, end, flight, self.limit_bytes)
        if label is None or (self.in_two and set(label.recompute) != {"none"}):
            return None
        extra_s = self.frontier.least_extra_s(first, end, flight, self.limit_bytes) if label.extra_s else 0.0
        return self._with(stage, first, end, label, extra_s)

    def each_way(self, stage: int, first: int, end: int) -> list[Interval]:
        """The interval with each way of recomputation for all its segments alike, whatever memory it takes."""
        part = self.segments[first:end]
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
        forward_s = self._forward[end] - self._forward[first]
        return Interval(
            first,
            end,
            label,
            forward_s,
            forward_s + self._backward[end] - self._backward[first] + extra_s,
            0.0 if stage == self.stages - 1 else self.segments[end - 1].transfer_s,
            self._per_step[end] - self._per_step[first],
            self._weight[end] - self._weight[first],
        )

    def before_s(self, first: int) -> float:
        return self._forward[first] + (0.0 if self.in_two else self._backward[first])

    def last_end(self, stage: int) -> int:
        """Where ``stage`` must end at the latest, to leave a segment for every stage behind it."""
        return len(self.segments) - (self.stages - stage - 1)

    def below(self, stage: int, first: int, end: int, below_s: float) -> bool:
        """Whether the interval fits, and a step with it can take less than ``below_s``."""
        m = self.m
        if math.isinf(below_s) and not self.in_two:
            fits = self.frontier.may_fit(first, end, self.flights[stage], self.limit_bytes)
            if fits is not None:
                return fits
        plain_s = self._forward[end] - self._forward[first] + self._backward[end] - self._backward[first]
        if self.before_s(first) + m * plain_s >= below_s:
            return False
        x = self.at(stage, first, end)
        if x is None or x.label.extra_s > 0:
            self.memory_binds = True
        return (
            x is not None and self.before_s(first) + m * x.total_s < below_s and m * x.total_s + x.per_step_s < below_s
        )

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
        return tuple(starts) if starts[-1] == len(self.segments) else None

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
        if len(self.segments) not in reached:
            return None
        starts = [len(self.segments)]
        for row in reversed(came):
            starts.append(row[starts[-1]])
        return tuple(reversed(starts))

    def even(self) -> tuple[tuple[int, ...] | None, float]:
        """The starts of a split that fits, greedy for the least T at which it fits, and a lower bound of any step."""
        found = self.fitting()
        total_s = self._forward[-1] + self._backward[-1]
        low, high = total_s * self.m / self.stages, math.inf
        if found is None or not total_s:
            return found, low
        step = low
        while high > low * (1 + EVEN_TO) and low < 1e3 * total_s * self.m:
            middle = min(low + step, (low + high) / 2)
            split = self.greedy(middle)
            if split is not None:
                found, high = split, middle
            elif all(self.within(middle)):
                break  # memory, not time, stands in the way of the greedy split
            else:
                low, step = middle, step * 2
        return found, low

    def within(self, below_s: float) -> list[list[Interval]]:
        """Of each stage, the intervals that a split of less than ``below_s`` may have, in order; [] where there is none.

        ``memory_binds`` then says whether others would be among them if there were more memory.
        """
        self.memory_binds = False
        n, stages = len(self.segments), self.stages
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
