"""The search over configurations: best first, pruned by lower bounds, proven over the whole space.

The space: every mesh (pp, dp, tp) of all devices; every number of micro-batches that divides a dp rank's batch; GPipe and
1F1B; ZeRO stage 0 and 3; for each, the strategies of every operator (letters.py), the split of the chain into stages and the
segments to recompute (stages.py).

    bound(configuration)      work / (dp tp) on pp stages, no communication, nothing per step:

        t = work of one micro-batch / tp        T >= t / (1 - (1 - 1/m)^pp)

    and t includes the forward passes that must be run again because not even an ideal sharding of the activations fits
    (Evaluator.forced_recomputation_s). For pp = 1 this is m t. In general prefix_j + m t_j <= T for each stage j
    (planner.simulate.lower_bound_s), and then the times t_j sum to no more than T (1 - (1 - 1/m)^pp).

Pure data parallelism needs no solver and gives a first plan. The other configurations are taken by their bound: first a
cheap one (the work of the whole batch on all devices), then this, then the plan itself; the search ends when the smallest
bound left is no better than the best plan. A pruned configuration keeps the bound that pruned it.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from planner.errors import BadInput, Infeasible, OutOfTime, Shortage
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.sizes import format_bytes
from planner.solve.configuration import FAST, LEAN, Configuration, Evaluator, Problem
from planner.solve.stages import StageChoice, StageInfeasible, choose_stages

Progress = Callable[..., None]
Within = Callable[[Configuration], bool]
# Two objectives closer than this are equal.
RELATIVE_TOLERANCE = 1e-9


@dataclass(order=True)
class _Entry:
    bound_s: float
    order: int
    configuration: Configuration = field(compare=False)
    refined: bool = field(compare=False, default=False)


@dataclass(frozen=True)
class _Found:
    configuration: Configuration
    variant: str
    choice: StageChoice


def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def configurations(gpus: int, batch: int, segments: int) -> Iterator[Configuration]:
    """Every configuration of the space, in a fixed order."""
    for pp in divisors(gpus):
        if pp > segments:
            continue
        for dp in divisors(gpus // pp):
            if batch < dp:
                continue
            mesh = Mesh(pp, dp, gpus // pp // dp)
            for micro_batches in micro_batch_counts(batch, dp):
                # One stage runs each micro-batch forward and backward before the next: 1f1b with one in flight.
                schedules = ["1f1b"] if pp == 1 else ["1f1b", "gpipe"] if micro_batches >= pp else ["gpipe"]
                for schedule in schedules:
                    for zero in (0, 3) if dp > 1 else (0,):
                        yield Configuration(mesh, micro_batches, zero, schedule)


def micro_batch_counts(batch: int, dp: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying: those that divide a rank's rows; powers of two where there are none."""
    rows = batch // dp
    powers = tuple(2**i for i in range(rows.bit_length()))
    if batch % dp:
        return powers
    even = divisors(rows)
    return even if len(even) > 2 or rows < 4 else tuple(sorted({*even, *powers}))


def pipeline_bound_s(micro_batch_s: float, pp: int, micro_batches: int) -> float:
    """Least step time of pp stages whose times for one micro-batch sum to ``micro_batch_s``."""
    if pp == 1:
        return micro_batches * micro_batch_s
    return micro_batch_s / (1.0 - (1.0 - 1.0 / micro_batches) ** pp)


class _Search:
    def __init__(
        self, evaluator: Evaluator, deadline: float | None, progress: Progress | None, within: Within | None
    ) -> None:
        self.evaluator = evaluator
        self.problem, self.deadline, self.progress, self.within = evaluator.problem, deadline, progress, within
        self.best: _Found | None = None
        self.searched: list[Searched] = []
        self.refused: dict[tuple[int, int], str] = {}
        self.least_missing: tuple[int, Configuration, int] | None = None

    @property
    def best_s(self) -> float:
        return self.best.choice.estimate.step_time_s if self.best else math.inf

    def run(self) -> Plan:
        gpus = self.problem.cluster.gpus
        space = configurations(gpus, self.problem.graph.batch_size, self.evaluator.segments)
        everything = [c for c in space if self.within is None or self.within(c)]
        cheap = self._cheap_bound_s()
        entries = [_Entry(cheap, i, c) for i, c in enumerate(everything)]
        heap = self._easy_first(entries)
        total, interrupted = len(entries), False
        while heap:
            entry = heapq.heappop(heap)
            if entry.bound_s >= self.best_s * (1 - RELATIVE_TOLERANCE):
                self._record_rest([entry, *heap], "pruned")
                break
            if self._out_of_time() or interrupted:
                self._record_rest([entry, *heap], "open")
                break
            try:
                again = self._take(entry)
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                interrupted = True
                heapq.heappush(heap, entry)
                continue
            if again is not None:
                heapq.heappush(heap, again)
            if self.progress is not None:
                self.progress("searching", total - len(heap), total)
        return self._result()

    def _easy_first(self, entries: list[_Entry]) -> list[_Entry]:
        """Solve what needs no solver, pure data parallelism, for a first best plan; the heap of all others."""
        easy: list[_Entry] = []
        others: list[_Entry] = []
        for entry in entries:
            mesh = entry.configuration.mesh
            refined = self._take(entry) if mesh.pp == mesh.tp == 1 else entry
            if refined is not None:
                (easy if refined.refined else others).append(refined)
        for entry in sorted(easy):
            if entry.bound_s < self.best_s * (1 - RELATIVE_TOLERANCE) and not self._out_of_time():
                self._take(entry)
            else:
                others.append(entry)
        heapq.heapify(others)
        return others

    def _out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _cheap_bound_s(self) -> float:
        """The work of the whole batch, spread evenly over all devices."""
        try:
            return self.evaluator.work_s(1, 1) / self.problem.cluster.gpus
        except BadInput:
            return 0.0

    def _take(self, entry: _Entry) -> _Entry | None:
        """Refine the entry's bound, or solve it."""
        configuration = entry.configuration
        mesh, key = configuration.mesh, (configuration.mesh.dp, configuration.micro_batches)
        if key in self.refused:
            self._record(configuration, entry.bound_s, "infeasible", reason=self.refused[key])
            return None
        if not entry.refined:
            try:
                work = self.evaluator.work_s(*key)
            except BadInput as error:
                self.refused[key] = str(error)
                self._record(configuration, entry.bound_s, "infeasible", reason=str(error))
                return None
            again = self.evaluator.forced_recomputation_s(configuration)
            bound = pipeline_bound_s((work + again) / mesh.tp, mesh.pp, configuration.micro_batches)
            return _Entry(max(bound, entry.bound_s), entry.order, configuration, True)
        self._solve(configuration, entry.bound_s)
        return None

    def _solve(self, configuration: Configuration, bound_s: float) -> None:
        found: list[_Found] = []
        proven = too_slow = math.inf
        infeasible: StageInfeasible | None = None
        for variant in (FAST, LEAN):
            if variant == LEAN:
                if configuration.mesh.tp == 1:
                    continue
                work = self.evaluator.letters(configuration, FAST).work_bound_s
                least = pipeline_bound_s(work, configuration.mesh.pp, configuration.micro_batches)
                if least >= self.best_s * (1 - RELATIVE_TOLERANCE):
                    too_slow = min(too_slow, least)
                    continue
            costs = self.evaluator.costs(configuration, self.evaluator.letters(configuration, variant))
            work = sum(c.forward_s + c.backward_s for c in costs)
            least = pipeline_bound_s(work, configuration.mesh.pp, configuration.micro_batches)
            if least >= self.best_s * (1 - RELATIVE_TOLERANCE):
                too_slow = min(too_slow, least)
                continue
            choice = choose_stages(
                costs,
                configuration.mesh.pp,
                configuration.micro_batches,
                configuration.schedule,
                self.problem.memory_limit_bytes,
                upper_bound_s=self.best_s,
                deadline=self.deadline,
                seed=self.problem.seed,
            )
            if isinstance(choice, StageInfeasible):
                infeasible = (
                    choice if infeasible is None or choice.missing_bytes < infeasible.missing_bytes else infeasible
                )
                continue
            found.append(_Found(configuration, variant, choice))
            proven = min(proven, choice.bound_s)
        if not found and math.isfinite(too_slow):
            self._record(configuration, max(bound_s, too_slow), "pruned")
            return
        if not found:
            assert infeasible is not None
            missing = (infeasible.missing_bytes, configuration, infeasible.stage)
            if self.least_missing is None or missing[0] < self.least_missing[0]:
                self.least_missing = missing
            reason = f"{format_bytes(infeasible.missing_bytes)} too much on stage {infeasible.stage}"
            self._record(configuration, bound_s, "infeasible", reason=reason)
            return
        best = min(found, key=lambda f: f.choice.estimate.step_time_s)
        self._record(configuration, max(bound_s, min(proven, too_slow)), "solved", best.choice.estimate.step_time_s)
        if best.choice.estimate.step_time_s < self.best_s * (1 - RELATIVE_TOLERANCE):
            self.best = best

    # --- the record ---------------------------------------------------------------------------------------------------

    def _record(
        self,
        configuration: Configuration,
        bound_s: float,
        outcome: str,
        objective_s: float | None = None,
        reason: str = "",
    ) -> None:
        self.searched.append(Searched(str(configuration), bound_s, outcome, objective_s, reason))

    def _record_rest(self, entries: list[_Entry], outcome: str) -> None:
        for entry in sorted(entries):
            self._record(entry.configuration, entry.bound_s, outcome)

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
        open_bounds = [s.bound_s for s in searched if s.outcome in ("open", "pruned", "solved", "best")]
        bound_s = min([*open_bounds, self.best_s])
        order = {"best": 0, "solved": 1, "open": 2, "pruned": 3, "infeasible": 4}
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
        if self.least_missing is None:
            reasons = sorted({s.reason for s in self.searched})
            return Infeasible(
                f"no plan exists on {gpus} devices: "
                + ("; ".join(reasons[:3]) or "the batch or model cannot be split so")
            )
        missing, configuration, stage = self.least_missing
        limit = self.problem.memory_limit_bytes
        where = f"stage {stage} of " if configuration.mesh.pp > 1 else ""
        return Infeasible(
            f"{self.problem.name} does not fit on {gpus} x {self.problem.cluster.name} with "
            f"{format_bytes(limit)} each: the nearest plan, {where}{configuration} with "
            f"recomputation where it helps, is {format_bytes(missing)} over on its fullest device",
            Shortage(missing, str(configuration), stage, limit),
        )


def search(
    problem: Problem,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    suggest: bool = True,
    within: Within | None = None,
    evaluator: Evaluator | None = None,
) -> Plan:
    """The best plan of the space, with its proven lower bound.

    ``within``: search only the configurations it holds for. ``evaluator``: one of ``problem`` that was used before, which
    remembers what it computed.

    Raises Infeasible saying what is missing and (``suggest``) how many devices would do; OutOfTime when the limit passed
    before any plan was found. When it passes later, or on Ctrl-C, the best plan so far comes back with its gap.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    try:
        return _Search(evaluator or Evaluator(problem), deadline, progress, within).run()
    except Infeasible as error:
        if not suggest:
            raise
        raise Infeasible(f"{error}. {_way_out(problem)}") from None


def _way_out(problem: Problem) -> str:
    """The smallest doubling of the devices that fits, found by searching it."""
    gpus = problem.cluster.gpus
    for factor in (2, 4, 8, 16):
        larger = replace(problem, cluster=problem.cluster.with_gpus(gpus * factor))
        try:
            plan = search(larger, time_limit_s=20.0, suggest=False)
        except (Infeasible, OutOfTime):
            continue
        return (
            f"What would fit: {gpus * factor} devices ({plan.configuration}), a smaller batch, or a lower precision; "
            "recomputation, ZeRO-3 and every number of micro-batches were tried"
        )
    return "A smaller batch, a lower precision or devices with more memory are needed"
