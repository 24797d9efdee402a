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
most intervals (intervals.py). Times are integers, a 2^36th of the time of that split, rounded down.

With several stages a rank their memory is shared, so which recomputation is best is no matter of one stage: each way, for all
segments of a stage alike, is an interval of its own, and

    limit_memory      states + temporary + sum over a rank's stages of (micro-batches held) (bytes kept) <= limit

for each vector of micro-batches held at once (planner.schedules.held). Such stages hold even numbers of segments.

Where the frontier is not exact, B is taken with the least extra time instead of the one found, and T remains a bound.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ortools.sat.python import cp_model

from planner.ir.plan import Estimate
from planner.paths import Path, critical_path, fill_and_drain_paths
from planner.schedules import ZERO_BUBBLE, held
from planner.segment_cost import RankCosts, SegmentCost, between_bytes, flight, of_each_rank, put_off, stage_estimates
from planner.simulate import estimate_step
from planner.solve.intervals import Interval, Intervals
from planner.solve.pools import even_intervals

UNITS = 2**36
MOST_ROUNDS = 200
# Actions simulated in all rounds together, at most: about a second each million.
MOST_ACTIONS = 1_000_000
# What CP-SAT may do for one call, in its own unit, about a second each: a limit that cuts every run at the same place.
MOST_WORK = 0.2
# A bound this close to what was found proves it.
RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class StageChoice:
    """``bound_s``: no split of these segments is faster. ``proven``: the estimate meets the bound (to 1e-9).

    ``memory_binds``: with more memory there might be a faster one.
    """

    stages: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...]
    estimate: Estimate
    bound_s: float
    proven: bool
    memory_binds: bool = True


@dataclass(frozen=True)
class NoChoice:
    """No split that fits takes less than ``bound_s``; infinite: none fits."""

    bound_s: float


@dataclass(frozen=True)
class StageInfeasible:
    """The split that misses the memory limit by least misses it by ``missing_bytes`` on ``stage``."""

    missing_bytes: int
    stage: int


def choose_stages(
    segments: RankCosts,
    pp: int,
    micro_batches: int,
    schedule: str,
    memory_limit_bytes: int | Sequence[int],
    *,
    chunks: int = 1,
    upper_bound_s: float = math.inf,
    promising_s: float = math.inf,
    deadline: float | None = None,
    seed: int = 0,
) -> StageChoice | NoChoice:
    """The fastest contiguous split into ``pp`` stages that fits ``memory_limit_bytes``, or NoChoice.

    ``segments``: where pipeline ranks differ, what the segments cost on each; ``memory_limit_bytes`` then one a rank.
    ``chunks``: stages a rank; with several the segments are dealt out evenly, the stages differing by one at most.

    ``upper_bound_s``: stop once no split can be faster than this; the best seen comes back. ``promising_s``: where moving
    single cuts ends above this, go no further, and prove little. ``deadline``: a value of
    time.monotonic() after which the best so far comes back, with its bound; so it does after MOST_WORK. Needs
    1 <= pp * chunks <= number of segments.
    """
    problem = _Problem(segments, pp, micro_batches, schedule, memory_limit_bytes, chunks)
    if chunks > 1:
        return problem.solve_evenly(upper_bound_s, deadline, seed)
    start, least_s = problem.intervals.even()
    if start is None:
        return NoChoice(math.inf)
    choice = problem.evaluate(problem.split(start))
    if pp == 1:
        (only,) = problem.split(start)
        found_s = choice.estimate.step_time_s
        is_exact = all(frontier.exact for frontier in problem.intervals.frontiers)
        bound_s = found_s if is_exact else min(found_s, micro_batches * only.total_s + only.per_step_s)
        return replace(choice, bound_s=bound_s, proven=met(bound_s, found_s), memory_binds=only.label.extra_s > 0)
    best = problem.improve(choice)
    if best.estimate.step_time_s > promising_s:
        return problem.chosen(best, least_s)
    return problem.solve(best, least_s, upper_bound_s, deadline, seed)


def least_missing(
    segments: RankCosts, pp: int, micro_batches: int, schedule: str, memory_limit_bytes: int | Sequence[int]
) -> StageInfeasible:
    """The split whose worst stage misses the limit by least (minimax over splits)."""
    problem = _Problem(segments, pp, micro_batches, schedule, memory_limit_bytes)
    intervals = problem.intervals
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for stage in range(pp):
        row: dict[int, tuple[int, int]] = {}
        for first in best:
            for end in range(first + 1, intervals.last_end(stage) + 1):
                over = intervals.over_bytes(stage, first, end)
                worst = max(best[first], (over, stage), key=lambda x: x[0]) if stage else (over, stage)
                row[end] = min(row.get(end, worst), worst)
        best = row
    missing, stage = best[intervals.count]
    return StageInfeasible(missing, stage)


Split = tuple[Interval, ...]
Best = TypeVar("Best", StageChoice, StageChoice | None)


class _Problem:
    def __init__(
        self,
        segments: RankCosts,
        pp: int,
        micro_batches: int,
        schedule: str,
        limit_bytes: int | Sequence[int],
        chunks: int = 1,
    ) -> None:
        self.segments, self.pp, self.m, self.chunks = of_each_rank(segments, pp), pp, micro_batches, chunks
        self.count = len(self.segments[0]) if pp else 0
        if not 1 <= pp * chunks <= self.count:
            raise ValueError(f"{self.count} segments cannot make {pp * chunks} stages")
        self.schedule = schedule
        self.limits_bytes = (limit_bytes,) * pp if isinstance(limit_bytes, int) else tuple(limit_bytes)
        self.held = held(schedule, pp, micro_batches, chunks)
        flights = [flight(self.held[rank], chunk) for chunk in range(chunks) for rank in range(pp)]
        in_two = schedule == ZERO_BUBBLE
        self.intervals = Intervals(self.segments * chunks, flights, micro_batches, self.limits_bytes * chunks, in_two)

    def split(self, starts: Sequence[int]) -> Split:
        """The intervals between ``starts``, which all fit."""
        found = [self.intervals.at(stage, *edges) for stage, edges in enumerate(itertools.pairwise(starts))]
        return tuple(x for x in found if x is not None)

    def evaluate(self, split: Split) -> StageChoice:
        """Simulate a split."""
        stages = tuple((x.first, x.end) for x in split)
        recompute = tuple(flag for x in split for flag in x.label.recompute)
        estimates = stage_estimates(self.segments, stages, recompute, self.held)
        estimate = estimate_step(estimates, self.schedule, self.m, self.limits_bytes, self.chunks)
        return StageChoice(stages, recompute, estimate, 0.0, False)

    def improve(self, start: StageChoice) -> StageChoice:
        """Move one cut by one segment as long as a simulated step gets faster."""
        best, moved = start, True
        while moved:
            moved = False
            for stage, step in itertools.product(range(self.pp - 1), (-1, 1)):
                edges = [first for first, _ in best.stages] + [self.count]
                edges[stage + 1] += step
                if not edges[stage] < edges[stage + 1] < edges[stage + 2]:
                    continue
                if any(self.intervals.at(s, edges[s], edges[s + 1]) is None for s in (stage, stage + 1)):
                    continue
                choice = self.evaluate(self.split(edges))
                if choice.estimate.step_time_s < best.estimate.step_time_s * (1 - RELATIVE_TOLERANCE):
                    best, moved = choice, True
        return best

    def path(self, split: Split) -> Path:
        return critical_path(
            [x.times for x in split], [x.per_step_s for x in split], self.schedule, self.m, self.chunks
        )

    def solve(
        self, best: StageChoice, least_s: float, upper_bound_s: float, deadline: float | None, seed: int
    ) -> StageChoice:
        """The best split with one stage a rank, from ``best``; none takes less than ``least_s``."""
        below = min(upper_bound_s, best.estimate.step_time_s)
        rows = self.intervals.within(below)
        bound_s = below
        if all(rows) and not met(least_s, below):
            program = _Program(rows, self.pp, below, seed)
            best, bound_s = self.prove(program, best, upper_bound_s, deadline)
        return self.chosen(best, max(bound_s, min(least_s, below)))

    def chosen(self, best: StageChoice, bound_s: float) -> StageChoice:
        found_s = best.estimate.step_time_s
        bound_s = min(bound_s, found_s)
        return replace(best, bound_s=bound_s, proven=met(bound_s, found_s), memory_binds=self.intervals.memory_binds)

    def solve_evenly(self, upper_bound_s: float, deadline: float | None, seed: int) -> StageChoice | NoChoice:
        """The best split with several stages a rank, whose memory they share."""
        longest_s = sum(max(self._at_most_s(s) for s in same) for same in zip(*self.segments, strict=True))
        below = min(upper_bound_s, 1.01 * longest_s)
        program = _Program(self.even_rows(), self.pp, below, seed)
        for rank, vectors in enumerate(self.held):
            program.limit_memory(rank, vectors, self.segments[rank], self.limits_bytes[rank])
        best, bound_s = self.prove(program, None, below, deadline)
        if best is None:
            return NoChoice(math.inf if bound_s > longest_s else bound_s)
        self.intervals.memory_binds = True
        return self.chosen(best, bound_s)

    def _at_most_s(self, segment: SegmentCost) -> float:
        """What a segment adds to a step at most."""
        times_s = segment.forward_s + segment.backward_s + segment.transfer_s
        return 2 * self.m * times_s + segment.gradient_sync_per_step_s + segment.optimizer_per_step_s

    def even_rows(self) -> list[list[Interval]]:
        """Of each stage, the intervals of even length, with each way of recomputation."""
        stages = self.pp * self.chunks
        edges = [even_intervals(self.count, stages, stage) for stage in range(stages)]
        return [[x for edge in mine for x in self.intervals.each_way(i, *edge)] for i, mine in enumerate(edges)]

    def prove(self, program: _Program, best: Best, upper_bound_s: float, deadline: float | None) -> tuple[Best, float]:
        """Add the critical path of what the program finds until no split can be better than the best; and a bound."""
        bound_s = 0.0
        for path in fill_and_drain_paths(self.schedule, self.pp, self.m, self.chunks):
            program.add_path(path)
        for _ in range(max(1, min(MOST_ROUNDS, MOST_ACTIONS // (2 * self.m * self.pp * self.chunks)))):
            below = min(upper_bound_s, best.estimate.step_time_s if best is not None else math.inf)
            left = None if deadline is None else max(0.05, deadline - time.monotonic())
            split, found_bound_s = program.next_split(below, left)
            bound_s = max(bound_s, found_bound_s)
            if split is None:
                break
            choice = self.evaluate(split)
            if best is None or choice.estimate.step_time_s < best.estimate.step_time_s:
                best = choice  # type: ignore[assignment]
            late = deadline is not None and time.monotonic() > deadline
            if late or met(bound_s, min(upper_bound_s, choice.estimate.step_time_s)):
                break
            if not program.add_path(self.path(split)):
                break
        return best, bound_s


def met(bound_s: float, found_s: float) -> bool:
    """Whether the bound proves what was found."""
    return found_s - bound_s <= RELATIVE_TOLERANCE * found_s


class _Program:
    """The CP-SAT program of one problem; solved again and again with more paths."""

    def __init__(self, rows: Sequence[Sequence[Interval]], pp: int, below_s: float, seed: int) -> None:
        self.rows, self.pp, self.seed = rows, pp, seed
        self.units_per_s = UNITS / below_s if below_s else 1.0
        self.model = cp_model.CpModel()
        self.y = [[self.model.new_bool_var(f"y{s}_{x.first}_{x.end}") for x in row] for s, row in enumerate(rows)]
        self.times = [[x.times for x in row] for row in rows]
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
        for stage in range(len(self.rows) - 1):
            ending: dict[int, list[cp_model.IntVar]] = {}
            beginning: dict[int, list[cp_model.IntVar]] = {}
            for x, y in zip(self.rows[stage], self.y[stage], strict=True):
                ending.setdefault(x.end, []).append(y)
            for x, y in zip(self.rows[stage + 1], self.y[stage + 1], strict=True):
                beginning.setdefault(x.first, []).append(y)
            for cut in sorted({*ending, *beginning}):
                self.model.add(sum(ending.get(cut, [])) == sum(beginning.get(cut, [])))

    def limit_memory(
        self, rank: int, vectors: Sequence[tuple[int, ...]], segments: Sequence[SegmentCost], limit_bytes: int
    ) -> None:
        """States, the largest temporary tensors, and at each moment the activations held of every chunk, fit together."""
        temporary = self.model.new_int_var(0, limit_bytes, f"temporary{rank}")
        pending = self.model.new_int_var(0, limit_bytes, f"pending{rank}")
        most = max(map(sum, vectors))
        states, kept = [], []
        for stage in range(rank, len(self.rows), self.pp):
            row = self.rows[stage]
            parts = [segments[x.first : x.end] for x in row]
            self.model.add(temporary >= self._of_interval(stage, [x.label.temporary_bytes for x in row]))
            sizes = [put_off(rank, most) * sum(s.pending_bytes for s in part) for part in parts]
            self.model.add(pending >= self._of_interval(stage, sizes))
            states.append(self._of_interval(stage, [sum(s.states_bytes for s in part) for part in parts]))
            sizes = [x.label.kept_bytes for x in row]
            kept.append(self.model.new_int_var(0, max(sizes), f"kept{stage}"))
            self.model.add(kept[-1] == self._of_interval(stage, sizes))
        room = self.model.new_int_var(0, limit_bytes, f"room{rank}")
        mine = range(rank, len(self.rows), self.pp)
        between = sum(between_bytes(segments, i, len(self.rows), flight(vectors, i // self.pp)) for i in mine)
        self.model.add(room + temporary + pending + sum(states) <= limit_bytes - between)
        for vector in vectors:
            self.model.add(cp_model.LinearExpr.weighted_sum(kept, vector) <= room)

    def _of_interval(self, stage: int, sizes: Sequence[int]) -> cp_model.LinearExpr:
        """Of ``sizes``, one an interval of a stage, that of the interval it holds."""
        return cp_model.LinearExpr.weighted_sum(self.y[stage], sizes)

    def add_path(self, path: Path) -> bool:
        """T is at least the length of ``path``. False when the program holds it already."""
        if path in self.paths:
            return False
        self.paths.add(path)
        units = [
            self._units(path.part_s(stage, times, x.per_step_s))
            for stage, row in enumerate(self.rows)
            for x, times in zip(row, self.times[stage], strict=True)
        ]
        variables = [y for row in self.y for y in row]
        self.model.add(self.objective >= cp_model.LinearExpr.weighted_sum(variables, units))
        return True

    def next_split(self, below_s: float, time_limit_s: float | None) -> tuple[Split | None, float]:
        """A split of least T below ``below_s``, or None, and a lower bound in seconds on the T of all of them."""
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
        split = tuple(
            next(x for x, y in zip(row, variables, strict=True) if solver.boolean_value(y))
            for row, variables in zip(self.rows, self.y, strict=True)
        )
        return split, solver.best_objective_bound / self.units_per_s
