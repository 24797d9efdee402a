"""This machine as a Cluster: what training ranks get of it, measured with all of them at work at once, and kept.

    measured_cluster(gpus) -> Cluster       measures in a few seconds; the next call reads the file it left

Every rank times the same things at the same time, so that shared cores, caches and memory show:

    matmul rate          of square products, per dtype
    memory rate          of adding large tensors
    operator overhead    of a chain of small operators, forward and backward, per operator
    attention            a fused attention call against the matmul rate
    all_reduce           of all ranks, at a small and a large message: alpha and beta by the cost model's own formula

The slowest rank counts. The file is a cluster's TOML text, named after what it depends on; one that cannot be read is
measured again.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from costmodels.hardware import Cluster, ClusterError, Device, Link
from planner.errors import BadInput
from runtime.device import synchronize
from runtime.launch import LocalRanks

Progress = Callable[[str], None]
MATMUL_SIZES = {"cpu": (256, 512), "cuda": (2048, 4096)}
DTYPES = ("float32", "float64", "bfloat16")
SMALL_BYTES, LARGE_BYTES = 4096, 2**22
REPETITIONS = 5
# Of the memory free now, what a plan may fill: the rest is for the processes themselves.
USABLE_MEMORY = 0.8


def measured_cluster(
    gpus: int, *, cache_dir: Path | None = None, refresh: bool = False, progress: Progress | None = None
) -> Cluster:
    """This machine with ``gpus`` local ranks: GPUs where there are enough, else processes on its cores.

    ``cache_dir``: default $XDG_CACHE_HOME/meshwright. ``refresh``: measure even if a file is there. Raises BadInput when the
    machine has GPUs but not enough, RankFailed when ranks cannot start.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available and gpus > available:
        raise BadInput(
            f"{gpus} GPUs are asked for, this machine has {available}. Use gpus={available}, or name a cluster to plan for: "
            "cluster='dgx-a100-80gb'"
        )
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    path = folder / f"{_fingerprint(gpus, available)}.toml"
    if not refresh and path.exists():
        try:
            return Cluster.parse(path.read_text(), str(path))
        except (ClusterError, OSError, UnicodeDecodeError):
            pass
    if progress is not None:
        progress("measuring this machine")
    with LocalRanks.start(gpus, rank_class="runtime.measure:Measurer") as ranks:
        figures = [ranks.call(name) for name in ("compute", "communication", "memory")]
    cluster = fit_cluster(gpus, "gpu" if available else "cpu", *figures)
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(cluster.to_toml())
    beside.replace(path)
    return cluster


def _fingerprint(gpus: int, available: int) -> str:
    kind = torch.cuda.get_device_name(0) if available else platform.processor() or platform.machine()
    text = f"{kind}-torch{torch.__version__}-{gpus}ranks-{os.cpu_count()}cores-{os.environ.get('OMP_NUM_THREADS', 'auto')}"
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)


class Measurer:
    """Times things on one rank; every method is called on all ranks at once and returns seconds or rates."""

    REMOTE = frozenset({"compute", "communication", "memory"})

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    def _together(self, work: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
        """Median seconds of ``work``, all ranks starting each repetition together."""
        times = []
        for number in range(repetitions + 1):
            if self.world_size > 1:
                dist.barrier()
            start = time.perf_counter()
            work()
            synchronize(self.device)
            if number:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def compute(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for dtype in DTYPES:
            rates = []
            for n in MATMUL_SIZES[self.device.type]:
                a = torch.randn(n, n, device=self.device).to(getattr(torch, dtype))
                rates.append(2 * n**3 / self._together(lambda a=a: a @ a, 3))  # type: ignore[misc]
            found[dtype] = max(rates)
        big = torch.ones(2**22, device=self.device)
        found["memory"] = 3 * big.numel() * 4 / self._together(lambda: big + big)
        found["overhead"] = self._overhead()
        q = torch.randn(2, 4, 256, 64, device=self.device)
        flops = 4 * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * q.shape[3]
        attention = flops / self._together(lambda: F.scaled_dot_product_attention(q, q, q))
        found["attention"] = min(1.0, attention / found["float32"])
        return found

    def _overhead(self) -> float:
        """Seconds of a small operator: half of forward and backward of a chain, per operator."""
        x = torch.ones(8, 8, device=self.device, requires_grad=True)
        count = 200

        def chain() -> None:
            y = x
            for _ in range(count):
                y = y * 1.0001
            y.sum().backward()
            x.grad = None

        return self._together(chain) / (2 * count)

    def communication(self) -> list[float]:
        """Seconds of all_reduce of a small and of a large message."""
        if self.world_size == 1:
            return [0.0, 0.0]
        times = []
        for size in (SMALL_BYTES, LARGE_BYTES):
            message = torch.zeros(size // 4, device=self.device)
            times.append(self._together(lambda m=message: dist.all_reduce(m), 4 * REPETITIONS))  # type: ignore[misc]
        return times

    def memory(self) -> int:
        """Bytes this rank may plan with."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[1])
        pages, page_bytes = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        available = pages * page_bytes
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        except OSError:
            pass
        return int(available * USABLE_MEMORY / self.world_size)


def fit_link(ranks: int, small_s: float, large_s: float, launch_s: float) -> Link:
    """alpha and beta of all_reduce = launch + 2 (n-1)/n size / beta + 2 (n-1) alpha from two message sizes."""
    if ranks == 1:
        return Link(1e12, 0.0)
    slope = max((large_s - small_s) / (LARGE_BYTES - SMALL_BYTES), 1e-13)
    beta = 2 * (ranks - 1) / ranks / slope
    rest = small_s - SMALL_BYTES * slope - launch_s
    return Link(beta, max(rest, 0.0) / (2 * (ranks - 1)))


def fit_cluster(
    gpus: int, kind: str, compute: list[dict[str, float]], communication: list[list[float]], memory: list[int]
) -> Cluster:
    """The cluster from every rank's figures; the slowest rank counts."""
    slowest = {name: min(rank[name] for rank in compute) for name in compute[0]}
    overhead = max(rank["overhead"] for rank in compute)
    small, large = (max(rank[i] for rank in communication) for i in (0, 1))
    device = Device(
        name="cpu process" if kind == "cpu" else torch.cuda.get_device_name(0),
        memory_bytes=_rounded(min(memory)),
        peak_flops_per_s={dtype: slowest[dtype] for dtype in DTYPES} | {"float16": slowest["bfloat16"]},
        memory_bytes_per_s=slowest["memory"],
        kernel_launch_s=overhead,
        matmul_efficiency=1.0,
        kind=kind,
        attention_efficiency=slowest["attention"],
    )
    link = fit_link(gpus, small, large, overhead)
    return Cluster("this machine", device, gpus, gpus, link, link, sources=(("*", "measured"),))


def _rounded(value: int) -> int:
    """Down to two significant digits: free memory changes from call to call."""
    unit = 10 ** max(len(str(value)) - 2, 0)
    return value // unit * unit
