"""The words of a pipeline schedule: which stage does what on which micro-batch.

    2F0     stage 2 runs the forward of micro-batch 0
    2B0     stage 2 runs the backward of micro-batch 0

They are the words torch.distributed.pipelining prints for a full backward, so both can be compared line by line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORWARD = "F"
BACKWARD = "B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """``kind`` is 'F' (forward) or 'B' (backward); stages and micro-batches count from 0."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        match = re.fullmatch(r"(0|[1-9][0-9]*)([FB])(0|[1-9][0-9]*)", text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write for example 2F0 or 2B0")
        return Action(int(match[1]), match[2], int(match[3]))


StageOrder = tuple[Action, ...]  # the actions of one stage, in the order it runs them


def parse_order(text: str) -> StageOrder:
    """Read the actions of one stage, separated by white space: ``0F0 0F1 0B0 0B1``."""
    return tuple(Action.parse(word) for word in text.split())


def print_order(order: StageOrder) -> str:
    return " ".join(map(str, order))
