"""What the ranks of tests/test_launch.py run; the helper imports this module, never the tests themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


class EchoRank:
    REMOTE = frozenset({"echo", "total", "facts", "fail_alone", "die", "hang", "say", "leave", "unsendable", "spawn"})

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float, start_with: float = 0.0
    ) -> None:
        self.rank, self.world_size, self.device, self.start_with = rank, world_size, device, start_with

    def echo(self, **arguments: Any) -> Any:
        return arguments

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of x and of what each rank started with."""
        y = x + self.start_with
        dist.all_reduce(y)
        return y

    def facts(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "device": str(self.device),
            "backend": dist.get_backend(),
            "threads": torch.get_num_threads(),
            "directory": os.getcwd(),
            "mark": os.environ.get("LAUNCH_TEST_MARK"),
            "user_code": [name for name in sys.modules if name in ("__main__", "pytest")],
        }

    def fail_alone(self, who: int) -> None:
        """Rank ``who`` raises; the others are blocked in a collective then."""
        if self.rank == who:
            time.sleep(0.2)
            raise ValueError(f"no such colour on rank {who}")
        dist.all_reduce(torch.ones(1))

    def die(self, who: int, number: int = signal.SIGKILL) -> None:
        if self.rank == who:
            print("last words", flush=True)
            time.sleep(0.2)
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1))

    def leave(self, who: int) -> None:
        if self.rank == who:
            os._exit(3)
        dist.all_reduce(torch.ones(1))

    def hang(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1.0)

    def say(self, text: str) -> None:
        print(text)

    def unsendable(self) -> Any:
        return self

    def spawn(self) -> int:
        """A child process of the rank that outlives it unless somebody cares."""
        return subprocess.Popen(["sleep", "1000"]).pid


class BrokenRank:
    REMOTE: frozenset[str] = frozenset()

    def __init__(self, rank: int, **_: Any) -> None:
        if rank == 1:
            raise RuntimeError("rank 1 cannot be built")


class SlowRank:
    REMOTE: frozenset[str] = frozenset()

    def __init__(self, **_: Any) -> None:
        time.sleep(600.0)
