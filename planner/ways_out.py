"""Nothing fits: the least change of each kind after which something does, each found by solving.

    more memory        the shortage of the nearest configuration, then a search with that much more
    more devices       doublings until a plan exists, then bisection between, in quarters of the count at hand
    smaller batch      one sample first, as no batch fits where that does not; then bisection over halvings of the batch
    lower precision    the model traced again in half precision
    recomputation, ZeRO, micro-batches      of a hand-picked strategy, its other words as they are: the search has tried all

``fits`` of a count is not monotone in general (a prime number of devices divides little): what is found is the smallest of
those tried. A count that cannot hold the weights, gradients and optimizer state even in equal shares is not searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from costmodels.memory import state_bytes
from costmodels.mixed import MixedCluster
from planner.errors import BadInput, Infeasible, MeshwrightError, OutOfTime, Shortage
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.report.ways_out import WayOut, filling, ways_out_figures, ways_out_text
from planner.sizes import format_bytes
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.strategies import plan_by_hand

# (rows or None, precision or None) -> the model traced again with that batch, or in that precision.
Retrace = Callable[[int | None, str | None], Graph]
Say = Callable[[str], None]
MOST_DOUBLINGS = 7
ALL_SEARCHES_S = 60.0
HALF = "bfloat16"
NONE_FITS = "none fits"
OUT_OF_TIME = "not tried: out of time"


def infeasible_with_ways_out(
    error: Infeasible, problem: Problem, retrace: Retrace | None = None, say: Say = lambda what: None
) -> Infeasible:
    """``error`` with what would help: in its message, and as figures."""
    ways = ways_out(problem, error.shortage, retrace, say)
    message = str(error)
    nearest = next((way.plan for way in ways if way.kind == MORE_MEMORY and way.plan is not None), None)
    if nearest is not None:
        message += f" (there: {filling(nearest)})"
    message += ". Recomputation, every ZeRO stage and every number of micro-batches were tried."
    if any(way.plan is not None for way in ways):
        message += f" What would fit:\n{ways_out_text(ways)}"
    else:
        message += f" Nothing tried would fit: {', '.join(dict.fromkeys(way.kind for way in ways))}"
    return Infeasible(message, error.shortage, ways_out_figures(error.shortage, ways))


MORE_MEMORY = "more memory"


def ways_out(
    problem: Problem,
    shortage: Shortage | None,
    retrace: Retrace | None = None,
    say: Say = lambda what: None,
    time_limit_s: float = ALL_SEARCHES_S,
) -> tuple[WayOut, ...]:
    """The ways out of ``problem``, for which a search found nothing that fits, each kind with the least that does.

    ``shortage``: what that search said. ``retrace``: without it the batch and the precision stay. ``time_limit_s``: of all
    searches together. An interrupt ends it with what was found so far.
    """
    finder = _Finder(problem, retrace, say, time.monotonic() + time_limit_s)
    found: list[WayOut] = []
    try:
        for way in finder.ways(shortage):
            found.append(way)
    except KeyboardInterrupt:
        say("interrupted; what was found so far")
    return tuple(found)


@dataclass(frozen=True)
class _Finder:
    problem: Problem
    retrace: Retrace | None
    say: Say
    deadline: float

    def ways(self, shortage: Shortage | None) -> Iterator[WayOut]:
        if shortage is not None:
            yield self._more_memory(shortage)
        yield self._more_devices()
        if self.retrace is not None:
            yield self._smaller_batch(self.retrace)
            if self.problem.precision in ("float32", "float64"):
                yield self._lower_precision(self.retrace)

    def solved(self, problem: Problem, within: Callable[[Configuration], bool] | None = None) -> Plan | None:
        """The best plan of ``problem``; None where nothing fits. Raises OutOfTime."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime(OUT_OF_TIME)
        if least_states_bytes(problem) > problem.mean_limit_bytes:
            return None
        try:
            return search(problem, left, within=within)
        except Infeasible:
            return None

    # --- kinds --------------------------------------------------------------------------------------------------------

    def _more_memory(self, shortage: Shortage) -> WayOut:
        limit, missing = shortage.memory_limit_bytes, shortage.missing_bytes
        self.say(f"solving with {format_bytes(missing)} more memory")
        larger = self.problem.with_more_memory(missing)
        try:
            plan = self.solved(larger, lambda c: str(c) == shortage.configuration)
        except OutOfTime:
            return WayOut(MORE_MEMORY, "", None, OUT_OF_TIME)
        change = f"{format_bytes(limit + missing)} a device, {format_bytes(missing)} more"
        return WayOut(MORE_MEMORY, change, plan, "" if plan is not None else NONE_FITS)

    def _more_devices(self) -> WayOut:
        kind, gpus = "more devices", self.problem.cluster.gpus

        def at(count: int) -> Plan | None:
            self.say(f"solving on {count} devices")
            return self.solved(replace(self.problem, cluster=self.problem.cluster.with_gpus(count)))

        found: Plan | None = None
        failed = gpus
        try:
            for doubling in range(1, MOST_DOUBLINGS + 1):
                found = at(gpus * 2**doubling)
                if found is not None:
                    break
                failed = gpus * 2**doubling
            if found is None:
                return WayOut(kind, "", None, f"none up to {failed} devices fits")
            step = gpus if isinstance(self.problem.cluster, MixedCluster) else max(1, failed // 4)
            found = least(failed // step, found.mesh.size // step, lambda n: at(n * step), found)
        except OutOfTime:
            if found is None:
                return WayOut(kind, "", None, OUT_OF_TIME)
        return WayOut(kind, f"{found.mesh.size} devices instead of {gpus}", found)

    def _smaller_batch(self, retrace: Retrace) -> WayOut:
        kind, rows = "smaller batch", self.problem.graph.batch_size

        def at(count: int) -> Plan | None:
            self.say(f"solving for a batch of {count}")
            return self.solved(replace(self.problem, graph=retrace(count, None)))

        halvings = [rows >> shift for shift in range(1, rows.bit_length())]
        if not halvings:
            return WayOut(kind, "", None, "the batch is one sample")
        found: Plan | None = None
        try:
            found = at(halvings[-1])
            if found is None:
                return WayOut(kind, "", None, f"not even a batch of {halvings[-1]} fits")
            if len(halvings) > 1:
                found = least(-1, len(halvings) - 1, lambda i: at(halvings[i]), found)
        except OutOfTime:
            if found is None:
                return WayOut(kind, "", None, OUT_OF_TIME)
        except MeshwrightError as error:
            if found is None:
                return WayOut(kind, "", None, str(error).partition(". ")[0])
        return WayOut(kind, f"{found.global_batch} samples instead of {rows}", found)

    def _lower_precision(self, retrace: Retrace) -> WayOut:
        kind = "lower precision"
        self.say(f"solving in {HALF}")
        try:
            plan = self.solved(replace(self.problem, graph=retrace(None, HALF), precision=HALF))
        except OutOfTime:
            return WayOut(kind, "", None, OUT_OF_TIME)
        except MeshwrightError as error:
            return WayOut(kind, "", None, str(error).partition(". ")[0])
        return WayOut(kind, f"{HALF} instead of {self.problem.precision}", plan, "" if plan is not None else NONE_FITS)


def least(below: int, above: int, at: Callable[[int], Plan | None], found: Plan) -> Plan:
    """The plan at the least number in (below, above] that has one, by bisection; ``found`` is the one at ``above``."""
    while above - below > 1:
        middle = (below + above) // 2
        plan = at(middle)
        if plan is None:
            below = middle
        else:
            above, found = middle, plan
    return found


def least_states_bytes(problem: Problem) -> float:
    """A lower bound of what a device holds under any plan: weights, gradients and optimizer state in equal shares."""
    total = 0
    for leaf in problem.graph.leaves_of("parameter"):
        size = leaf.value.size_bytes
        if leaf.trainable:
            held = state_bytes(size, leaf.value.dtype, problem.optimizer, 0, 1, software=problem.cluster.software)
            total += held.weights_bytes + held.gradients_bytes + held.optimizer_bytes
        else:
            total += size
    return total / problem.cluster.gpus


# --- hand-picked strategies -------------------------------------------------------------------------------------------


def ways_out_by_hand(evaluator: Evaluator, plan: Plan, best: Plan) -> tuple[WayOut, ...]:
    """What a hand-picked strategy that does not fit could change; or else ``best``, the solver's plan."""
    sharded = plan.mesh.dp > 1
    most = _with(plan, recompute="full", **({"zero": 3} if sharded else {}))
    return (
        _first_that_fits(evaluator, "recomputation", [_with(plan, recompute=way) for way in ("selective", "full")]),
        _first_that_fits(evaluator, "ZeRO", [_with(plan, zero=stage) for stage in (1, 2, 3) if sharded]),
        _first_that_fits(evaluator, "micro-batches", [_with(plan, mb=count) for count in _more_micro_batches(plan)]),
        _first_that_fits(evaluator, "recomputation and ZeRO", [most] if sharded else []),
        WayOut("the solver's plan", "strategy auto", best),
    )


def _more_micro_batches(plan: Plan) -> Sequence[int]:
    most = plan.global_batch // plan.mesh.dp
    return [plan.micro_batches * 2**i for i in range(1, 20) if plan.micro_batches * 2**i <= most]


def _with(plan: Plan, **changed: object) -> str:
    """The plan's configuration in the strategy grammar with some words changed."""
    words = plan.configuration.split()
    names = {word.partition("=")[0] for word in words}
    kept = [
        f"{word.partition('=')[0]}={changed[word.partition('=')[0]]}" if word.partition("=")[0] in changed else word
        for word in words
        if word != "recompute=some"
    ]
    return " ".join([*kept, *(f"{name}={value}" for name, value in changed.items() if name not in names)])


def _first_that_fits(evaluator: Evaluator, kind: str, strategies: Sequence[str]) -> WayOut:
    """The first of ``strategies`` that can be used and fits."""
    reason = "does not apply" if not strategies else NONE_FITS
    for text in strategies:
        try:
            plan = plan_by_hand(evaluator, text)
        except BadInput as error:
            reason = str(error).partition(". ")[0]
            continue
        if plan.estimate.fits:
            return WayOut(kind, text, plan)
        over = max(plan.estimate.over_bytes)
        reason = f"{plan.configuration} is {format_bytes(over)} over"
    return WayOut(kind, "", None, reason)
