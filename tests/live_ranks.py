"""What the ranks of tests/test_live.py run: one step under the allocator's eyes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from planner.garbage import uncollected
from planner.ir.program import Program
from planner.trace import tensors_by_target
from runtime.worker import Rank
from tests.models import MODELS
from tests.reference import input_tensors, traced


def allocated_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """The most that ``run`` has allocated on the CPU at once, and what is left of it at its end.

    Garbage of before is collected first: what is let go of while ``run`` is watched counts as its own.
    """
    gc.collect()
    with uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = most = 0
    for _, size in events:
        now += size
        most = max(most, now)
    return most, now


def step_memory(rank: int, size: int, name: str, program: Program, folder: str) -> None:
    """Write 'peak left' of the first step of ``program`` to a file named after the rank."""
    case = MODELS[name](torch.float32)
    found = traced(case)
    targets = [leaf.target for leaf in found.graph.leaves if leaf.kind in ("parameter", "buffer")]
    worker = Rank(rank, size)
    worker.load(program, {k: x.detach().clone() for k, x in tensors_by_target(case.model, targets).items()})
    inputs = input_tensors(case, found)
    most, left = allocated_bytes(lambda: worker.forward_backward(inputs))
    Path(folder, str(rank)).write_text(f"{most} {left}")
