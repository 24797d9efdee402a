"""The search: branch and bound over the space, best bound first, proven over all of it.

The space (space.py) is a tree: the degree of tp, then degrees and micro-batches, then order of axes, ZeRO stage and schedule.
What is left below, letters, stages and recomputation, is solved for. A lower bound of a part of the space:

    region tp, dp      T >= min (W(all rows) + dp S) / (dp pp)              or that of a smaller dp
                       or the least of its shapes
    shape              T >= schedule_bound_s, the least of all schedules, with  min (m W(rows) + S)      rows = batch / (dp m)
    configuration      the same, with the forward passes that must be run again because not even an ideal sharding of the
                       activations fits (Evaluator.forced_recomputation_s)

W is the time of the operators and conversions of so many rows on the devices of a tp group, all stages together, S what their
parameters cost once a step; the minimum is over all letters (letters.py), with tp on the best links and nothing that travels
on dp or between stages. A step takes as long as its slowest stage, so no less than the mean. W is subadditive, as the price of
every operator and collective is: n runs of rows/n cost no less than one run of them all, so the bound of a region is one. It
grows with dp, in the minimum as S weighs more.

    pipeline_bound_s   t = time of one micro-batch      T >= a t / (1 - (1 - a/m)^pp)            gpipe and 1f1b: a = 1

For pp = 1 this is m t. In general a prefix_j + m t_j <= T for each stage j (planner.simulate.lower_bound_s), and then the times
t_j sum to no more than T (1 - (1 - a/m)^pp) / a. Under zero-bubble a stage waits for the forward of those above alone: a is its
least share.

    schedule_bound_s   also T >= (m W + S + sum_r p_r) / pp

where rank r waits for p_r before its first forward: the forward of the stages above, at least r segments, or r q where every
rank has several stages of at least q segments each; then for their backward as well, but S. And T >= W, or the forward part of
it under zero-bubble: one micro-batch goes through all stages and back.

The part of smallest bound is taken: its bound made sharper, or it is split, or, a configuration, solved. The search ends when
the smallest bound left is no better than the best plan. What is pruned keeps the bound that pruned it; a coarse part that was
never split stands in the record for all it contains.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.errors import BadInput, Infeasible, OutOfTime, Shortage
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.schedules import ZERO_BUBBLE
from planner.sizes import format_bytes
from planner.solve.configuration import FAST, LEAN, VARIANTS, Evaluator, Problem
from planner.solve.linear_program import NoSolution
from planner.solve.space import Configuration, Part, Region, Shape, Space, divisors, micro_batch_counts, schedules
from planner.solve.stages import StageChoice, choose_stages, least_missing

Progress = Callable[..., None]
Work = Sequence[tuple[float, float]]
Within = Callable[[Configuration], bool]
# Two objectives closer than this are equal.
RELATIVE_TOLERANCE = 1e-9
TOO_LARGE = "does not fit the memory"
# Configurations picked by hand are tried where the best plan takes so many times the work of all devices.
USUAL_FROM = 1.05
# Without a time limit the search stops after so much work: operators put into 0/1 programs (about a millisecond each), and
# as many for a split of the chain into stages. The same work on every machine gives the same plan.
MOST_WORK, MOST_WORK_A_SEGMENT = 2000, 65
USUAL_WORK = 0.7


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
    return 2 if isinstance(part, Configuration) and part.mesh.tp > 1 else 1


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
    """What came out of a configuration: a bound of all its plans, infinite where none fits, and the best plan found."""

    bound_s: float
    objective_s: float | None


def pipeline_bound_s(micro_batch_s: float, pp: int, micro_batches: int, share: float = 1.0) -> float:
    """Least step time of pp stages whose times for one micro-batch sum to ``micro_batch_s``.

    ``share``: of the time of the stages above, what a stage waits for at least.
    """
    if pp == 1:
        return micro_batches * micro_batch_s
    return share * micro_batch_s / (1.0 - (1.0 - share / micro_batches) ** pp)


def schedule_bound_s(
    work: Sequence[tuple[float, float]], least_s: float, pp: int, micro_batches: int, schedule: str, chunks: int
) -> float:
    """Least step time of a schedule, whatever the stages. ``work``: forward and backward seconds of every segment, for one
    micro-batch; ``least_s``: all that all stages together do in a step, at least."""
    total_s = sum(forward_s + backward_s for forward_s, backward_s in work)
    least = len(work) // (pp * chunks) if chunks > 1 else 1
    forward_s = [f for f, _ in work[: (pp - 1) * least]]
    late_s = (max(least_s, micro_batches * total_s) + fill_s(forward_s, pp, least)) / pp
    late_s = max(late_s, sum(f for f, _ in work) if schedule == ZERO_BUBBLE else total_s)
    if schedule == ZERO_BUBBLE and chunks == 1:
        share = min((f / (f + b) for f, b in work if f + b > 0), default=0.0)
        return max(late_s, pipeline_bound_s(total_s, pp, micro_batches, share) if share else 0.0)
    if schedule == ZERO_BUBBLE:
        return late_s
    if chunks == 1:
        return max(late_s, pipeline_bound_s(total_s, pp, micro_batches))
    both_s = [f + b for f, b in work[: (pp - 1) * least]]
    return max(late_s, (micro_batches * total_s + fill_s(both_s, pp, least)) / pp)


def fill_s(segments_s: Sequence[float], pp: int, least: int) -> float:
    """What all ranks wait for together, where rank r waits for the first r ``least`` segments."""
    return sum(sum(segments_s[: rank * least]) for rank in range(pp))


def usual(space: Space, limit_bytes: int, evaluator: Evaluator) -> Iterator[Configuration]:
    """What a person might try, under 1f1b: without tp, every number of stages and micro-batches; with tp inside a node, one
    stage, and the fewest whose weights, gradients and optimizer state take at most half the memory."""
    gpus = space.cluster.gpus
    states = sum(c.states_bytes for c in evaluator.ideal_costs(Configuration(Mesh(), 1, 0, "1f1b")))
    for tp in divisors(gpus):
        if tp > space.cluster.gpus_per_node:
            break
        few = next((pp for pp in divisors(gpus // tp) if 2 * states <= pp * tp * limit_bytes), 1)
        for pp in divisors(gpus // tp) if tp == 1 else sorted({1, few}):
            dp = gpus // tp // pp
            if dp > space.batch or pp > space.segments:
                continue
            counts = micro_batch_counts(space.batch, dp)
            for m in counts if tp == 1 else sorted({counts[0], counts[-1], *(n for n in counts if n == 4 * pp)}):
                if ("1f1b", 1) in schedules(pp, m, space.segments):
                    for zero in (0, 3) if dp > 1 else (0,):
                        yield Configuration(Mesh(pp, dp, tp), m, zero, "1f1b")


class _Search:
    def __init__(
        self, evaluator: Evaluator, deadline: float | None, progress: Progress | None, within: Within | None
    ) -> None:
        self.evaluator, self.problem = evaluator, evaluator.problem
        self.space = Space(self.problem.cluster, self.problem.graph.batch_size, evaluator.segments)
        self.deadline, self.progress, self.within = deadline, progress, within
        self.best: _Found | None = None
        self.searched: list[Searched] = []
        self.refused: dict[Shape, str] = {}
        self.too_large: list[Configuration] = []
        self.heap: list[_Entry] = []
        # (tp, 0, 1) -> times by dp of regions; (tp, dp, share of weights held) -> times by micro-batches
        self.least_s: dict[tuple[int, int, float], dict[int, float]] = {}
        self.numbers = itertools.count()
        self.interrupted = self.done = False
        self.total = 0
        self.start = evaluator.work_done
        self.most_work = MOST_WORK + MOST_WORK_A_SEGMENT * evaluator.segments
        self.outcomes: dict[Configuration, _Outcome] = {}

    @property
    def best_s(self) -> float:
        return self.best.choice.estimate.step_time_s if self.best else math.inf

    def cannot_win(self, bound_s: float) -> bool:
        return bound_s >= self.best_s * (1 - RELATIVE_TOLERANCE)

    def run(self) -> Plan:
        """Pure data parallelism first, which needs no program and gives a plan to beat; then everything else."""
        pure = Region(1, Mesh(dp=self.problem.cluster.gpus))
        self._push([pure], self._cheapest_s())
        self._explore(pure)
        self._try_usual()
        self._push(self.space.regions(), self._cheapest_s())
        self._explore(pure)
        return self._result()

    def _try_usual(self) -> None:
        """A better plan to beat: from what is picked by hand, step by step to the best neighbour.

        Not recorded: the search comes upon them again.
        """
        if self.best_s <= USUAL_FROM * self._cheapest_s():
            return
        self._try_each(usual(self.space, self.problem.memory_limit_bytes, self.evaluator))
        at: Configuration | None = None
        while self.best is not None and self.best.configuration != at:
            at = self.best.configuration
            self._try_each(c for c in self.space.neighbours(at) if c not in self.outcomes)

    def _try_each(self, configurations: Iterable[Configuration]) -> None:
        """Solve those that might win: the usual order of axes and few stages a rank first, then by their bounds."""
        promising = []
        for number, configuration in enumerate(configurations):
            if self.within is None or self.within(configuration):
                try:
                    bound_s = self._bound_s(configuration, 0)
                    is_unusual = configuration.mesh != configuration.shape.mesh
                    promising.append((is_unusual, configuration.chunks, bound_s, number, configuration))
                except BadInput:
                    continue
        for *_, bound_s, _, configuration in sorted(promising):
            if self.cannot_win(bound_s) or self._must_stop(USUAL_WORK):
                continue
            try:
                self._outcome(configuration)
            except BadInput:
                continue
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                self.interrupted = True

    def _explore(self, done: Region) -> None:
        """Take the parts in the heap until none can win. ``done``: a region not to be taken again."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            if self.cannot_win(entry.bound_s):
                self._record_rest(entry, "pruned")
            elif self._must_stop(1.0):
                self._record_rest(entry, "open")
            elif entry.part != done or not self.done:
                self._try(entry)
            if self.progress is not None:
                finished = len(self.searched)
                self.total = max(self.total, finished + len(self.heap))
                self.progress("searching", finished, self.total)
        self.done = True

    def _try(self, entry: _Entry) -> None:
        try:
            self._take(entry)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
            heapq.heappush(self.heap, entry)

    def _push(self, parts: Iterable[Part], bound_s: float) -> None:
        for part in parts:
            if not isinstance(part, Configuration) or self.within is None or self.within(part):
                heapq.heappush(self.heap, _Entry(bound_s, _depth(part), next(self.numbers), part))

    def _must_stop(self, share: float) -> bool:
        """On an interrupt, after the time limit, or without one after so much of MOST_WORK."""
        if self.deadline is not None:
            return self.interrupted or time.monotonic() > self.deadline
        return self.interrupted or (
            self.best is not None and self.evaluator.work_done - self.start > share * self.most_work
        )

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _cheapest_s(self) -> float:
        """The work of the whole batch, spread evenly over all devices."""
        return self.evaluator.work_s(1, 1) / self.problem.cluster.gpus

    def _take(self, entry: _Entry) -> None:
        """Make the bound of a part sharper, or split it, or solve it."""
        part = entry.part
        try:
            if entry.sharpness < _sharpest(part):
                bound_s = max(self._bound_s(part, entry.sharpness), entry.bound_s)
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

    def _bound_s(self, part: Part, sharpness: int) -> float:
        """A lower bound of a part of the space. Raises BadInput where the batch cannot be cut so.

        The first of a configuration is from what is known; the second solves its program.
        """
        if isinstance(part, Region):
            return self._region_bound_s(part)
        mesh, m = part.mesh, part.micro_batches
        if isinstance(part, Shape):
            return self._shape_bound_s(part, self.evaluator.work(mesh.dp, m), 0.0)
        key = (mesh.tp, mesh.dp, self.evaluator.held_share(part))
        solved = self.least_s.setdefault(key, {})
        if sharpness and m not in solved:
            solved[m] = self.evaluator.least_letters_s(part)
        known = max((least_s for fewer, least_s in solved.items() if m % fewer == 0), default=0.0)
        return self._configuration_bound_s(part, known)

    def _region_bound_s(self, region: Region) -> float:
        """From its shapes, or the nearest smaller dp whose program is solved, where that is enough; else by its own."""
        mesh = region.mesh
        if mesh is None:
            regions = tuple(self.space.narrower(region))
            return self._region_bound_s(regions[0]) if regions else math.inf
        share = region.tp / self.problem.cluster.gpus
        filled_s = min((self._bound_of_work_s(shape) for shape in self.space.shapes(mesh)), default=math.inf)
        if math.isinf(filled_s):
            return 0.0  # no shape is possible; each will say why
        if self.cannot_win(filled_s):
            return filled_s
        solved = self.least_s.setdefault((region.tp, 0, 1.0), {})
        known = max((least_s for dp, least_s in solved.items() if dp <= mesh.dp), default=0.0) * share
        if not self.cannot_win(known) and mesh.dp not in solved:
            solved[mesh.dp] = self.evaluator.least_s(region.tp, 1, 1, mesh.dp)
            known = solved[mesh.dp] * share
        return max(known, filled_s)

    def _bound_of_work_s(self, shape: Shape) -> float:
        """The bound of a shape without its program; infinite where the batch cannot be cut so."""
        try:
            return self._shape_bound_s(shape, self.evaluator.work(shape.mesh.dp, shape.micro_batches), 0.0)
        except BadInput:
            return math.inf

    def _shape_bound_s(self, shape: Shape, work: Work, least_s: float) -> float:
        """The least bound of any schedule."""
        mesh, m = shape.mesh, shape.micro_batches
        own = tuple((f / mesh.tp, b / mesh.tp) for f, b in work)
        kinds = schedules(mesh.pp, m, self.evaluator.segments)
        return min((schedule_bound_s(own, least_s, mesh.pp, m, *kind) for kind in kinds), default=math.inf)

    def _configuration_bound_s(self, part: Configuration, least_s: float) -> float:
        """That of its schedule, with what travels on dp, what is done once a step, and what must be computed again."""
        mesh, m = part.mesh, part.micro_batches
        again_s = self.evaluator.forced_recomputation_s(part) / mesh.tp
        if math.isinf(again_s) or (again_s and part.schedule == ZERO_BUBBLE):
            return math.inf
        ideal = self.evaluator.ideal_costs(part)
        own = tuple((c.forward_s / mesh.tp, c.backward_s / mesh.tp) for c in ideal)
        once_s = sum(c.gradient_sync_per_step_s + c.optimizer_per_step_s for c in ideal) / mesh.tp
        work_s = sum(f + b for f, b in own)
        bound_s = schedule_bound_s(own, max(least_s, m * work_s + once_s), mesh.pp, m, part.schedule, part.chunks)
        again_bound_s = (m * (again_s + work_s) + once_s) / mesh.pp
        if part.chunks == 1:
            again_bound_s = max(again_bound_s, pipeline_bound_s(work_s + again_s, mesh.pp, m))
        return max(bound_s, again_bound_s) if again_s else bound_s

    # --- solving ------------------------------------------------------------------------------------------------------

    def _solve(self, configuration: Configuration, bound_s: float) -> None:
        """Solve a configuration and record what came out."""
        outcome = self._outcome(configuration)
        bound_s = max(bound_s, outcome.bound_s)
        if math.isinf(bound_s):
            self._record_too_large(configuration, 0.0)
        elif outcome.objective_s is not None:
            self._record(configuration, min(bound_s, outcome.objective_s), "solved", outcome.objective_s)
        else:
            self._record(configuration, bound_s, "pruned" if self.cannot_win(bound_s) else "tried")

    def _outcome(self, configuration: Configuration) -> _Outcome:
        """Solve for stages and recomputation under the fast letters, and under others where memory is short; once."""
        if configuration not in self.outcomes:
            try:
                self.outcomes[configuration] = self._solved(configuration)
            except NoSolution:
                self.outcomes[configuration] = _Outcome(math.inf, None)
        return self.outcomes[configuration]

    def _solved(self, configuration: Configuration) -> _Outcome:
        found: list[_Found] = []
        proven = math.inf
        for variant in VARIANTS:
            letters = self.evaluator.letters(configuration, variant)
            costs = self.evaluator.costs(configuration, letters)
            self.evaluator.work_done += configuration.stages * len(costs) // 10
            choice = choose_stages(
                costs,
                configuration.mesh.pp,
                configuration.micro_batches,
                configuration.schedule,
                self.problem.memory_limit_bytes,
                chunks=configuration.chunks,
                upper_bound_s=self.best_s,
                deadline=self.deadline,
                seed=self.problem.seed,
            )
            if isinstance(choice, StageChoice):
                found.append(_Found(configuration, variant, choice))
            proven = min(proven, choice.bound_s)
            if configuration.mesh.tp == 1 or (isinstance(choice, StageChoice) and not choice.memory_binds):
                break
        # Letters other than those tried may be better: without tp there are none.
        bound_s = proven if configuration.mesh.tp == 1 or math.isinf(proven) else 0.0
        if not found:
            return _Outcome(bound_s, None)
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
            raise self._infeasible()
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

    def _infeasible(self) -> Infeasible:
        gpus = self.problem.cluster.gpus
        if not self.too_large:
            reasons = sorted({s.reason for s in self.searched})
            return Infeasible(
                f"no plan exists on {gpus} devices: "
                + ("; ".join(reasons[:3]) or "the batch or model cannot be split so")
            )
        missing, configuration, stage = self._least_missing()
        limit = self.problem.memory_limit_bytes
        where = f"stage {stage} of " if configuration.mesh.pp > 1 else ""
        return Infeasible(
            f"{self.problem.name} does not fit on {gpus} x {self.problem.cluster.name} with "
            f"{format_bytes(limit)} each: the nearest plan, {where}{configuration} with "
            f"recomputation where it helps, is {format_bytes(missing)} over on its fullest device",
            Shortage(missing, str(configuration), stage, limit),
        )

    def _least_missing(self) -> tuple[int, Configuration, int]:
        """The least memory that is missing, in which configuration, on which stage."""
        found: tuple[int, Configuration, int] | None = None
        # Zero-bubble and several stages a rank hold no less than 1f1b of as many micro-batches.
        plain = [c for c in self.too_large if c.chunks == 1 and c.schedule != ZERO_BUBBLE]
        least = sorted((self.evaluator.least_bytes(c), i, c) for i, c in enumerate(plain))
        for bytes_, _, configuration in least:
            if found is not None and bytes_ - self.problem.memory_limit_bytes >= found[0]:
                break
            for variant in (FAST, LEAN) if configuration.mesh.tp > 1 else (FAST,):
                try:
                    letters = self.evaluator.letters(configuration, variant)
                except NoSolution:
                    letters = self.evaluator.leanest_letters(configuration)
                costs = self.evaluator.costs(configuration, letters)
                missing = least_missing(
                    costs,
                    configuration.mesh.pp,
                    configuration.micro_batches,
                    configuration.schedule,
                    self.problem.memory_limit_bytes,
                )
                if found is None or missing.missing_bytes < found[0]:
                    found = (missing.missing_bytes, configuration, missing.stage)
        assert found is not None
        return found


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
