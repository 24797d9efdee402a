"""The words of a pipeline schedule: which stage does what on which micro-batch.

    2F0     stage 2 runs the forward of micro-batch 0
    2B0     stage 2 runs its whole backward: 2I0 and 2W0 in one
    2I0     stage 2 computes the gradients of what it received, which the stage before waits for
    2W0     stage 2 computes the gradients of its weights, which nobody waits for

They are the words torch.distributed.pipelining prints, so both can be compared line by line.

Several stages may live on one pipeline rank: stage i on rank i % pp, as its chunk i // pp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORWARD = "F"
BACKWARD = "B"
INPUT_GRADIENT = "I"
WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """``kind`` is 'F', 'B', 'I' or 'W' (see the module); stages and micro-batches count from 0."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        match = re.fullmatch(r"(0|[1-9][0-9]*)([FBIW])(0|[1-9][0-9]*)", text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write for example 2F0 or 2B0")
        return Action(int(match[1]), match[2], int(match[3]))


Order = tuple[Action, ...]  # the actions of one pipeline rank, in the order it runs them


def parse_order(text: str) -> Order:
    """Read the actions of one rank, separated by white space: ``0F0 0F1 0B0 0B1``."""
    return tuple(Action.parse(word) for word in text.split())


def print_order(order: Order) -> str:
    return " ".join(map(str, order))
