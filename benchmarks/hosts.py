"""Two emulated hosts: network namespaces joined by a cable (veth) whose rate is limited both ways (tc tbf). Needs root on Linux.

    with Hosts() as hosts:
        hosts.limit(100e6)                                bits a second
        hosts.run("benchmarks.network_rank", folder)      one rank on each

Leaving the block removes the namespaces, and the cable with them, however it is left. A namespace has its own interfaces and
addresses, so ranks on both hosts talk over the cable alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from benchmarks.rows import ROOT, one_thread

ADDRESSES = ("10.203.7.1", "10.203.7.2")
PORT = 29577
QUEUE_S = 0.05
TICK_S = 0.004  # a bucket has to hold what the rate lets through between two ticks of the kernel


class HostsError(RuntimeError):
    """The hosts cannot be made here, or a rank on them failed."""


def why_not() -> str:
    """Why hosts cannot be emulated here; '' where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts are emulated by network namespaces, which need Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"two hosts are emulated with {' and '.join(missing)}, which is not installed (package iproute2)"
    try:
        with Hosts():
            return ""
    except HostsError as error:
        return str(error)


class Hosts:
    def __init__(self) -> None:
        self.names = tuple(f"meshwright-{os.getpid()}-{i}" for i in range(len(ADDRESSES)))
        self.links = tuple(f"mw{os.getpid() % 10**6}v{i}" for i in range(len(ADDRESSES)))

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            _do("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
                _do("ip", "link", "set", link, "netns", name)
                _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
                for each in ("lo", link):
                    _do("ip", "-n", name, "link", "set", each, "up")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.links[0]], capture_output=True)  # where it was not moved yet

    def limit(self, bits_per_s: float) -> None:
        """Let so many bits a second through, each way."""
        burst_bytes = max(int(bits_per_s / 8 * TICK_S), 1 << 16)
        for name, link in zip(self.names, self.links, strict=True):
            rate, queue = f"{int(bits_per_s)}bit", f"{QUEUE_S * 1e3:g}ms"
            limits = ("rate", rate, "burst", f"{burst_bytes}b", "latency", queue)
            _do("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", link, "root", "tbf", *limits)

    def run(self, module: str, folder: Path, timeout_s: float) -> None:
        """``python -m module folder`` as one rank on each host; returns when both are done. Raises HostsError."""
        size = len(self.names)
        world = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        ranks = []
        try:
            for rank, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
                environment = {**one_thread(), **world, "RANK": str(rank), "GLOO_SOCKET_IFNAME": link}
                command = ["ip", "netns", "exec", name, sys.executable, "-m", module, str(folder)]
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
            for rank, process in enumerate(ranks):
                _, told = process.communicate(timeout=timeout_s)
                if process.returncode:
                    last = (told.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                    raise HostsError(f"rank {rank}: {last}")
        except subprocess.TimeoutExpired:
            raise HostsError(f"no end within {timeout_s:g} s") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
