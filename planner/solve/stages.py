"""The split of the chain into stages and the segments to recompute: exact, by a small CP-SAT program and the simulation.

The objective is ``planner.simulate.estimate_step``. For a stage s holding segments [i, j) the number of micro-batches in
flight is known, so the fastest recomputation that fits is known too (frontier.py); a slower one never helps, because an
event simulation with a longer backward never ends earlier. What is left is where to cut. With t = F + B of a stage for one
micro-batch, transfers r, gradient reduction G and update U a step, m micro-batches:

    bound    max over j of  sum_{i<j} (t_i + 2 r_i) + m t_j + G_0 + U_0      (the first stage ends last of all)
             max over j of  sum_{i<j} (F_i + r_i) + m t_j + G_j + U_j

    one_interval      each stage holds one interval                         sum_ij y[s,i,j] = 1
    contiguous        a stage begins where the one before ends              sum j y[s,i,j] = sum i y[s+1,i,j]
    bounds            the objective is at least every term of the bound

The search starts from an even split, which already rules out most intervals. The program minimises the bound; its answer is
simulated; the split is excluded and the program solved again for a bound below the best simulated time, until there is
none: then the best is proven. Times are integers, a 2^40th of the scale, rounded down. Where the frontier is not exact, t
holds the least extra time instead of the one found, and the bound remains one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from planner.ir.plan import Estimate
from planner.schedules import in_flight
from planner.segment_cost import SegmentCost, stage_estimate
from planner.simulate import estimate_step
from planner.solve.frontier import Frontier, Label

UNITS = 2**40
MOST_ROUNDS = 40
# A bound this close to what was found proves it.
RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class StageChoice:
    """``bound_s``: no split of these segments is faster. ``proven``: the estimate meets the bound (to 1e-9)."""

    stages: tuple[tuple[int, int], ...]
    recompute: tuple[bool, ...]
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
    time.monotonic() after which the best so far comes back, with its bound. Needs 1 <= pp <= number of segments.
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
        recompute = tuple(flag for x in chosen for flag in x.label.recompute)
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
        """The intervals of ``stage`` with which the first bound can stay below ``below_s``."""
        return [
            i
            for i, x in enumerate(self.intervals[stage])
            if x.first in before_s and before_s[x.first] + self.m * x.total_s < below_s
        ]

    def solve(self, upper_bound_s: float, deadline: float | None, seed: int) -> StageChoice:
        best = self.evaluate(self.even_split())
        bound = 0.0
        before = self.least_before_s()
        below = min(upper_bound_s, best.estimate.step_time_s)
        allowed = [self.candidates(stage, before[stage], below) for stage in range(self.pp)]
        program = _Program(self, allowed, seed)
        for number in range(MOST_ROUNDS):
            # A split that was tried is left out of later bounds; that is right only if its own time is known exactly.
            binds = self.frontier.exact or number == 0
            below = min(upper_bound_s, best.estimate.step_time_s)
            left = None if deadline is None else max(0.05, deadline - time.monotonic())
            picks, found_bound, complete = program.next_split(below, left)
            if picks is None:
                bound = below if complete and binds else bound
                break
            bound = max(bound, found_bound) if binds else bound
            choice = self.evaluate(picks)
            if choice.estimate.step_time_s < best.estimate.step_time_s:
                best = choice
            if not complete or bound >= min(upper_bound_s, best.estimate.step_time_s) * (1 - 1e-12):
                break
            if deadline is not None and time.monotonic() > deadline:
                break
            program.exclude(picks)
        bound = min(bound, best.estimate.step_time_s)
        return replace(best, bound_s=bound, proven=met(bound, best.estimate.step_time_s))


def met(bound_s: float, found_s: float) -> bool:
    """Whether the bound proves what was found."""
    return found_s - bound_s <= RELATIVE_TOLERANCE * found_s


class _Program:
    """The CP-SAT program of one problem; solved again and again with more excluded."""

    def __init__(self, problem: _Problem, allowed: Sequence[Sequence[int]], seed: int) -> None:
        self.problem, self.allowed, self.seed = problem, allowed, seed
        slowest = sum(max(x.total_s + 2 * x.transfer_s + x.per_step_s for x in row) for row in problem.intervals)
        self.units_per_s = UNITS / (slowest * problem.m) if slowest else 1.0
        self.model = cp_model.CpModel()
        self.rows = [[problem.intervals[s][i] for i in numbers] for s, numbers in enumerate(allowed)]
        self.y = [[self.model.new_bool_var(f"y{s}_{i}") for i in numbers] for s, numbers in enumerate(allowed)]
        self._one_interval()
        self._contiguous()
        self.objective = self.model.new_int_var(0, UNITS * 4, "bound")
        self._bounds()
        self.model.minimize(self.objective)
        self.excluded: list[tuple[int, ...]] = []

    def _units(self, seconds: float) -> int:
        return math.floor(seconds * self.units_per_s)

    def _one_interval(self) -> None:
        for row in self.y:
            self.model.add_exactly_one(row)

    def _contiguous(self) -> None:
        for stage in range(self.problem.pp - 1):
            here, following = self.rows[stage], self.rows[stage + 1]
            end = cp_model.LinearExpr.weighted_sum(self.y[stage], [x.end for x in here])
            first = cp_model.LinearExpr.weighted_sum(self.y[stage + 1], [x.first for x in following])
            self.model.add(end == first)

    def _bounds(self) -> None:
        m = self.problem.m

        def total(stage: int, figure: str) -> cp_model.LinearExpr:
            row = self.rows[stage]
            figures = {
                "m": [m * x.total_s for x in row],
                "round": [x.total_s + 2 * x.transfer_s for x in row],
                "way": [x.forward_s + x.transfer_s for x in row],
                "step": [x.per_step_s for x in row],
            }[figure]
            return cp_model.LinearExpr.weighted_sum(self.y[stage], [self._units(f) for f in figures])

        before_round = before_way = cp_model.LinearExpr.sum([])
        for stage in range(self.problem.pp):
            work = total(stage, "m")
            self.model.add(self.objective >= before_round + work + total(0, "step"))
            self.model.add(self.objective >= before_way + work + total(stage, "step"))
            before_round = before_round + total(stage, "round")
            before_way = before_way + total(stage, "way")

    def exclude(self, picks: Sequence[int]) -> None:
        chosen = [self.y[stage][self.allowed[stage].index(i)] for stage, i in enumerate(picks)]
        self.model.add_bool_or([y.negated() for y in chosen])

    def next_split(self, below_s: float, time_limit_s: float | None) -> tuple[tuple[int, ...] | None, float, bool]:
        """The split of least bound below ``below_s``: (picks or None, its proven bound in seconds, solved to the end)."""
        if not all(self.rows):
            return None, below_s, True
        self.model.add(self.objective <= max(self._units(below_s) - 1, 0))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.catch_sigint_signal = False
        if time_limit_s is not None:
            solver.parameters.max_time_in_seconds = time_limit_s
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None, below_s, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, 0.0, False
        picks = tuple(
            next(i for i, y in zip(numbers, row, strict=True) if solver.boolean_value(y))
            for numbers, row in zip(self.allowed, self.y, strict=True)
        )
        return picks, solver.best_objective_bound / self.units_per_s, status == cp_model.OPTIMAL
