"""The names the source of an emitted program imports (planner.ir.program.PREAMBLE)."""

from __future__ import annotations

import torch

from runtime.collectives import Axis, convert
from runtime.normalization import batch_norm
from runtime.operators import (
    cross_entropy_count,
    dropout,
    grouped_mm,
    micro_slice,
    seeded,
    vocab_parallel_cross_entropy_sum,
    vocab_parallel_embedding,
)
from runtime.stage_module import Segment, StageModule

aten = torch.ops.aten

__all__ = [
    "Axis",
    "Segment",
    "StageModule",
    "aten",
    "batch_norm",
    "convert",
    "cross_entropy_count",
    "dropout",
    "grouped_mm",
    "micro_slice",
    "seeded",
    "vocab_parallel_cross_entropy_sum",
    "vocab_parallel_embedding",
]
