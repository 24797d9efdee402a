"""The search: branch and bound over the space, best bound first, proven over all of it.

The space (space.py) is a tree: the degree of tp, then degrees and micro-batches, then order of axes, ZeRO stage and schedule.
What is left below, letters, stages and recomputation, is solved for. A lower bound of a part of the space:

    region, shape, configuration        Bounds (bounds.py), for any letters

The part of smallest bound is taken: its bound made sharper, or it is split, or, a configuration, solved. The search ends when
the smallest bound left is no better than the best plan. What is pruned keeps the bound that pruned it; a coarse part that was
never split stands in the record for all it contains.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from planner.errors import BadInput, OutOfTime
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.segment_cost import SegmentCost
from planner.solve.bounds import Bounds
from planner.solve.configuration import FAST, Evaluator
from planner.solve.linear_program import NoSolution
from planner.solve.problem import Problem
from planner.solve.shortage import infeasible
from planner.solve.space import Configuration, Part, Region, Shape, Space
from planner.solve.stages import StageChoice, choose_stages

Progress = Callable[..., None]
Within = Callable[[Configuration], bool]
# Two objectives closer than this are equal.
RELATIVE_TOLERANCE = 1e-9
# With tp, where stages prove nothing of other letters, a split that single moves leave this much slower is not worth more.
PROMISING = 1.1
TOO_LARGE = "does not fit the memory"
TRIED_TOO_LARGE = "no strategies that were tried fit the memory"
# Configurations picked by hand are tried where the best plan takes so many times the work of all devices.
USUAL_FROM = 1.05
# Without a time limit the search stops after so much work: operators put into 0/1 programs (about a millisecond each), and
# a split of the chain into stages by its size. The same work on every machine gives the same plan. Of it, what may go into
# looking for a good plan first, and what is left for the proof at least.
MOST_WORK, MOST_WORK_A_SEGMENT = 2000, 65
USUAL_WORK, USUAL_WORK_A_SEGMENT = 3500, 25
PROOF_WORK = 1000


@dataclass(order=True)
class _Entry:
    """A part of the space and a lower bound of it; of equal bounds the finer part comes first.

    ``sharpness``: how often the bound was made sharper, _sharpest at most.
    """

    bound_s: float
    depth: int
    number: int
    part: Part = field(compare=False)
    sharpness: int = field(compare=False, default=0)


def _sharpest(part: Part) -> int:
    """How many bounds there are of a part, each sharper than the one before (Bounds.of)."""
    if isinstance(part, Region) or part.mesh.tp == 1:
        return 1
    return 3 if isinstance(part, Configuration) else 2


def work_of_stages(configuration: Configuration, segments: int) -> int:
    """What choosing stages takes: by the intervals to choose from, and by the actions of the schedule, simulated many times."""
    actions = 2 * configuration.stages * configuration.micro_batches
    return configuration.mesh.pp * segments // 10 + actions // 50


def _depth(part: Part) -> int:
    if isinstance(part, Region):
        return 3 if part.mesh is None else 2
    return 1 if isinstance(part, Shape) else 0


@dataclass(frozen=True)
class _Found:
    configuration: Configuration
    variant: str
    choice: StageChoice


@dataclass(frozen=True)
class _Outcome:
    """What came out of a configuration: a bound of all its plans, infinite where none fits, and the best plan found.
    ``fits``: whether anything that was tried fits the memory."""

    bound_s: float
    objective_s: float | None
    fits: bool = True


class _Search:
    def __init__(
        self, evaluator: Evaluator, deadline: float | None, progress: Progress | None, within: Within | None
    ) -> None:
        self.evaluator, self.problem = evaluator, evaluator.problem
        self.space = Space(self.problem.cluster, self.problem.graph.batch_size, evaluator.segments)
        self.deadline, self.progress, self.within = deadline, progress, within
        self.best: _Found | None = None
        self.searched: list[Searched] = []
        self.too_large: list[Configuration] = []
        self.heap: list[_Entry] = []
        self.bounds = Bounds(evaluator, self.space)
        self.numbers = itertools.count()
        self.interrupted = self.done = False
        self.total = 0
        self.start = evaluator.work_done
        self.usual_work = USUAL_WORK + USUAL_WORK_A_SEGMENT * evaluator.segments
        self.most_work = MOST_WORK + MOST_WORK_A_SEGMENT * evaluator.segments
        self.outcomes: dict[Configuration, _Outcome] = {}

    @property
    def best_s(self) -> float:
        return self.best.choice.estimate.step_time_s if self.best else math.inf

    @property
    def to_win_s(self) -> float:
        """What a plan must take less than."""
        return self.best_s * (1 - RELATIVE_TOLERANCE)

    def cannot_win(self, bound_s: float) -> bool:
        return bound_s >= self.to_win_s

    def run(self) -> Plan:
        """Pure data parallelism first, which needs no program and gives a plan to beat; then everything else."""
        pure = Region(1, Mesh(dp=self.problem.cluster.gpus))
        self._push([pure], self._cheapest_s())
        self._explore(pure)
        with self._keeping_the_best():
            self._try_usual()
        self.most_work = max(self.most_work, self.evaluator.work_done - self.start + PROOF_WORK)
        self._push(self.space.regions(), self._cheapest_s())
        self._explore(pure)
        return self._result()

    def _try_usual(self) -> None:
        """A better plan to beat: from what is picked by hand, step by step to the best neighbour.

        Not recorded: the search comes upon them again.
        """
        if self.best_s <= USUAL_FROM * self._cheapest_s():
            return
        states = sum(c.states_bytes for c in self.evaluator.ideal_costs(Configuration(Mesh(), 1, 0, "1f1b")))
        self._try_each(self.space.usual(states, self.problem.memory_limit_bytes))
        at: Configuration | None = None
        while self.best is not None and self.best.configuration != at:
            at = self.best.configuration
            self._try_each((c for c in self.space.neighbours(at) if c not in self.outcomes), at)

    def _try_each(self, configurations: Iterable[Configuration], at: Configuration | None = None) -> None:
        """Solve those that might win by their bounds; of those near ``at``, first what differs in one respect only, in the
        usual order of axes and with few stages a rank."""
        promising = []
        for number, configuration in enumerate(configurations):
            if self.within is None or self.within(configuration):
                try:
                    bound_s = self.bounds.of(configuration)
                except BadInput:
                    continue
                is_unusual = configuration.mesh != configuration.shape.mesh
                steps = 0 if at is None else at.differs(configuration)
                chunks = 0 if at is None else configuration.chunks
                promising.append((steps + is_unusual, chunks, bound_s, number, configuration))
        for *_, bound_s, _, configuration in sorted(promising):
            if self.cannot_win(bound_s) or self._must_stop(self.usual_work):
                continue
            try:
                if not self.cannot_win(self.bounds.of(configuration, 1)):
                    self._outcome(configuration)
            except BadInput:
                continue

    def _explore(self, done: Region) -> None:
        """Take the parts in the heap until none can win. ``done``: a region not to be taken again."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            if self.cannot_win(entry.bound_s):
                self._record_rest(entry, "pruned")
            elif self._must_stop(self.most_work):
                self._record_rest(entry, "open")
            elif entry.part != done or not self.done:
                self._try(entry)
            if self.progress is not None:
                finished = len(self.searched)
                self.total = max(self.total, finished + len(self.heap))
                self.progress("searching", finished, self.total)
        self.done = True

    def _try(self, entry: _Entry) -> None:
        with self._keeping_the_best():
            try:
                self._take(entry)
            except KeyboardInterrupt:
                heapq.heappush(self.heap, entry)  # still to be done
                raise

    @contextmanager
    def _keeping_the_best(self) -> Iterator[None]:
        """An interrupt ends the search where there is a plan already, and goes on to the user where there is none."""
        try:
            yield
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True

    def _push(self, parts: Iterable[Part], bound_s: float) -> None:
        for part in parts:
            if not isinstance(part, Configuration) or self.within is None or self.within(part):
                heapq.heappush(self.heap, _Entry(bound_s, _depth(part), next(self.numbers), part))

    def _must_stop(self, most_work: float) -> bool:
        """On an interrupt, after the time limit, or without one after so much work."""
        if self.deadline is not None:
            return self.interrupted or time.monotonic() > self.deadline
        return self.interrupted or (self.best is not None and self.evaluator.work_done - self.start > most_work)

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _cheapest_s(self) -> float:
        """The work of the whole batch, spread evenly over all devices by what they can do."""
        return self.evaluator.work_s(1, 1) / self.evaluator.capacity()

    def _take(self, entry: _Entry) -> None:
        """Make the bound of a part sharper, or split it, or solve it."""
        part = entry.part
        try:
            if entry.sharpness < _sharpest(part):
                bound_s = max(self.bounds.of(part, entry.sharpness, self.to_win_s), entry.bound_s)
                if math.isinf(bound_s):
                    self._record_too_large(part, entry.bound_s)
                else:
                    heapq.heappush(self.heap, replace(entry, bound_s=bound_s, sharpness=entry.sharpness + 1))
            elif isinstance(part, Region):
                parts = self.space.narrower(part) if part.mesh is None else self.space.shapes(part.mesh)
                self._push(parts, entry.bound_s)
            elif isinstance(part, Shape):
                self._push(self.space.configurations(part), entry.bound_s)
            else:
                self._solve(part, entry.bound_s)
        except BadInput as error:
            self._record(part, entry.bound_s, "infeasible", reason=str(error))

    # --- solving ------------------------------------------------------------------------------------------------------

    def _solve(self, configuration: Configuration, bound_s: float) -> None:
        """Solve a configuration and record what came out."""
        outcome = self._outcome(configuration)
        bound_s = max(bound_s, outcome.bound_s)
        if not outcome.fits:
            self.too_large.append(configuration)
        if math.isinf(bound_s):
            self._record(configuration, 0.0, "infeasible", reason=TOO_LARGE)
        elif outcome.objective_s is not None:
            self._record(configuration, min(bound_s, outcome.objective_s), "solved", outcome.objective_s)
        else:
            reason = "" if outcome.fits else TRIED_TOO_LARGE
            self._record(configuration, bound_s, "pruned" if self.cannot_win(bound_s) else "tried", reason=reason)

    def _outcome(self, configuration: Configuration) -> _Outcome:
        """Solve for stages and recomputation under the fast letters, and under others where memory is short; once."""
        if configuration not in self.outcomes:
            try:
                self.outcomes[configuration] = self._solved(configuration)
            except NoSolution:
                self.outcomes[configuration] = _Outcome(math.inf, None, False)
        return self.outcomes[configuration]

    def _solved(self, configuration: Configuration) -> _Outcome:
        found: list[_Found] = []
        tried: list[tuple[tuple[SegmentCost, ...], ...]] = []
        proven = math.inf
        for variant in self.evaluator.variants(configuration):
            if variant != FAST and any(not f.choice.memory_binds for f in found):
                break
            costs = self.evaluator.rank_costs(configuration, self.evaluator.letters(configuration, variant))
            if costs in tried:
                continue
            tried.append(costs)
            self.evaluator.work_done += work_of_stages(configuration, self.evaluator.segments)
            choice = choose_stages(
                costs,
                configuration.mesh.pp,
                configuration.micro_batches,
                configuration.schedule,
                self.evaluator.problem.limits_bytes(configuration),
                chunks=configuration.chunks,
                upper_bound_s=min([self.best_s, *(f.choice.estimate.step_time_s for f in found)]),
                promising_s=PROMISING * self.best_s if configuration.mesh.tp > 1 else math.inf,
                deadline=self.deadline,
                seed=self.problem.seed,
            )
            if isinstance(choice, StageChoice):
                found.append(_Found(configuration, variant, choice))
            proven = min(proven, choice.bound_s)
        # Letters other than those tried may be better, or fit where these do not: without tp there are none.
        bound_s = proven if configuration.mesh.tp == 1 else 0.0
        if not found:
            return _Outcome(bound_s, None, math.isfinite(proven))
        best = min(found, key=lambda f: f.choice.estimate.step_time_s)
        if best.choice.estimate.step_time_s < self.best_s * (1 - RELATIVE_TOLERANCE):
            self.best = best
        return _Outcome(bound_s, best.choice.estimate.step_time_s)

    # --- the record ---------------------------------------------------------------------------------------------------

    def _record(
        self,
        part: Part,
        bound_s: float,
        outcome: str,
        objective_s: float | None = None,
        reason: str = "",
    ) -> None:
        self.searched.append(Searched(str(part), bound_s, outcome, objective_s, reason))

    def _record_too_large(self, part: Part, bound_s: float) -> None:
        if isinstance(part, Configuration):
            self.too_large.append(part)
        self._record(part, bound_s, "infeasible", reason=TOO_LARGE)

    def _record_rest(self, entry: _Entry, outcome: str) -> None:
        for left in sorted([entry, *self.heap]):
            self._record(left.part, left.bound_s, outcome)
        self.heap.clear()

    def _result(self) -> Plan:
        if self.best is None:
            if any(s.outcome == "open" for s in self.searched):
                raise OutOfTime(
                    "the time limit passed before a plan was found. Give the search more time (time_limit)."
                )
            raise infeasible(self.evaluator, self.too_large, (s.reason for s in self.searched))
        best = self.best
        searched = []
        for item in self.searched:
            if item.configuration == str(best.configuration) and item.outcome == "solved":
                item = replace(item, outcome="best")
            searched.append(item)
        if not any(item.outcome == "best" for item in searched):
            searched.append(Searched(str(best.configuration), self.best_s, "best", self.best_s))
        open_bounds = [s.bound_s for s in searched if s.outcome != "infeasible"]
        bound_s = min([*open_bounds, self.best_s])
        order = {"best": 0, "solved": 1, "tried": 2, "open": 3, "pruned": 4, "infeasible": 5}
        searched.sort(key=lambda s: (order[s.outcome], s.objective_s or s.bound_s, s.configuration))
        return self.evaluator.build_plan(
            best.configuration,
            self.evaluator.letters(best.configuration, best.variant),
            best.choice.stages,
            best.choice.recompute,
            "auto",
            bound_s,
            tuple(searched),
        )


def search(
    problem: Problem,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    within: Within | None = None,
    evaluator: Evaluator | None = None,
) -> Plan:
    """The best plan of the space, with its proven lower bound.

    ``within``: search only the configurations it holds for. ``evaluator``: one of ``problem`` that was used before, which
    remembers what it computed.

    Raises Infeasible saying what is missing (planner.ways_out finds what would do); OutOfTime when the limit passed before
    any plan was found. When it passes later, or on Ctrl-C, the best plan so far comes back with its gap.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    return _Search(evaluator or Evaluator(problem), deadline, progress, within).run()
