"""Training steps as they ran, on every rank: written as a Chrome trace, read back, and held against the plan's estimate.

    StepTrace.to_json       a file that chrome://tracing and Perfetto show: a process a rank, a line a stage
    StepTrace.parse         the same, read
    parts(trace)            seconds of each part of a step, predicted and measured
    corrected(trace)        by how much measured times of each kind differ from their prices

    forward, backward       operators of all micro-batches on a rank, without communication inside
    communication           collectives on tp, and the reduction of gradients over dp; not under a pipeline, whose ranks wait for
                            one another there
    update                  the optimizer's step

Reduction over dp starts inside backward. Where it does, backward is taken to be as much slower than its price as forward is, and
what it took besides is reduction.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from costmodels.measured import Corrections, MeasuredError
from planner.errors import BadInput, InvalidPlan
from planner.ir.plan import Plan

FORMAT = 1
_REMEDY = "make one with planner run MODEL --trace FILE"
FORWARD, BACKWARD, WEIGHTS, STEP = "forward", "backward", "backward of weights", "step"
COMMUNICATION, REDUCTION, UPDATE = "communication", "gradient reduction", "optimizer step"
US = 1e6


@dataclass(frozen=True)
class Event:
    """``what`` a rank did in a step, from ``start_s`` for ``seconds``; ``stage`` and ``micro_batch`` -1 where there is none."""

    rank: int
    step: int
    what: str
    start_s: float
    seconds: float
    stage: int = -1
    micro_batch: int = -1

    def holds(self, other: Event) -> bool:
        return self.start_s <= other.start_s < self.start_s + self.seconds


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step, on the rank where it takes longest: predicted, and the median over steps (0: not told)."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class StepTrace:
    """``machine``: name of the file that its measured times are kept under. ``corrections``: those the plan was priced with."""

    plan: Plan
    machine: str
    corrections: Corrections
    events: tuple[Event, ...]

    def to_json(self) -> str:
        first_s = min((event.start_s for event in self.events), default=0.0)
        ranks = sorted({event.rank for event in self.events})
        names = [{"ph": "M", "name": "process_name", "pid": r, "args": {"name": f"rank {r}"}} for r in ranks]
        rows = [
            {
                "name": e.what,
                "ph": "X",
                "pid": e.rank,
                "tid": max(e.stage, 0),
                "ts": round((e.start_s - first_s) * US, 3),
                "dur": round(e.seconds * US, 3),
                "args": {"step": e.step, "stage": e.stage, "micro_batch": e.micro_batch},
            }
            for e in self.events
        ]
        head = {"format": FORMAT, "machine": self.machine, "corrections": asdict(self.corrections)}
        head["plan"] = json.loads(self.plan.to_json())
        return json.dumps({"displayTimeUnit": "ms", "meshwright": head, "traceEvents": names + rows}) + "\n"

    @staticmethod
    def load(path: str | Path) -> StepTrace:
        """Raises BadInput when the file is no such trace."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise BadInput(f"{path} is not text; pass a file of planner run MODEL --trace FILE") from None
        return StepTrace.parse(text, str(path))

    @staticmethod
    def parse(text: str, source: str = "trace") -> StepTrace:
        """Read the text form. Raises BadInput naming ``source``."""
        try:
            data = json.loads(text)
            head = data["meshwright"]
            if head["format"] != FORMAT:
                raise BadInput(f"{source} is a trace of format {head['format']!r}, not {FORMAT}; trace again")
            events = tuple(_event(row) for row in data["traceEvents"] if row["ph"] == "X")
            corrections = Corrections(**{f.name: head["corrections"][f.name] for f in fields(Corrections)})
            return StepTrace(Plan.from_json(json.dumps(head["plan"])), str(head["machine"]), corrections, events)
        except KeyError as error:
            raise BadInput(f"{source} is no trace of training steps: it has no {error}; {_REMEDY}") from None
        except (ValueError, TypeError, MeasuredError, InvalidPlan) as error:
            raise BadInput(f"{source} is no trace of training steps: {error}; {_REMEDY}") from None


def save_trace(trace: StepTrace, path: str | Path) -> None:
    """Raises BadInput when ``path`` cannot be written."""
    try:
        Path(path).write_text(trace.to_json(), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None


def require_folder_of(path: str | Path) -> None:
    """Before the work whose result goes there. Raises BadInput where there is no such folder, or ``path`` is one itself."""
    absolute = Path(path).absolute()
    if not absolute.parent.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {Path(path).parent}")
    if absolute.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder")


def _event(row: Mapping[str, Any]) -> Event:
    told = row["args"]
    numbers = (float(row["ts"]) / US, float(row["dur"]) / US, int(told["stage"]), int(told["micro_batch"]))
    if not all(math.isfinite(x) for x in numbers[:2]):
        raise ValueError("an event without a time")
    return Event(int(row["pid"]), int(told["step"]), str(row["name"]), *numbers)


def parts(trace: StepTrace) -> tuple[Part, ...]:
    """Forward, backward, communication and update of a step, then the step as a whole.

    The first step warms up and does not count, where there are others. Raises BadInput for a plan with ZeRO-3, whose
    communication lies inside its operators, and for a trace without a whole step.
    """
    if trace.plan.zero == 3:
        raise BadInput("the trace is of a plan with ZeRO-3, whose communication is not told apart; trace another plan")
    steps = sorted({event.step for event in trace.events})
    found = [_of_rank(trace, steps[1:] or steps, rank) for rank in sorted({event.rank for event in trace.events})]
    if not found or any(part.measured_s <= 0 for part in (found[0][0], found[0][-1])):
        raise BadInput("the trace holds no whole training step; trace again with more steps")
    return tuple(max(of_ranks, key=lambda part: part.measured_s) for of_ranks in zip(*found, strict=True))


def _of_rank(trace: StepTrace, steps: Sequence[int], rank: int) -> list[Part]:
    mine = [event for event in trace.events if event.rank == rank]
    plan = trace.plan
    stages = [plan.estimate.stages[i] for i in sorted({e.stage for e in mine if e.what == FORWARD and e.stage >= 0})]
    m = plan.micro_batches
    each = [_seconds([event for event in mine if event.step == step]) for step in steps]

    def measured(*names: str) -> float:
        return statistics.median(sum(seconds.get(name, 0.0) for name in names) for seconds in each)

    forward_s = m * sum(s.forward_s - s.forward_communication_s for s in stages)
    backward_s = m * sum(s.backward_s - s.backward_communication_s for s in stages)
    exchanged_s = m * sum(s.forward_communication_s + s.backward_communication_s for s in stages)
    exchanged_s += sum(s.gradient_sync_per_step_s for s in stages)
    forward, backward, reduction = measured(FORWARD), measured(BACKWARD, WEIGHTS), measured(REDUCTION)
    if plan.mesh.dp > 1 and forward_s:
        alone = min(backward, backward_s * forward / forward_s)
        backward, reduction = alone, reduction + backward - alone
    return [
        Part(FORWARD, forward_s, forward),
        Part(BACKWARD, backward_s, backward),
        Part(COMMUNICATION, exchanged_s, measured(COMMUNICATION) + reduction if plan.mesh.pp == 1 else 0.0),
        Part(UPDATE, sum(s.optimizer_per_step_s for s in stages), measured(UPDATE)),
        Part(STEP, plan.estimate.step_time_s, measured(STEP)),
    ]


def _seconds(events: Iterable[Event]) -> dict[str, float]:
    """Of one rank and step: seconds by what it did; communication inside a pass is not counted with the pass."""
    events = list(events)
    total: dict[str, float] = {}
    inside = [e for e in events if e.what == COMMUNICATION]
    for event in events:
        seconds = event.seconds
        if event.what in (FORWARD, BACKWARD, WEIGHTS):
            seconds -= sum(other.seconds for other in inside if event.holds(other))
        total[event.what] = total.get(event.what, 0.0) + seconds
    return total


def corrected(trace: StepTrace, before: Corrections) -> Corrections:
    """``before`` with what ``trace`` says: each run counts alike, by geometric means. What was not run stays as it is."""
    by_name = {part.name: part for part in parts(trace)}
    names = {"forward": FORWARD, "backward": BACKWARD, "communication": COMMUNICATION, "update": UPDATE}
    weight = 1 / (before.runs + 1)
    found = {}
    for field, name in names.items():
        part, old = by_name[name], getattr(before, field)
        if part.predicted_s > 0 and part.measured_s > 0:
            told = getattr(trace.corrections, field) * part.measured_s / part.predicted_s
            found[field] = float(f"{old ** (1 - weight) * told**weight:.4g}")
        else:
            found[field] = old
    return Corrections(**found, runs=before.runs + 1)
