"""The process group of a job that torchrun started, and handing all its ranks the same bytes and tensors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.errors import BadInput


@dataclass(frozen=True)
class World:
    """Who this process is. ``local_rank`` counts within its machine."""

    rank: int
    size: int
    local_rank: int


def current_world(environment: Mapping[str, str] | None = None) -> World | None:
    """The world torchrun describes in ``environment`` (default: the process's); None when not under torchrun.

    Raises BadInput when the numbers there make no sense.
    """
    variables = os.environ if environment is None else environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    if any(not variables.get(name) for name in names):
        return None
    try:
        world = World(int(variables["RANK"]), int(variables["WORLD_SIZE"]), int(variables["LOCAL_RANK"]))
    except ValueError as error:
        raise BadInput(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error}); start with torchrun"
        ) from error
    if not (0 <= world.rank < world.size and 0 <= world.local_rank <= world.rank):
        raise BadInput(f"{world} is not a rank of its world; start with torchrun, which sets RANK and the rest")
    return world


def init_world(world: World, device: str = "auto", timeout_s: float = 60.0) -> torch.device:
    """Join the process group of ``world`` if that was not done yet; the device of this rank.

    ``device``: 'cpu' (gloo), 'cuda' (nccl, GPU number ``local_rank``) or 'auto': cuda where this machine has that GPU.
    ``timeout_s``: of joining and of every collective. Raises BadInput when a group of another shape exists.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device {device!r} is unknown; use 'auto', 'cpu' or 'cuda'")
    available = torch.cuda.device_count() if device != "cpu" else 0
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if device == "auto" and 0 < available < beside:
        raise BadInput(
            f"{beside} ranks were started on this machine and it has {available} GPUs; start at most {available}, or hide "
            "the GPUs (CUDA_VISIBLE_DEVICES='') to run on CPU processes"
        )
    if device == "cuda" and available <= world.local_rank:
        raise BadInput(
            f"local rank {world.local_rank} has no GPU: this machine has {available}; start fewer ranks on it"
        )
    chosen = torch.device("cuda", world.local_rank) if available > world.local_rank else torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            init_method="env://",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=chosen if chosen.type == "cuda" else None,
        )
        _end_with_launcher()
    elif (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise BadInput(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in its process group "
            f"but rank {world.rank} of {world.size} by its environment; call this before init_process_group"
        )
    return chosen


def share_bytes(data: bytes | None, timeout_s: float = 3600.0) -> bytes:
    """Rank 0's ``data`` on every rank; the others pass None. Without a process group: ``data``.

    ``timeout_s``: how long the others wait for rank 0, which may be solving; longer than a collective's own timeout,
    so it has a gloo group of its own. Raises BadInput when rank 0 has no data.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        if data is None:
            raise BadInput("rank 0 has nothing to share; pass it the bytes and the other ranks None")
        if not dist.is_initialized():
            return data
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        length = torch.tensor([len(data or b"")], dtype=torch.int64)
        dist.broadcast(length, src=0, group=group)
        content = torch.empty(int(length), dtype=torch.uint8)
        if dist.get_rank() == 0 and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if content.numel():
            dist.broadcast(content, src=0, group=group)
        return content.numpy().tobytes()
    finally:
        dist.destroy_process_group(group)


def share_tensors(tensors: Mapping[str, torch.Tensor], timeout_s: float = 3600.0) -> dict[str, torch.Tensor]:
    """Rank 0's ``tensors`` on every rank; each passes tensors of those names, shapes and dtypes, on the CPU.

    Without a process group: ``tensors``. So ranks that built their model with other random numbers start alike.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(tensors)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        shared = {}
        for name in sorted(tensors):
            own = tensors[name]
            shared[name] = own if dist.get_rank() == 0 else torch.empty_like(own, memory_format=torch.contiguous_format)
            content = shared[name].contiguous().view(-1).view(torch.uint8)
            if content.numel():
                dist.broadcast(content, src=0, group=group)
        return shared
    finally:
        dist.destroy_process_group(group)


def _end_with_launcher() -> None:
    """End when torchrun's agent is killed, which leaves its workers running otherwise. Only under torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == agent_pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
