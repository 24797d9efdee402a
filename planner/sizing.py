"""The smallest and the cheapest cluster that trains a model fast enough: a search for every size worth looking at.

For each kind of machine, the numbers of devices 1, 2, 4, ... until the limit is met and device-hours go up again; then by
bisection the multiples of a node between the last that misses the limit and the first that meets it. A size is not searched
where a bound already says no:

    memory     weights, gradients and optimizer state in equal shares exceed a device
    time       work of the whole batch / devices, without any communication, exceeds the limit

    device-hours = devices x step time x steps / 3600          price = device-hours x price of a device-hour
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodels.hardware import Cluster
from planner.errors import BadInput, Infeasible, OutOfTime
from planner.ir.plan import Plan
from planner.report.sizing import S_PER_HOUR, STEPS_WITHOUT_A_NUMBER, SizeRow, Sizing
from planner.sizes import format_bytes, format_seconds
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.ways_out import least_states_bytes

Say = Callable[[str], None]
DEFAULT_MOST_DEVICES = 256


@dataclass(frozen=True)
class Wanted:
    """What a size must do. ``step_limit_s``: most seconds of a step. ``prices``: of a device-hour, by cluster name."""

    step_limit_s: float | None = None
    steps: int | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    most_devices: int = DEFAULT_MOST_DEVICES


def size_on(
    problem: Problem,
    clusters: Sequence[Cluster],
    wanted: Wanted,
    *,
    memory_limit_bytes: int | None = None,
    time_limit_s: float | None = None,
    say: Say = lambda what: None,
) -> Sizing:
    """Every size of ``clusters`` worth looking at for the graph of ``problem``, whose own cluster does not matter.

    ``memory_limit_bytes``: of a device; default: what each has. ``time_limit_s``: of each search.
    """
    rows: list[SizeRow] = []
    for cluster in clusters:
        rows += _Sizes(problem, cluster, wanted, memory_limit_bytes, time_limit_s, say).rows()
    graph = problem.graph
    return Sizing(problem.name, graph.batch_size, wanted.step_limit_s, wanted.steps, tuple(rows))


class _Sizes:
    """The sizes of one kind of machine."""

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        wanted: Wanted,
        memory_limit_bytes: int | None,
        time_limit_s: float | None,
        say: Say,
    ) -> None:
        limit = cluster.device.memory_bytes
        if memory_limit_bytes is not None:
            limit = min(limit, memory_limit_bytes)
        self.problem = replace(problem, cluster=cluster, memory_limit_bytes=limit)
        self.cluster, self.wanted, self.time_limit_s, self.say = cluster, wanted, time_limit_s, say
        self.work_s: float | None = None
        self.known: dict[int, SizeRow] = {}

    def rows(self) -> list[SizeRow]:
        self._ascend()
        self._between()
        return [self.known[count] for count in sorted(self.known)]

    def _ascend(self) -> None:
        """Powers of two, until the limit is met and more devices cost more."""
        last: float | None = None
        count = 1
        while count <= self.wanted.most_devices:
            row = self.at(count)
            if row.meets_limit and row.device_hours is not None:
                if last is not None and row.device_hours > last:
                    return
                last = row.device_hours
            count *= 2

    def _between(self) -> None:
        """Multiples of a node between the last power of two that misses the limit and the first that meets it."""
        meeting = [count for count, row in self.known.items() if row.meets_limit]
        missing = [count for count in self.known if meeting and count < min(meeting)]
        node = self.cluster.gpus_per_node
        if not meeting or not missing or min(meeting) <= node:
            return
        below, above = max(missing) // node, min(meeting) // node
        while above - below > 1:
            middle = (below + above) // 2
            if self.at(middle * node).meets_limit:
                above = middle
            else:
                below = middle

    def at(self, count: int) -> SizeRow:
        if count not in self.known:
            self.say(f"solving for {count} x {self.cluster.name}")
            plan, refused = self._plan(count)
            self.known[count] = self._row(count, plan, refused)
        return self.known[count]

    def _row(self, count: int, plan: Plan | None, refused: str) -> SizeRow:
        name, node = self.cluster.name, self.cluster.gpus_per_node
        if plan is None:
            return SizeRow(name, count, node, None, refused=refused)
        limit = self.wanted.step_limit_s
        hours = count * plan.objective_s * (self.wanted.steps or STEPS_WITHOUT_A_NUMBER) / S_PER_HOUR
        each = self.wanted.prices.get(name)
        price = None if each is None else each * hours
        return SizeRow(name, count, node, plan, limit is None or plan.objective_s <= limit, hours, price)

    def _plan(self, count: int) -> tuple[Plan | None, str]:
        problem = replace(self.problem, cluster=self.cluster.with_gpus(count))
        limit = problem.memory_limit_bytes
        least = least_states_bytes(problem)
        if least > limit:
            return None, f"weights and their state alone take {format_bytes(least)} of {format_bytes(limit)} a device"
        evaluator = Evaluator(problem)
        least_s = self._work_s(evaluator) / count
        if self.wanted.step_limit_s is not None and least_s > self.wanted.step_limit_s:
            return None, f"the work alone takes {format_seconds(least_s)} a step"
        try:
            return search(problem, self.time_limit_s, evaluator=evaluator), ""
        except Infeasible as error:
            if error.shortage is None:
                return None, str(error)
            return None, f"{format_bytes(error.shortage.missing_bytes)} of memory missing"
        except OutOfTime:
            return None, "no plan found in the time allowed"

    def _work_s(self, evaluator: Evaluator) -> float:
        """Seconds of the whole batch's work on one device."""
        if self.work_s is None:
            try:
                self.work_s = evaluator.work_s(1, 1)
            except BadInput:
                self.work_s = 0.0
        return self.work_s
