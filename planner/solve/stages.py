"""The split of the chain into stages and the segments to recompute: exact, by a small CP-SAT program and the simulation.

The objective is ``planner.simulate.estimate_step``. For a stage s holding segments [i, j) the number of micro-batches in
flight is known, so the fastest recomputation that fits is known too (frontier.py); a slower one never helps, because an
event simulation with a longer backward never ends earlier. What is left is where to cut. The step time of a split is its
longest path, and any path is a lower bound for any split (planner.paths.critical_path), so

    minimise   T

    one_interval      each stage holds one interval                   sum_ij y[s,i,j] = 1
    contiguous        a stage begins where the one before ends        sum_i y[s,i,e] = sum_j y[s+1,e,j]        for each e
    paths             T >= sum_s (f F_s + b B_s + r transfer_s) + (G + U)_last       for each path, F_s = sum_ij F[i,j] y[s,i,j]

There are too many paths to list. The program starts with the likely ones (fill_and_drain_paths) and solves; the split it
finds is simulated and its critical path added; and again, until the program's T is no less than the best simulated time,
which is then proven. The search starts from an even split, improved by single moves of its cuts, which already rules out
most intervals. Times are integers, a
2^36th of the time of that split, rounded down.

Where the frontier is not exact, B is taken with the least extra time instead of the one found, and T remains a bound.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from planner.ir.plan import Estimate
from planner.paths import Path, critical_path, fill_and_drain_paths
from planner.schedules import in_flight
from planner.segment_cost import SegmentCost, stage_estimate
from planner.simulate import StageTimes, estimate_step
from planner.solve.frontier import Frontier, Label

UNITS = 2**36
MOST_ROUNDS = 200
# What CP-SAT may do for one call, in its own unit, about a second each: a limit that cuts every run at the same place.
MOST_WORK = 20.0
# A bound this close to what was found proves it.
RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class StageChoice:
    """``bound_s``: no split of these segments is faster. ``proven``: the estimate meets the bound (to 1e-9)."""

    stages: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...]
    estimate: Estimate
    bound_s: float
    proven: bool


@dataclass(frozen=True)
class StageInfeasible:
    """The split that misses the memory limit by least misses it by ``missing_bytes`` on ``stage``."""

    missing_bytes: int
    stage: int


@dataclass(frozen=True)
class _Interval:
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

    @property
    def times(self) -> StageTimes:
        return StageTimes(self.forward_s, self.total_s - self.forward_s, self.transfer_s)


def choose_stages(
    segments: Sequence[SegmentCost],
    pp: int,
    micro_batches: int,
    schedule: str,
    memory_limit_bytes: int,
    *,
    upper_bound_s: float = math.inf,
    deadline: float | None = None,
    seed: int = 0,
) -> StageChoice | StageInfeasible:
    """The fastest contiguous split into ``pp`` stages that fits ``memory_limit_bytes``.

    ``upper_bound_s``: stop once no split can be faster than this; the best seen comes back. ``deadline``: a value of
    time.monotonic() after which the best so far comes back, with its bound; so it does after MOST_WORK. Needs
    1 <= pp <= number of segments.
    """
    if not 1 <= pp <= len(segments):
        raise ValueError(f"{len(segments)} segments cannot make {pp} stages")
    problem = _Problem(segments, pp, micro_batches, schedule, memory_limit_bytes)
    if not problem.can_fit():
        return problem.least_missing()
    if pp == 1:
        choice, only = problem.evaluate((0,)), problem.intervals[0][0]
        found_s = choice.estimate.step_time_s
        bound_s = found_s if problem.frontier.exact else min(found_s, micro_batches * only.total_s + only.per_step_s)
        return replace(choice, bound_s=bound_s, proven=met(bound_s, found_s))
    return problem.solve(upper_bound_s, deadline, seed)


class _Problem:
    def __init__(
        self, segments: Sequence[SegmentCost], pp: int, micro_batches: int, schedule: str, limit_bytes: int
    ) -> None:
        self.segments, self.pp, self.m = segments, pp, micro_batches
        self.schedule, self.limit_bytes = schedule, limit_bytes
        self.frontier = Frontier(segments)
        self.flights = [in_flight(schedule, pp, micro_batches, stage) for stage in range(pp)]
        self.intervals = [self._intervals(stage) for stage in range(pp)]

    def _ranges(self, stage: int) -> list[tuple[int, int]]:
        """The intervals stage ``stage`` may hold, leaving one segment for every other stage."""
        n, last = len(self.segments), stage == self.pp - 1
        firsts = range(stage, n - (self.pp - stage) + 1) if stage else (0,)
        return [
            (first, end)
            for first in firsts
            for end in ((n,) if last else range(first + 1, n - (self.pp - stage - 1) + 1))
        ]

    def _intervals(self, stage: int) -> list[_Interval]:
        found = []
        for first, end in self._ranges(stage):
            label = self.frontier.fastest(first, end, self.flights[stage], self.limit_bytes)
            if label is not None:
                part = self.segments[first:end]
                forward = sum(s.forward_s for s in part)
                extra = self.frontier.least_extra_s(first, end, self.flights[stage], self.limit_bytes)
                backward = sum(s.backward_s for s in part) + extra
                per_step = sum(s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in part)
                transfer = 0.0 if stage == self.pp - 1 else part[-1].transfer_s
                found.append(_Interval(first, end, label, forward, forward + backward, transfer, per_step))
        return found

    def can_fit(self) -> bool:
        """Whether some split has an interval that fits on every stage."""
        reached = {0}
        for intervals in self.intervals:
            reached = {x.end for x in intervals if x.first in reached}
        return len(self.segments) in reached

    def least_missing(self) -> StageInfeasible:
        """The split whose worst stage misses the limit by least (minimax over splits)."""
        best: dict[int, tuple[int, int]] = {0: (0, 0)}
        for stage in range(self.pp):
            row: dict[int, tuple[int, int]] = {}
            for first, end in self._ranges(stage):
                if first not in best:
                    continue
                over = self.frontier.least_bytes(first, end, self.flights[stage]) - self.limit_bytes
                worst = max(best[first], (over, stage), key=lambda x: x[0])
                row[end] = min(row.get(end, worst), worst)
            best = row
        missing, stage = best[len(self.segments)]
        return StageInfeasible(missing, stage)

    def evaluate(self, picks: Sequence[int]) -> StageChoice:
        """Simulate the split that takes interval ``picks[s]`` on stage s."""
        chosen = [self.intervals[stage][i] for stage, i in enumerate(picks)]
        estimates = [
            stage_estimate(self.segments[x.first : x.end], x.label.recompute, self.flights[s], s == self.pp - 1)
            for s, x in enumerate(chosen)
        ]
        estimate = estimate_step(estimates, self.schedule, self.m, self.limit_bytes)
        recompute = tuple(word for x in chosen for word in x.label.recompute)
        return StageChoice(tuple((x.first, x.end) for x in chosen), recompute, estimate, 0.0, False)

    def even_split(self) -> tuple[int, ...]:
        """The split whose slowest stage takes least, as interval numbers: where the search starts."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for row in self.intervals:
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for i, x in enumerate(row):
                if x.first in best:
                    slowest, picks = best[x.first]
                    option = (max(slowest, x.total_s), (*picks, i))
                    if x.end not in reached or option < reached[x.end]:
                        reached[x.end] = option
            best = reached
        return best[len(self.segments)][1]

    def improve(self, start: StageChoice) -> StageChoice:
        """Move one cut by one segment as long as a simulated step gets faster."""
        number = [{(x.first, x.end): i for i, x in enumerate(row)} for row in self.intervals]
        best, moved = start, True
        while moved:
            moved = False
            for stage, step in itertools.product(range(self.pp - 1), (-1, 1)):
                edges = [first for first, _ in best.stages] + [len(self.segments)]
                edges[stage + 1] += step
                picks = [row.get(edge) for row, edge in zip(number, itertools.pairwise(edges), strict=True)]
                if None not in picks:
                    choice = self.evaluate([pick for pick in picks if pick is not None])
                    if choice.estimate.step_time_s < best.estimate.step_time_s * (1 - RELATIVE_TOLERANCE):
                        best, moved = choice, True
        return best

    def least_before_s(self) -> list[dict[int, float]]:
        """For each stage: segment -> the least sum of t + 2 r of the stages before it, when it begins there."""
        rows: list[dict[int, float]] = [{0: 0.0}]
        for row in self.intervals[:-1]:
            reached: dict[int, float] = {}
            for x in row:
                if x.first in rows[-1]:
                    before = rows[-1][x.first] + x.total_s + 2 * x.transfer_s
                    reached[x.end] = min(reached.get(x.end, math.inf), before)
            rows.append(reached)
        return rows

    def candidates(self, stage: int, before_s: dict[int, float], below_s: float) -> list[int]:
        """The intervals of ``stage`` with which a step can take less than ``below_s``."""
        return [
            i
            for i, x in enumerate(self.intervals[stage])
            if x.first in before_s
            and before_s[x.first] + self.m * x.total_s < below_s
            and self.m * x.total_s + x.per_step_s < below_s
        ]

    def path(self, picks: Sequence[int]) -> Path:
        chosen = [self.intervals[stage][i] for stage, i in enumerate(picks)]
        return critical_path([x.times for x in chosen], [x.per_step_s for x in chosen], self.schedule, self.m)

    def solve(self, upper_bound_s: float, deadline: float | None, seed: int) -> StageChoice:
        best = self.improve(self.evaluate(self.even_split()))
        before = self.least_before_s()
        below = min(upper_bound_s, best.estimate.step_time_s)
        bound = 0.0
        program = _Program(
            self, [self.candidates(stage, before[stage], below) for stage in range(self.pp)], below, seed
        )
        for path in fill_and_drain_paths(self.schedule, self.pp, self.m):
            program.add_path(path)
        for _ in range(MOST_ROUNDS):
            below = min(upper_bound_s, best.estimate.step_time_s)
            left = None if deadline is None else max(0.05, deadline - time.monotonic())
            picks, found_bound = program.next_split(below, left)
            bound = max(bound, found_bound)
            if picks is None:
                break
            choice = self.evaluate(picks)
            if choice.estimate.step_time_s < best.estimate.step_time_s:
                best = choice
            late = deadline is not None and time.monotonic() > deadline
            if (
                late
                or met(bound, min(upper_bound_s, best.estimate.step_time_s))
                or not program.add_path(self.path(picks))
            ):
                break
        bound = min(bound, best.estimate.step_time_s)
        return replace(best, bound_s=bound, proven=met(bound, best.estimate.step_time_s))


def met(bound_s: float, found_s: float) -> bool:
    """Whether the bound proves what was found."""
    return found_s - bound_s <= RELATIVE_TOLERANCE * found_s


class _Program:
    """The CP-SAT program of one problem; solved again and again with more paths."""

    def __init__(self, problem: _Problem, allowed: Sequence[Sequence[int]], below_s: float, seed: int) -> None:
        self.problem, self.allowed, self.seed = problem, allowed, seed
        self.units_per_s = UNITS / below_s if below_s else 1.0
        self.model = cp_model.CpModel()
        self.rows = [[problem.intervals[s][i] for i in numbers] for s, numbers in enumerate(allowed)]
        self.y = [[self.model.new_bool_var(f"y{s}_{i}") for i in numbers] for s, numbers in enumerate(allowed)]
        self._one_interval()
        self._contiguous()
        self.objective = self.model.new_int_var(0, UNITS, "T")
        self.model.minimize(self.objective)
        self.paths: set[Path] = set()
        self.work = MOST_WORK

    def _units(self, seconds: float) -> int:
        return math.floor(seconds * self.units_per_s)

    def _one_interval(self) -> None:
        for row in self.y:
            self.model.add_exactly_one(row)

    def _contiguous(self) -> None:
        for stage in range(self.problem.pp - 1):
            ending: dict[int, list[cp_model.IntVar]] = {}
            beginning: dict[int, list[cp_model.IntVar]] = {}
            for x, y in zip(self.rows[stage], self.y[stage], strict=True):
                ending.setdefault(x.end, []).append(y)
            for x, y in zip(self.rows[stage + 1], self.y[stage + 1], strict=True):
                beginning.setdefault(x.first, []).append(y)
            for cut in sorted({*ending, *beginning}):
                self.model.add(sum(ending.get(cut, [])) == sum(beginning.get(cut, [])))

    def add_path(self, path: Path) -> bool:
        """T is at least the length of ``path``. False when the program holds it already."""
        if path in self.paths:
            return False
        self.paths.add(path)
        terms = [
            self._units(path.part_s(stage, x.times, x.per_step_s)) * y
            for stage, row in enumerate(self.rows)
            for x, y in zip(row, self.y[stage], strict=True)
        ]
        self.model.add(self.objective >= sum(terms))
        return True

    def next_split(self, below_s: float, time_limit_s: float | None) -> tuple[tuple[int, ...] | None, float]:
        """A split of least T below ``below_s``, or None, and a lower bound in seconds on the T of all of them."""
        if not all(self.rows):
            return None, below_s
        if self.work <= 0:
            return None, 0.0
        self.model.add(self.objective <= max(self._units(below_s) - 1, 0))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.catch_sigint_signal = False
        # With coefficients above 2^32 the presolve of OR-Tools 9.15 calls some feasible programs infeasible.
        solver.parameters.cp_model_presolve = False
        solver.parameters.max_deterministic_time = self.work
        if time_limit_s is not None:
            solver.parameters.max_time_in_seconds = time_limit_s
        status = solver.solve(self.model)
        self.work -= solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, below_s
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, 0.0
        picks = tuple(
            next(i for i, y in zip(numbers, row, strict=True) if solver.boolean_value(y))
            for numbers, row in zip(self.allowed, self.y, strict=True)
        )
        return picks, solver.best_objective_bound / self.units_per_s
