"""The time of one training step: an event simulation of the action list the runtime runs, and its closed forms.

A stage i is given as ``(F_i, B_i, t_i)``: seconds of one forward, of one backward, and of the transfer of one
micro-batch between stages i and i+1 (each way). A stage runs its actions one after the other, each as soon as it can:

    start(iFk) = max(own previous action ended,  end((i-1)Fk) + t_{i-1})
    start(iBk) = max(own previous action ended,  end((i+1)Bk) + t_i)          the last stage: right after its own iFk

A transfer delays the receiver only: the sender goes on and transfers don't queue on the link. ``simulate``, ``replay``.

An idle moment of a stage is *transfer wait* while the tensor it waits for is on its way, and *bubble* otherwise.

Closed forms, with m micro-batches:

    gpipe_makespan_s    sum F + (m-1) max F + sum B + (m-1) max B + 2 sum t            (two flow shops of equal jobs)
    lower_bound_s       max over j of  sum_{i<j} (F_i + B_i + 2 t_i) + m (F_j + B_j)   (any schedule)

The bound: stage j can't start before its first input came through the stages above, works m times, and the last
gradient it sends must go all the way back. 1f1b reaches it for equal stages without transfers.

The objective of a plan, ``estimate_step``: when its own last backward is over, a stage reduces its gradients (G_i, the
exposed part) and updates its weights (U_i), so

    step time = max over i of  end_i + G_i + U_i

and the step of the average stage splits into three parts that sum to it:

    bubble                  idle but for transfer wait, and waiting at the end for the slowest stage
    exposed communication   m (forward and backward communication) + transfer wait + G
    compute                 m (the rest of forward and backward) + U

The step time is the longest path through the actions, ``critical_path``: a sum of times that counts how often the path
runs a forward, a backward and a transfer of each stage. The same path exists whatever the stages take, so with other times
its length is a lower bound on their step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.ir.plan import Estimate, StageEstimate
from planner.ir.schedule import BACKWARD, FORWARD, Action, StageOrder
from planner.schedules import actions, in_flight

StageTimes = tuple[float, float, float]


class Deadlock(ValueError):
    """No stage can go on: each waits for an action that never comes."""


@dataclass(frozen=True, slots=True)
class Event:
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened. ``events`` in order of start, then stage.

    Per stage, busy_s + transfer_wait_s + bubble_s = makespan_s; ``end_s`` is the end of its last action.
    """

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    transfer_wait_s: tuple[float, ...]
    bubble_s: tuple[float, ...]
    end_s: tuple[float, ...]


def simulate(stage_times: Sequence[StageTimes], schedule: str, micro_batches: int) -> Timeline:
    """Run ``schedule`` ('gpipe' or '1f1b') over stages of (forward_s, backward_s, transfer_s)."""
    return replay(stage_times, actions(schedule, len(stage_times), micro_batches))


def replay(stage_times: Sequence[StageTimes], order: Sequence[StageOrder]) -> Timeline:
    """Run any order, one tuple of actions a stage. Raises Deadlock where a stage waits for ever."""
    for stage, stage_order in enumerate(order):
        for action in stage_order:
            if action.stage != stage:
                raise ValueError(f"stage {stage} cannot run {action}, an action of stage {action.stage}")
    run = _run(stage_times, order)
    events = [
        Event(action, start, start + stage_times[stage][0 if action.kind == FORWARD else 1])
        for stage, stage_order in enumerate(order)
        for action, start in zip(stage_order, run.start_s[stage], strict=True)
    ]
    events.sort(key=lambda event: (event.start_s, event.action.stage, event.end_s))
    makespan = max(run.end_s, default=0.0)
    bubble = tuple(idle + makespan - end for idle, end in zip(run.idle_s, run.end_s, strict=True))
    busy = tuple(
        sum(times[0] if action.kind == FORWARD else times[1] for action in stage_order)
        for times, stage_order in zip(stage_times, order, strict=True)
    )
    return Timeline(tuple(events), makespan, busy, tuple(run.transfer_wait_s), bubble, tuple(run.end_s))


@dataclass(frozen=True)
class _Run:
    """Per stage: starts of its actions in order, end of the last, bubble before that end, and transfer wait."""

    start_s: list[list[float]]
    end_s: list[float]
    idle_s: list[float]
    transfer_wait_s: list[float]


def _run(stage_times: Sequence[StageTimes], order: Sequence[StageOrder]) -> _Run:
    stages = len(stage_times)
    if len(order) != stages:
        raise ValueError(f"{len(order)} orders for {stages} stages")
    _check_times(stage_times)
    forward_end: list[dict[int, float]] = [{} for _ in range(stages)]
    backward_end: list[dict[int, float]] = [{} for _ in range(stages)]
    run = _Run([[] for _ in range(stages)], [0.0] * stages, [0.0] * stages, [0.0] * stages)
    awake = list(range(stages - 1, -1, -1))
    while awake:
        stage = awake.pop()
        forward_s, backward_s, transfer_s = stage_times[stage]
        starts, free = run.start_s[stage], run.end_s[stage]
        before = len(starts)
        own, own_back = forward_end[stage], backward_end[stage]
        for action in order[stage][before:]:
            micro_batch = action.micro_batch
            if action.kind == FORWARD:
                duration, ended, travel, done = forward_s, 0.0, 0.0, own
                if stage:
                    arrived = forward_end[stage - 1].get(micro_batch)
                    if arrived is None:
                        break
                    ended, travel = arrived, stage_times[stage - 1][2]
            else:
                duration, done = backward_s, own_back
                source = backward_end[stage + 1] if stage + 1 < stages else own
                arrived = source.get(micro_batch)
                if arrived is None or micro_batch not in own:
                    break
                ended, travel = arrived, transfer_s if stage + 1 < stages else 0.0
            start = free
            if ended + travel > free:
                start = ended + travel
                wait = min(travel, start - free)
                run.transfer_wait_s[stage] += wait
                run.idle_s[stage] += start - free - wait
            starts.append(start)
            free = start + duration
            done[micro_batch] = free
        run.end_s[stage] = free
        if len(starts) > before:
            awake += [neighbour for neighbour in (stage - 1, stage + 1) if 0 <= neighbour < stages]
    stuck = [str(stage_order[len(done)]) for stage_order, done in zip(order, run.start_s, strict=True)
             if len(done) < len(stage_order)]  # fmt: skip
    if stuck:
        raise Deadlock(f"the schedule never ends: waiting for ever at {', '.join(stuck)}")
    return run


def _check_times(stage_times: Sequence[StageTimes]) -> None:
    for stage, times in enumerate(stage_times):
        if not all(0 <= seconds < float("inf") for seconds in times):
            raise ValueError(f"stage {stage} has times {times}; they must be finite and not negative")


@dataclass(frozen=True)
class Path:
    """A chain of actions that wait for each other: how many forwards, backwards and transfers of each stage it holds.

    It ends with what stage ``last`` does once a step.
    """

    last: int
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    transfers: tuple[int, ...]

    def part_s(self, stage: int, times: StageTimes, per_step_s: float) -> float:
        """Its seconds on one stage; ``per_step_s``: gradient reduction and update of that stage."""
        forward_s, backward_s, transfer_s = times
        run_s = (
            self.forwards[stage] * forward_s + self.backwards[stage] * backward_s + self.transfers[stage] * transfer_s
        )
        return run_s + (per_step_s if stage == self.last else 0.0)

    def length_s(self, stage_times: Sequence[StageTimes], per_step_s: Sequence[float]) -> float:
        """No step of these stages takes less."""
        return sum(self.part_s(i, *both) for i, both in enumerate(zip(stage_times, per_step_s, strict=True)))


def critical_path(
    stage_times: Sequence[StageTimes], per_step_s: Sequence[float], schedule: str, micro_batches: int
) -> Path:
    """The path whose length is the step time of these stages."""
    order = actions(schedule, len(stage_times), micro_batches)
    run = _run(stage_times, order)
    place = [{action: i for i, action in enumerate(stage_order)} for stage_order in order]
    last = max(range(len(order)), key=lambda i: run.end_s[i] + per_step_s[i])
    counts = {kind: [0] * len(order) for kind in (FORWARD, BACKWARD)}
    transfers = [0] * len(order)
    stage, i = last, len(order[last]) - 1
    while True:
        action = order[stage][i]
        counts[action.kind][stage] += 1
        if i:
            before = order[stage][i - 1]
            free = run.start_s[stage][i - 1] + stage_times[stage][0 if before.kind == FORWARD else 1]
            if free == run.start_s[stage][i]:
                i -= 1
                continue
        if action.kind == FORWARD and stage == 0:
            return Path(last, tuple(counts[FORWARD]), tuple(counts[BACKWARD]), tuple(transfers))
        source = stage - 1 if action.kind == FORWARD else stage + 1
        transfers[min(source, stage)] += 1
        stage, i = source, place[source][Action(source, action.kind, action.micro_batch)]


def fill_and_drain_paths(schedule: str, stages: int, micro_batches: int) -> list[Path]:
    """The paths that are often the longest. For each stage j, with w micro-batches in flight (planner.schedules):

    sum_{i<j} (F_i + B_i + 2 t_i) + m (F_j + B_j) + G_0 + U_0               down to j, all its work, and back
    sum_{i<j} (F_i + t_i) + m (F_j + B_j) + G_j + U_j                       the same, with j the last to finish
    sum_i (F_i + B_i + 2 t_i) + (m-1) F_j + (m-w) B_j + G_0 + U_0           work at j, then to the last stage and back
    sum_i (F_i + B_i + 2 t_i) + (m-w) F_j + (m-1) B_j + G_0 + U_0           to the last stage and back, then work at j
    """
    m = micro_batches
    found = []
    for j in range(stages):
        above, below = (1,) * j, (0,) * (stages - j - 1)
        once = (1,) * (stages - j - 1)
        round_trip = (2,) * (stages - 1) + (0,)
        some, most = m - in_flight(schedule, stages, m, j) + 1, (*above, m, *once)
        work = (*above, m, *below)
        found += [
            Path(0, work, work, (*(2 * x for x in above), 0, *below)),
            Path(j, work, (*(0 for _ in above), m, *below), (*above, 0, *below)),
            Path(0, most, (*above, some, *once), round_trip),
            Path(0, (*above, some, *once), most, round_trip),
        ]
    return found


def gpipe_makespan_s(stage_times: Sequence[StageTimes], micro_batches: int) -> float:
    """The makespan of gpipe, exactly (see the module)."""
    forward, backward, transfer = zip(*stage_times, strict=True)
    rest = micro_batches - 1
    return sum(forward) + rest * max(forward) + sum(backward) + rest * max(backward) + 2 * sum(transfer[:-1])


def lower_bound_s(stage_times: Sequence[StageTimes], micro_batches: int) -> float:
    """No schedule of these stages and micro-batches has a smaller makespan."""
    best, above = 0.0, 0.0
    for forward, backward, transfer in stage_times:
        best = max(best, above + micro_batches * (forward + backward))
        above += forward + backward + 2 * transfer
    return best


def estimate_step(
    stages: Sequence[StageEstimate], schedule: str, micro_batches: int, memory_limit_bytes: int
) -> Estimate:
    """The objective of a plan: the predicted time of one training step and its split (formulas in the module).

    ``stages[i].forward_s`` and ``backward_s`` hold their communication on the dp and tp axes and recomputation, but not
    ``transfer_s``, the delay of what travels between stages i and i+1.
    """
    times = [(stage.forward_s, stage.backward_s, stage.transfer_s) for stage in stages]
    run = _run(times, actions(schedule, len(stages), micro_batches))
    ends = [
        end + stage.gradient_sync_per_step_s + stage.optimizer_per_step_s
        for end, stage in zip(run.end_s, stages, strict=True)
    ]
    step_time = max(ends)
    bubble = sum(idle + step_time - end for idle, end in zip(run.idle_s, ends, strict=True)) / len(stages)
    communication = sum(
        micro_batches * (stage.forward_communication_s + stage.backward_communication_s)
        + wait
        + stage.gradient_sync_per_step_s
        for stage, wait in zip(stages, run.transfer_wait_s, strict=True)
    ) / len(stages)
    return Estimate(
        step_time_s=step_time,
        compute_s=max(0.0, step_time - communication - bubble),
        exposed_communication_s=communication,
        bubble_s=bubble,
        stages=tuple(stages),
        memory_limit_bytes=memory_limit_bytes,
    )
