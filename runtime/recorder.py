"""What a rank does when, for a trace of training steps.

A rank has one Recorder, which its runner, its reducer and its mesh axes are given; it records only while ``active``. Spans may
lie inside one another: communication on tp inside the forward of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from runtime.device import synchronize

STEP, FORWARD, BACKWARD, WEIGHTS = "step", "forward", "backward", "backward of weights"
COMMUNICATION, REDUCTION, UPDATE, GATHERING = (
    "communication",
    "gradient reduction",
    "optimizer step",
    "weight gathering",
)

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Span:
    """``what`` took ``seconds`` from ``start_s`` (of a clock of the machine). ``stage``, ``micro_batch``: -1 for none."""

    what: str
    start_s: float
    seconds: float
    stage: int = -1
    micro_batch: int = -1


class Recorder:
    def __init__(self, device: torch.device) -> None:
        self.device, self.active = device, False
        self.spans: list[Span] = []

    def span(self, what: str, stage: int = -1, micro_batch: int = -1) -> AbstractContextManager[None]:
        """Records what happens inside; on a GPU it waits for it."""
        return self._recorded(what, stage, micro_batch) if self.active else _NOTHING

    @contextmanager
    def _recorded(self, what: str, stage: int, micro_batch: int) -> Iterator[None]:
        synchronize(self.device)
        start_s = time.perf_counter()
        yield
        synchronize(self.device)
        self.spans.append(Span(what, start_s, time.perf_counter() - start_s, stage, micro_batch))

    def taken(self) -> list[dict[str, Any]]:
        """The spans so far as data, earliest first; they are forgotten."""
        spans, self.spans = sorted(self.spans, key=lambda span: (span.start_s, -span.seconds)), []
        return [vars(span) for span in spans]
