"""The order in which each pipeline rank runs its stages and micro-batches, as torch.distributed.pipelining executes it.

With p ranks, m micro-batches and v chunks (stages) a rank, rank r runs

    gpipe         all forwards, then all backwards:             F0 .. F(m-1)  B0 .. B(m-1)
    1f1b          w = min(m, p - r) forwards to warm up, then   B0 Fw  B1 F(w+1) ..  and the remaining backwards
    interleaved   n = v m forwards and n backwards in the order below; w = min(n, (v-1) R + 2 (p-1-r)) forwards to warm up,
                  then Fw B0  F(w+1) B1 ..  and the remaining backwards
    zero-bubble   the same with w = min(n, (v-1) R + p-1-r) and each backward in two: the gradients of what was received
                  (I), which the rank before waits for, and r turns later those of the weights (W):
                  Fw I0  F(w+1) I1 ..  F(w+r) Ir W0  ..  and the remaining W

The micro-batches go in max(1, m // p) rounds of R, all equal. Within a round, R forwards of chunk 0, R of chunk 1, ..;
backwards from the last chunk to the first. Stage i is chunk i // p of rank i % p.

A micro-batch's activations are held from its forward to its B or W. ``held``: how many at once, per chunk. With one chunk
that is m under gpipe, min(m, p - r) under 1f1b and min(m, p) under zero-bubble.

Sources: torch's ``ScheduleGPipe``, ``Schedule1F1B`` (which asks for m >= p), ``ScheduleInterleaved1F1B`` and
``ScheduleInterleavedZeroBubble``; GPipe (Huang et al. 2019); PipeDream-flush and interleaving (Narayanan et al. 2021);
ZB-H1 (Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from planner.ir.plan import SCHEDULES
from planner.ir.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Order

INTERLEAVED = "interleaved"
ZERO_BUBBLE = "zero-bubble"
IN_ROUNDS = (INTERLEAVED, ZERO_BUBBLE)


def check(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> str:
    """Why a pipeline of ``pp`` ranks with ``chunks`` stages each cannot run ``schedule``; '' where it can."""
    problem = _no_order(schedule, pp, micro_batches, chunks)
    if not problem and schedule == "1f1b" and micro_batches < pp:
        problem = f"1f1b needs at least as many micro-batches as stages, not {micro_batches} for {pp}"
    return problem


def _no_order(schedule: str, pp: int, micro_batches: int, chunks: int) -> str:
    """Why there is no such order. (The order of 1f1b exists for few micro-batches too: it is that of gpipe.)"""
    if schedule not in SCHEDULES:
        return f"unknown schedule {schedule!r}; the schedules are {', '.join(SCHEDULES)}"
    if pp < 1 or micro_batches < 1 or chunks < 1:
        return f"{pp} pipeline ranks, {micro_batches} micro-batches and {chunks} chunks; each must be at least 1"
    if schedule not in IN_ROUNDS:
        return f"{schedule} runs one stage a rank, not {chunks}" if chunks > 1 else ""
    if pp == 1:
        return f"{schedule} needs at least 2 pipeline ranks"
    if schedule == INTERLEAVED and chunks == 1:
        return "interleaved needs at least 2 stages a rank (v=2)"
    if not in_equal_rounds(pp, micro_batches):
        rounds = micro_batches // pp
        return (
            f"{schedule} runs its micro-batches in equal rounds, of which {micro_batches} on pp{pp} make {rounds}; "
            f"use a multiple of {rounds}, such as mb={rounds * pp}"
        )
    return ""


def in_equal_rounds(pp: int, micro_batches: int) -> bool:
    """Whether interleaved and zero-bubble can run so many micro-batches (a multiple of pp, for one, always)."""
    return micro_batches % max(1, micro_batches // pp) == 0


@lru_cache(maxsize=64)
def actions(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> tuple[Order, ...]:
    """What each pipeline rank runs, in order: one tuple a rank. Raises ValueError where there is no such schedule."""
    return tuple(
        tuple(Action(chunk * pp + rank, kind, i) for kind, chunk, i in order)
        for rank, order in enumerate(orders(schedule, pp, micro_batches, chunks))
    )


Step = tuple[str, int, int]  # kind of action, chunk of the rank, micro-batch


def orders(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> Iterator[list[Step]]:
    """``actions`` as bare tuples, made anew."""
    problem = _no_order(schedule, pp, micro_batches, chunks)
    if problem:
        raise ValueError(problem)
    for rank in range(pp):
        if schedule in IN_ROUNDS:
            yield _rank_in_rounds(schedule, pp, micro_batches, chunks, rank)
        else:
            yield _rank_of_one_stage(schedule, pp, micro_batches, rank)


def _rank_of_one_stage(schedule: str, pp: int, micro_batches: int, rank: int) -> list[Step]:
    warmup = micro_batches if schedule == "gpipe" else min(micro_batches, pp - rank)
    order = [(FORWARD, 0, i) for i in range(warmup)]
    for i in range(micro_batches):
        order.append((BACKWARD, 0, i))
        if warmup + i < micro_batches:
            order.append((FORWARD, 0, warmup + i))
    return order


def _rank_in_rounds(schedule: str, pp: int, micro_batches: int, chunks: int, rank: int) -> list[Step]:
    split = schedule == ZERO_BUBBLE
    size = micro_batches // max(1, micro_batches // pp)
    turns = [
        (chunk, first + i) for first in range(0, micro_batches, size) for chunk in range(chunks) for i in range(size)
    ]
    warmup = min(len(turns), (chunks - 1) * size + (1 if split else 2) * (pp - 1 - rank))
    order = [(FORWARD, *turn) for turn in turns[:warmup]]
    back = [(chunks - 1 - chunk, i) for chunk, i in turns]
    for number, turn in enumerate(back):
        if warmup + number < len(turns):
            order.append((FORWARD, *turns[warmup + number]))
        order.append((INPUT_GRADIENT if split else BACKWARD, *turn))
        if split and number >= rank:
            order.append((WEIGHT_GRADIENT, *back[number - rank]))
    if split:
        order += [(WEIGHT_GRADIENT, *turn) for turn in back[max(0, len(back) - rank) :]]
    return order


@lru_cache(maxsize=1024)
def held(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank, how many micro-batches it holds of each of its chunks at once: the vectors that no other one covers."""
    if chunks == 1:
        return tuple(((in_flight(schedule, pp, micro_batches, rank),),) for rank in range(pp))
    return tuple(_most_held(order, chunks) for order in orders(schedule, pp, micro_batches, chunks))


def _most_held(order: list[Step], chunks: int) -> tuple[tuple[int, ...], ...]:
    now = [0] * chunks
    peaks: dict[tuple[int, ...], None] = {}
    grew = False
    for kind, chunk, _ in order:
        if kind == FORWARD:
            now[chunk] += 1
            grew = True
        elif kind != INPUT_GRADIENT:
            if grew:
                peaks[tuple(now)] = None
            now[chunk] -= 1
            grew = False
    return tuple(
        peak
        for peak in peaks
        if not any(other != peak and all(a <= b for a, b in zip(peak, other, strict=True)) for other in peaks)
    )


def in_flight(schedule: str, stages: int, micro_batches: int, stage: int) -> int:
    """Micro-batches whose activations ``stage`` holds at its worst moment, with one stage a rank."""
    problem = _no_order(schedule, stages, micro_batches, 1)
    if problem:
        raise ValueError(problem)
    if not 0 <= stage < stages:
        raise ValueError(f"there is no stage {stage} among {stages}")
    if schedule == "1f1b":
        return min(micro_batches, stages - stage)
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages)
