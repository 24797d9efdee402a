"""The time of one training step: an event simulation of the action list the runtime runs, and its closed forms.

A stage i is given as ``StageTimes`` (F_i, B_i, t_i, W_i): seconds of one forward, of one backward, of the transfer of one
micro-batch between stages i and i+1 (each way), and of the part of the backward that makes gradients of weights only.
Pipeline rank r runs the stages i with i % p = r, one action after the other, each as soon as it can:

    start(iFk) = max(own previous action ended,  end((i-1)Fk) + t_{i-1})
    start(iBk) = max(own previous action ended,  end((i+1)Bk) + t_i)          the last stage: right after its own iFk
    start(iIk) = the same, of end((i+1)Ik)
    start(iWk) = own previous action ended

I takes B - W and W takes W; but on stage 0, which received nothing to make gradients of, I takes nothing and W takes B.
A transfer delays the receiver only: the sender goes on and transfers don't queue on the link. ``simulate``, ``replay``.

An idle moment of a rank is *transfer wait* while the tensor it waits for is on its way, and *bubble* otherwise.

Closed forms, with m micro-batches, p ranks, n stages:

    gpipe_makespan_s    sum F + (m-1) max F + sum B + (m-1) max B + 2 sum t            (two flow shops of equal jobs)
    lower_bound_s       any schedule; the largest of, with I_0 = 0, I_i = B_i (or B_i - W_i where the backward is in two):
                        sum_{i<r} (F_i + t_i) + m sum_{i % p = r} (F_i + B_i)          for each rank r
                        sum_{i<r} (F_i + I_i + 2 t_i) + B_0 + m sum_{i % p = r} (F_i + I_i)          for each rank r > 0
                        sum_i (F_i + I_i + 2 t_i) + B_0

The bound: rank r can't start before its first input came through the stages above, works m times, and the last gradient it
sends (of stage r, whose work on a micro-batch ends last) must go all the way back. 1f1b reaches it for equal stages without
transfers.

The objective of a plan, ``estimate_step``: when its own last backward is over, a rank reduces the gradients of its stages
(G_i, the exposed part) and updates their weights (U_i), so

    step time = max over r of  end_r + sum_{i % p = r} (G_i + U_i)

and the step of the average rank splits into three parts that sum to it:

    bubble                  idle but for transfer wait, and waiting at the end for the slowest rank
    exposed communication   m (forward and backward communication) + transfer wait + G
    compute                 m (the rest of forward and backward) + U

The step time is the longest path through the actions, ``planner.paths``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planner.ir.plan import Estimate, StageEstimate
from planner.ir.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Order
from planner.schedules import orders


class StageTimes(NamedTuple):
    """Seconds for one micro-batch (see the module); ``weight_backward_s`` is part of ``backward_s``."""

    forward_s: float
    backward_s: float
    transfer_s: float = 0.0
    weight_backward_s: float = 0.0


class Deadlock(ValueError):
    """No rank can go on: each waits for an action that never comes."""


@dataclass(frozen=True, slots=True)
class Event:
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened. ``events`` in order of start, then stage.

    Per rank, busy_s + transfer_wait_s + bubble_s = makespan_s; ``end_s`` is the end of its last action.
    """

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    transfer_wait_s: tuple[float, ...]
    bubble_s: tuple[float, ...]
    end_s: tuple[float, ...]


def simulate(stage_times: Sequence[StageTimes], schedule: str, micro_batches: int, chunks: int = 1) -> Timeline:
    """Run ``schedule`` over ``stage_times``, of which each rank has ``chunks``."""
    stages = len(stage_times)
    return _timeline(stage_times, chart(schedule, ranks_of(stages, chunks), micro_batches, chunks))


def replay(stage_times: Sequence[StageTimes], order: Sequence[Order]) -> Timeline:
    """Run any order, one tuple of actions a rank. Raises Deadlock where a rank waits for ever."""
    stages, pp = len(stage_times), len(order)
    if not pp or stages % pp:
        raise ValueError(f"{pp} orders for {stages} stages")
    for rank, actions in enumerate(order):
        for action in actions:
            if action.stage % pp != rank or action.stage >= stages:
                raise ValueError(f"rank {rank} of {pp} cannot run {action}, an action of stage {action.stage}")
    steps = [[(action.kind, action.stage // pp, action.micro_batch) for action in actions] for actions in order]
    return _timeline(stage_times, _chart(steps, stages // pp))


def ranks_of(stages: int, chunks: int) -> int:
    """How many ranks hold ``stages`` stages, ``chunks`` each."""
    if stages % chunks:
        raise ValueError(f"{stages} stages do not make whole ranks of {chunks}")
    return stages // chunks


# One action as the simulation runs it:
#   rank
#   number of its duration (``durations``)
#   the action whose result it waits for, counted from 1 in the order of the chart; 0: none
#   the number of the stage before the transfer of that result; that of the last stage: no transfer
Step = tuple[int, int, int, int]


@dataclass(frozen=True)
class Chart:
    """The actions of all ranks in an order in which each comes after those it waits for."""

    pp: int
    chunks: int
    steps: tuple[Step, ...]
    micro_batch: tuple[int, ...]


@lru_cache(maxsize=64)
def chart(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> Chart:
    return _chart(list(orders(schedule, pp, micro_batches, chunks)), chunks)


KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


def _chart(order: Sequence[Sequence[tuple[str, int, int]]], chunks: int) -> Chart:
    pp = len(order)
    stages = pp * chunks
    last = stages - 1
    offset = {kind: number * stages for number, kind in enumerate(KINDS)}
    count = 1 + max((i for mine in order for _, _, i in mine), default=0)
    # numbers of the actions that ended, by stage and micro-batch; 0: not yet
    forward, backward = [0] * (stages * count), [0] * (stages * count)
    steps: list[Step] = []
    numbers: list[int] = []
    done = [0] * pp
    awake = list(range(pp - 1, -1, -1))
    while awake:
        rank = awake.pop()
        mine, before = order[rank], done[rank]
        at = before
        while at < len(mine):
            kind, chunk, i = mine[at]
            stage = chunk * pp + rank
            place = stage * count + i
            if kind == FORWARD:
                source, link = (forward[place - count], stage - 1) if stage else (0, last)
                if stage and not source:
                    break
            elif kind == WEIGHT_GRADIENT:
                source, link = backward[place], last
                if not source:
                    break
            else:
                source, link = backward[place + count] if stage < last else forward[place], stage
                if not source or not forward[place]:
                    break
            at += 1
            steps.append((rank, offset[kind] + stage, source, link))
            numbers.append(i)
            if kind == FORWARD:
                forward[place] = len(steps)
            elif kind != WEIGHT_GRADIENT:
                backward[place] = len(steps)
        if at > before:
            done[rank] = at
            awake += [other for other in {(rank - 1) % pp, (rank + 1) % pp} if other != rank]
    stuck = [
        str(Action(chunk * pp + rank, kind, i))
        for rank, mine in enumerate(order)
        for kind, chunk, i in mine[done[rank] : done[rank] + 1]
    ]
    if stuck:
        raise Deadlock(f"the schedule never ends: waiting for ever at {', '.join(stuck)}")
    return Chart(pp, chunks, tuple(steps), tuple(numbers))


def durations(stage_times: Sequence[StageTimes]) -> list[float]:
    """Seconds of F of every stage, then of B, I and W of every stage."""
    for stage, times in enumerate(stage_times):
        if not all(0 <= seconds < float("inf") for seconds in times) or times[3] > times[1]:
            raise ValueError(
                f"stage {stage} has times {tuple(times)}; they must be finite and not negative, and the part of backward "
                "for weights no more than all of it"
            )
    forward, backward = [t[0] for t in stage_times], [t[1] for t in stage_times]
    weight = [backward[0], *(t[3] for t in stage_times[1:])]
    return forward + backward + [b - w for b, w in zip(backward, weight, strict=True)] + weight


@dataclass(frozen=True)
class Run:
    """``ends_s``: of every action of the chart, after a 0. Per rank: end of its last action, bubble before that end, and
    transfer wait."""

    ends_s: list[float]
    end_s: list[float]
    idle_s: list[float]
    transfer_wait_s: list[float]


def run(stage_times: Sequence[StageTimes], chart: Chart) -> Run:
    """Every action as soon as it can."""
    pp = chart.pp
    if len(stage_times) != pp * chart.chunks:
        raise ValueError(f"{pp} orders of {chart.chunks} stages for {len(stage_times)} stages")
    takes = durations(stage_times)
    travel = [t[2] for t in stage_times]
    travel[-1] = 0.0
    free, idle, waits = [0.0] * pp, [0.0] * pp, [0.0] * pp
    ends = [0.0]
    add = ends.append
    for rank, what, source, link in chart.steps:
        start = free[rank]
        delay = travel[link]
        arrival = ends[source] + delay
        if arrival > start:
            gap = arrival - start
            wait = delay if delay < gap else gap
            waits[rank] += wait
            idle[rank] += gap - wait
            start = arrival
        end = start + takes[what]
        free[rank] = end
        add(end)
    return Run(ends, free, idle, waits)


def _timeline(stage_times: Sequence[StageTimes], chart: Chart) -> Timeline:
    done = run(stage_times, chart)
    takes = durations(stage_times)
    busy = [0.0] * chart.pp
    free = [0.0] * chart.pp
    events = []
    travel = [t[2] for t in stage_times[:-1]] + [0.0]
    for (rank, what, source, link), i, end in zip(chart.steps, chart.micro_batch, done.ends_s[1:], strict=True):
        kind, stage = divmod(what, len(stage_times))
        start = max(free[rank], done.ends_s[source] + travel[link])
        events.append(Event(Action(stage, KINDS[kind], i), start, end))
        busy[rank] += takes[what]
        free[rank] = end
    events.sort(key=lambda event: (event.start_s, event.action.stage, event.end_s))
    makespan = max(done.end_s, default=0.0)
    bubble = tuple(idle + makespan - end for idle, end in zip(done.idle_s, done.end_s, strict=True))
    return Timeline(tuple(events), makespan, tuple(busy), tuple(done.transfer_wait_s), bubble, tuple(done.end_s))


def gpipe_makespan_s(stage_times: Sequence[StageTimes], micro_batches: int) -> float:
    """The makespan of gpipe, exactly (see the module)."""
    forward, backward, transfer, _ = zip(*stage_times, strict=True)
    rest = micro_batches - 1
    return sum(forward) + rest * max(forward) + sum(backward) + rest * max(backward) + 2 * sum(transfer[:-1])


def lower_bound_s(
    stage_times: Sequence[StageTimes], micro_batches: int, chunks: int = 1, split_backward: bool = False
) -> float:
    """No schedule of these stages and micro-batches has a smaller makespan. ``split_backward``: I and W may be apart."""
    m, pp = micro_batches, ranks_of(len(stage_times), chunks)
    takes = durations(stage_times)
    n = len(stage_times)
    forward, backward = takes[:n], takes[n : 2 * n]
    inputs = takes[2 * n : 3 * n] if split_backward else [0.0, *backward[1:]]
    best, there, back = 0.0, 0.0, 0.0
    for stage, times in enumerate(stage_times):
        if stage < pp:
            best = max(best, there + m * sum(forward[i] + backward[i] for i in range(stage, n, pp)))
            if stage:
                sent = m * sum(forward[i] + inputs[i] for i in range(stage, n, pp))
                best = max(best, there + back + backward[0] + sent)
        there += forward[stage] + (times[2] if stage < n - 1 else 0.0)
        back += inputs[stage] + (times[2] if stage < n - 1 else 0.0)
    return max(best, there + back + backward[0])


def times_of(stages: Sequence[StageEstimate]) -> list[StageTimes]:
    return [StageTimes(s.forward_s, s.backward_s, s.transfer_s, s.weight_backward_s) for s in stages]


def step_time_s(
    stage_times: Sequence[StageTimes], per_step_s: Sequence[float], schedule: str, micro_batches: int, chunks: int = 1
) -> float:
    """The step time alone; ``per_step_s``: of each stage, gradient reduction and update."""
    pp = ranks_of(len(stage_times), chunks)
    ends = run(stage_times, chart(schedule, pp, micro_batches, chunks)).end_s
    return max(end + sum(per_step_s[rank::pp]) for rank, end in enumerate(ends))


def estimate_step(
    stages: Sequence[StageEstimate],
    schedule: str,
    micro_batches: int,
    memory_limit_bytes: int | Sequence[int],
    chunks: int = 1,
) -> Estimate:
    """The objective of a plan: the predicted time of one training step and its split (formulas in the module).

    ``stages[i].forward_s`` and ``backward_s`` hold their communication on the dp and tp axes and recomputation, but not
    ``transfer_s``, the delay of what travels between stages i and i+1. Each rank has ``chunks`` of them.
    ``memory_limit_bytes``: of a device; or, one a pipeline rank, where they differ.
    """
    pp = ranks_of(len(stages), chunks)
    limits = (memory_limit_bytes,) if isinstance(memory_limit_bytes, int) else tuple(memory_limit_bytes)
    done = run(times_of(stages), chart(schedule, pp, micro_batches, chunks))
    ends = [
        end + sum(stage.gradient_sync_per_step_s + stage.optimizer_per_step_s for stage in stages[rank::pp])
        for rank, end in enumerate(done.end_s)
    ]
    step_time = max(ends)
    bubble = sum(idle + step_time - end for idle, end in zip(done.idle_s, ends, strict=True)) / pp
    communication = (
        sum(
            micro_batches * (stage.forward_communication_s + stage.backward_communication_s)
            + stage.gradient_sync_per_step_s
            for stage in stages
        )
        + sum(done.transfer_wait_s)
    ) / pp
    return Estimate(
        step_time_s=step_time,
        compute_s=max(0.0, step_time - communication - bubble),
        exposed_communication_s=communication,
        bubble_s=bubble,
        stages=tuple(stages),
        memory_limit_bytes=max(limits),
        chunks=chunks,
        memory_limits_bytes=limits if len(set(limits)) > 1 else (),
    )
