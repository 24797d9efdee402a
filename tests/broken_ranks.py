"""Ranks that train wrongly, each in one way: what ``planner verify`` has to find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from planner.ir.program import Program
from runtime import worker


class WithoutOneSum(worker.Rank):
    """The gradient of '2.weight' is not summed over data shards."""

    def load(self, program: Program | Mapping[str, Any], state: str | Path | Mapping[str, torch.Tensor]) -> None:
        super().load(program, state)
        late = self._here.reducer.late
        late.buckets = [[h for h in bucket if h.spec.target != "2.weight"] for bucket in late.buckets]


class StaleWeights(worker.Rank):
    """The optimizer never updates anything."""

    def step(self) -> None:
        pass

    def train_step(self, batch: Mapping[str, torch.Tensor], step: int = 0, max_norm: float | None = None) -> float:
        self.zero_grad()
        return self.forward_backward(batch, step)


class Dies(worker.Rank):
    def forward_backward(self, batch: Mapping[str, torch.Tensor], step: int = 0) -> float:
        raise RuntimeError("out of order")
