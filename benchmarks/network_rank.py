"""A rank on an emulated host: does the job in its folder, and rank 0 leaves the result there.

time      seconds of collectives, by kind and size
train     seconds of training steps of several programs, in several rounds
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.launch import current_world, init_world
from runtime.messages import decode
from runtime.timer import Timer
from runtime.worker import Rank

JOB, STATE, RESULT = "job", "state", "result.json"
TIMEOUT_S = 600.0
WARM_UP = 1


def main(folder: Path) -> None:
    world = current_world()
    assert world is not None
    torch.set_num_threads(1)
    device = init_world(world, "cpu", TIMEOUT_S)
    job = decode((folder / JOB).read_bytes())
    rank = Rank(world.rank, world.size, TIMEOUT_S, device)
    found = (
        timed(job, Timer(world.rank, world.size, device, TIMEOUT_S))
        if job["what"] == "time"
        else trained(job, rank, folder)
    )
    seconds = torch.tensor(found, dtype=torch.float64)
    if job["what"] == "time":
        dist.all_reduce(seconds)
        seconds /= world.size
    else:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step is as long as on the slowest rank
    if world.rank == 0:
        (folder / RESULT).write_text(json.dumps(seconds.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def timed(job: Mapping[str, Any], timer: Timer) -> list[float]:
    """Of each (kind, bytes) asked for."""
    windows = [timer.collective(kind, size, timer.world_size) for kind, size in job["messages"]]
    return [sum(seconds) / len(seconds) for seconds in windows]


def trained(job: Mapping[str, Any], rank: Rank, folder: Path) -> list[list[float]]:
    """Of each program: seconds of every step of all rounds but for those that warm up."""
    seconds: list[list[float]] = [[] for _ in job["programs"]]
    for _ in range(job["rounds"]):
        for found, program in zip(seconds, job["programs"], strict=True):
            rank.load(program, folder / STATE)
            rank.optimizer(job["optimizer"])
            found += rank.measure(job["batch"], job["steps"] + WARM_UP)[WARM_UP:]
    return seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]))
