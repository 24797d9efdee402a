"""Longest paths through a schedule: sums of times that bound the step time of any stages from below.

A path is a chain of actions that wait for each other, on one rank or from stage to stage. It counts how often it runs a
forward, an input gradient, a weight gradient and a transfer of each stage (a whole backward is one of each), and ends with
what its last rank does once a step. The same chain exists whatever the stages take, so with other times its length is a
lower bound on their step time:

    length = sum_i  f_i F_i + x_i (B_i - W_i) + w_i W_i + r_i t_i  +  sum_{i % p = last} (G_i + U_i)

The step time of given stages is the length of their ``critical_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedules import in_flight
from planner.simulate import StageTimes, chart, ranks_of, run

SAMPLED_RANKS = 8


@dataclass(frozen=True)
class Path:
    """How often the path runs what of each stage. ``last``: the rank it ends on, of ``ranks``."""

    last: int
    ranks: int
    forwards: tuple[int, ...]
    input_backwards: tuple[int, ...]
    weight_backwards: tuple[int, ...]
    transfers: tuple[int, ...]

    def part_s(self, stage: int, times: StageTimes, per_step_s: float) -> float:
        """Its seconds on one stage; ``per_step_s``: gradient reduction and update of that stage."""
        forward_s, backward_s, transfer_s, weight_s = times
        inputs, weights = self.input_backwards[stage], self.weight_backwards[stage]
        both = min(inputs, weights)
        run_s = (
            self.forwards[stage] * forward_s
            + both * backward_s
            + (inputs - both) * (backward_s - weight_s)
            + (weights - both) * weight_s
            + self.transfers[stage] * transfer_s
        )
        return run_s + (per_step_s if stage % self.ranks == self.last else 0.0)

    def length_s(self, stage_times: Sequence[StageTimes], per_step_s: Sequence[float]) -> float:
        """No step of these stages takes less."""
        return sum(self.part_s(i, *both) for i, both in enumerate(zip(stage_times, per_step_s, strict=True)))


def critical_path(
    stage_times: Sequence[StageTimes], per_step_s: Sequence[float], schedule: str, micro_batches: int, chunks: int = 1
) -> Path:
    """The path whose length is the step time of these stages."""
    stages = len(stage_times)
    pp = ranks_of(stages, chunks)
    plan = chart(schedule, pp, micro_batches, chunks)
    done = run(stage_times, plan)
    travel = [t.transfer_s for t in stage_times]
    before = [0] * (len(plan.steps) + 1)
    newest = [0] * pp
    for number, (rank, *_) in enumerate(plan.steps, 1):
        before[number], newest[rank] = newest[rank], number
    last = max(range(pp), key=lambda rank: done.end_s[rank] + sum(per_step_s[rank::pp]))
    # forwards, whole backwards, input gradients, weight gradients; what stage 0 makes as a weight gradient is all
    counts = [0] * (4 * stages)
    transfers = [0] * stages
    number = newest[last]
    while number:
        _, what, source, link = plan.steps[number - 1]
        counts[what] += 1
        arrival = done.ends_s[source] + (travel[link] if link < stages - 1 else 0.0)
        if before[number] and done.ends_s[before[number]] >= arrival:
            number = before[number]
        else:
            if link < stages - 1 and source:
                transfers[link] += 1
            number = source
    forwards, whole, inputs, weights = (counts[i : i + stages] for i in range(0, 4 * stages, stages))
    inputs[0] = weights[0]
    return Path(
        last,
        pp,
        tuple(forwards),
        tuple(a + b for a, b in zip(whole, inputs, strict=True)),
        tuple(a + b for a, b in zip(whole, weights, strict=True)),
        tuple(transfers),
    )


def fill_and_drain_paths(schedule: str, pp: int, micro_batches: int, chunks: int = 1) -> list[Path]:
    """The paths that are often the longest.

    Under gpipe and 1f1b, for each stage j, with w micro-batches in flight (planner.schedules):

    sum_{i<j} (F_i + B_i + 2 t_i) + m (F_j + B_j) + G_0 + U_0               down to j, all its work, and back
    sum_{i<j} (F_i + t_i) + m (F_j + B_j) + G_j + U_j                       the same, with j the last to finish
    sum_i (F_i + B_i + 2 t_i) + (m-1) F_j + (m-w) B_j + G_0 + U_0           work at j, then to the last stage and back
    sum_i (F_i + B_i + 2 t_i) + (m-w) F_j + (m-1) B_j + G_0 + U_0           to the last stage and back, then work at j

    and, where w micro-batches are in flight at j, n = m/w of them, rounded up, go there and back one after the other:

    sum_{i<j} (F_i + B_i + 2 t_i) + n sum_{i>=j} (F_i + B_i + 2 t_i) + G_0 + U_0

    Under the others, the critical paths of equal stages, and of stages among which those of one rank take twice as long or
    one rank finishes last, for SAMPLED_RANKS ranks at most.
    """
    if schedule not in ("gpipe", "1f1b"):
        return _sampled_paths(schedule, pp, micro_batches, chunks)
    m = micro_batches
    found = []
    for j in range(pp):
        above, below = (1,) * j, (0,) * (pp - j - 1)
        once = (1,) * (pp - j - 1)
        round_trip = (2,) * (pp - 1) + (0,)
        some, most = (*above, m - in_flight(schedule, pp, m, j) + 1, *once), (*above, m, *once)
        work = (*above, m, *below)
        alone = (*(0 for _ in above), m, *below)
        found += [
            Path(0, pp, work, work, work, (*(2 * x for x in above), 0, *below)),
            Path(j, pp, work, alone, alone, (*above, 0, *below)),
            Path(0, pp, most, some, some, round_trip),
            Path(0, pp, some, most, most, round_trip),
        ]
        trips = -(-m // in_flight(schedule, pp, m, j))
        around = (*above, *(trips for _ in range(j, pp)))
        links = (*(2 * x for x in above), *(2 * trips for _ in range(j, pp - 1)), 0)
        found.append(Path(0, pp, around, around, around, links))
    return found


def _sampled_paths(schedule: str, pp: int, micro_batches: int, chunks: int) -> list[Path]:
    stages = pp * chunks
    found: dict[Path, None] = {}
    for rank in (-1, *range(0, pp, -(-pp // SAMPLED_RANKS))):
        times = [
            StageTimes(*((2.0 if i % pp == rank else 1.0) * x for x in (1.0, 2.0, 0.0, 1.0))) for i in range(stages)
        ]
        for late in {0, max(rank, 0)}:
            per_step = [4.0 * micro_batches * stages if i == late else 0.0 for i in range(stages)]
            found[critical_path(times, per_step, schedule, micro_batches, chunks)] = None
    return list(found)
