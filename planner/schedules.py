"""The order in which each stage runs its micro-batches, as torch.distributed.pipelining executes it.

With p stages and m micro-batches, stage s runs

    gpipe   all forwards, then all backwards:             F0 .. F(m-1)  B0 .. B(m-1)
    1f1b    w = min(m, p - s) forwards to warm up, then   B0 Fw  B1 F(w+1) ..  and the remaining backwards

so the activations held at most, ``in_flight``, are m micro-batches under gpipe and min(m, p - s) under 1f1b.
Sources: ``ScheduleGPipe._step_microbatches`` and ``Schedule1F1B._step_microbatches`` of torch (which asks for m >= p
under 1f1b); GPipe (Huang et al. 2019); PipeDream-flush (Narayanan et al. 2021).
"""

from __future__ import annotations

from functools import lru_cache

from planner.ir.plan import SCHEDULES
from planner.ir.schedule import BACKWARD, FORWARD, Action, StageOrder


@lru_cache(maxsize=256)
def actions(schedule: str, stages: int, micro_batches: int) -> tuple[StageOrder, ...]:
    """What each stage runs, in order: one tuple a stage. Raises ValueError for unknown schedules and sizes below 1."""
    _check(schedule, stages, micro_batches)
    return tuple(_stage_order(schedule, stages, micro_batches, stage) for stage in range(stages))


def in_flight(schedule: str, stages: int, micro_batches: int, stage: int) -> int:
    """Micro-batches whose activations ``stage`` holds at its worst moment: forward begun, backward not ended."""
    _check(schedule, stages, micro_batches)
    if not 0 <= stage < stages:
        raise ValueError(f"there is no stage {stage} among {stages}")
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def _stage_order(schedule: str, stages: int, micro_batches: int, stage: int) -> StageOrder:
    warmup = in_flight(schedule, stages, micro_batches, stage)
    order = [Action(stage, FORWARD, i) for i in range(warmup)]
    for i in range(micro_batches):
        order.append(Action(stage, BACKWARD, i))
        if warmup + i < micro_batches:
            order.append(Action(stage, FORWARD, warmup + i))
    return tuple(order)


def _check(schedule: str, stages: int, micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; the schedules are {', '.join(SCHEDULES)}")
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"{stages} stages and {micro_batches} micro-batches; both must be at least 1")
