"""Starting a few gloo ranks for a test: each runs ``function(rank, size, *arguments)`` in its own process.

The processes are forked from one server that has imported torch, so a start costs tenths of a second.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

TIMEOUT_S = 120


def run_ranks(function: Callable[..., None], size: int, *arguments: Any) -> None:
    """Run ``function``, a module's top-level one, on ``size`` ranks; raises the first error of any of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.pipelining"]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch_multiprocessing.start_processes(
            _rank, (function, size, str(Path(folder) / "rendezvous"), arguments), nprocs=size, start_method="forkserver"
        )


def _rank(rank: int, function: Callable[..., None], size: int, store: str, arguments: tuple[Any, ...]) -> None:
    import datetime

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        function(rank, size, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
