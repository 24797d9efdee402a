"""This machine as a Cluster: what training ranks get of it, measured with all of them at work at once, and kept.

    measured_cluster(gpus) -> Cluster       measures in a few seconds; the next call reads the file that it left

Ranks share cores, caches and memory, so every rank does the same thing at the same time, for several windows of equal
length. A window gives the seconds of one call (its length over the calls made in it, which counts the time a rank waits
for a core); a figure is the median over the windows of the mean over the ranks. costmodels.calibration turns the
figures into constants.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from costmodels.calibration import Call, TimedCalls, TimedCollective, fit_device, fit_launch_s, fit_link, fit_seconds
from costmodels.hardware import Cluster, ClusterError, Device, Link
from runtime.device import synchronize
from runtime.launch import LocalRanks
from runtime.machine import free_memory_bytes, processor_name

Progress = Callable[[str], None]

THIS_MACHINE = "this machine"
WINDOWS, WINDOW_S = 5, 0.04
DTYPES = ("float32", "float64", "bfloat16", "float16")
# A linear that would take longer than this isn't tried.
SLOW_CALL_S = 0.1
# Of the memory that is free now, what ranks may plan to fill: the system and the script that started them need some.
USABLE_MEMORY = 0.8
# Part of the file's name; another number when the meaning of a figure changes.
_FORMAT = 1
# Of small operators, in a chain.
BLOCKS = 20


@dataclass(frozen=True)
class Sizes:
    """What is timed on a kind of device: large enough to show rates, small enough to take milliseconds.

    ``rows`` x ``widths``: of linears. ``large_sum``: elements. ``rows`` x ``wide``: what memory-bound operators work on.
    ``attention``: batch, heads, length, width of a head. ``message_bytes``: of collectives.
    """

    rows: int
    widths: tuple[int, ...]
    wide: int
    large_sum: int
    attention: tuple[int, int, int, int]
    attention_dtype: str
    message_bytes: tuple[int, ...]


SIZES = {
    "cpu": Sizes(1024, (128, 256, 512), 1024, 2**22, (2, 4, 256, 64), "float32", (2**12, 2**18, 2**22)),
    "cuda": Sizes(8192, (2048, 4096, 8192), 8192, 2**27, (4, 16, 2048, 128), "bfloat16", (2**12, 2**20, 2**26)),
}


def measured_cluster(
    gpus: int, *, cache_dir: Path | None = None, refresh: bool = False, progress: Progress | None = None
) -> Cluster:
    """This machine with ``gpus`` local ranks: a GPU each where there are enough, else processes that share its cores.

    ``cache_dir``: where the file lies; default ``meshwright`` in $XDG_CACHE_HOME or ~/.cache. ``refresh``: measure even
    if it is there. A file that can't be read is replaced; one that can't be written is done without. Raises BadInput
    for a number of ranks that can't be started, RankFailed when a rank ends early.
    """
    say = progress or (lambda text: None)
    kind, name = this_device(gpus)
    path = kept_at(gpus, cache_dir)
    kept = None if refresh else _read(path, gpus)
    if kept is not None:
        return kept
    say(f"measuring this machine with {gpus} rank{'s' * (gpus > 1)} at work ({name})")
    with LocalRanks.start(gpus, device=kind, rank_class="runtime.measure:Measurer") as ranks:
        cluster = _measure(ranks, kind, name, say)
    try:
        write_text(path, cluster.to_toml())
    except OSError as error:
        say(f"cannot keep the measurement in {path}: {error.strerror}")
    return cluster


def this_device(gpus: int) -> tuple[str, str]:
    """Kind ('cuda' or 'cpu') and name of what ``gpus`` local ranks run on."""
    kind = "cuda" if 1 <= gpus <= torch.cuda.device_count() else "cpu"
    return kind, torch.cuda.get_device_name(0) if kind == "cuda" else processor_name()


def kept_at(gpus: int, cache_dir: Path | None = None) -> Path:
    """The file of this machine with ``gpus`` ranks, in ``cache_dir`` or the user's cache folder."""
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    return folder / _file_name(*this_device(gpus), gpus)


class Measurer:
    """Times things on one rank; every method is called on all ranks at once."""

    REMOTE = frozenset({"linear", "attention", "large_sum", "operators", "overhead", "collective", "memory_bytes"})

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.sizes = SIZES[device.type]
        self._groups: dict[int, dist.ProcessGroup | None] = {world_size: dist.group.WORLD}

    def linear(self, dtype: str, width: int) -> list[float]:
        """Forward and backward of ``linear_call``: three products."""
        tensor = functools.partial(torch.randn, device=self.device)
        shapes = ((self.sizes.rows, width), (width, width), (width,), (self.sizes.rows, width))
        x, weight, bias, gradient = (tensor(*shape).to(getattr(torch, dtype)) for shape in shapes)
        inputs = [x.requires_grad_() for x in (x, weight, bias)]
        return self._windows(lambda: torch.autograd.grad(F.linear(x, weight, bias), inputs, gradient))

    def attention(self, is_causal: bool) -> list[float]:
        """Forward and backward of one fused call."""
        dtype = getattr(torch, self.sizes.attention_dtype)
        q, k, v, gradient = (torch.randn(self.sizes.attention, device=self.device, dtype=dtype) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def work() -> None:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            torch.autograd.grad(output, inputs, gradient)

        return self._windows(work)

    def large_sum(self) -> list[float]:
        a, b = (torch.randn(self.sizes.large_sum, device=self.device) for _ in range(2))
        return self._windows(lambda: a + b)

    def operators(self) -> list[float]:
        """Forward and backward of ``memory_bound_operators``."""
        rows, width = self.sizes.rows, self.sizes.wide
        x, y, gradient = (torch.randn(rows, width, device=self.device) for _ in range(3))
        scale, shift = torch.ones(width, device=self.device), torch.zeros(width, device=self.device)
        inputs = [tensor.requires_grad_() for tensor in (x, y, scale, shift)]

        def work() -> None:
            normal = F.gelu(F.layer_norm(x, (width,), scale, shift))
            torch.autograd.grad((normal + y).softmax(-1), inputs, gradient)

        return self._windows(work)

    def overhead(self) -> list[float]:
        """Forward and backward of ``small_operators``.

        A CPU spends the time of views and of autograd's bookkeeping between operators, so that a piece of a model
        shows it. A GPU works meanwhile; what it waits for is the least time between two operators.
        """
        ones = functools.partial(torch.ones, device=self.device)
        x, weight, vector = (ones(*shape, requires_grad=True) for shape in ((8, 8), (8, 8), (8,)))
        gradient, on_gpu = ones(8, 8), self.device.type == "cuda"

        def work() -> None:
            y = x
            for _ in range(BLOCKS):
                if not on_gpu:
                    heads = F.layer_norm(y, (8,), vector, vector).view(2, 4, 8).transpose(0, 1)
                    y = F.gelu(F.linear(heads, weight, vector)).transpose(0, 1).reshape(8, 8)
                y = y + x
            torch.autograd.grad(y, x if on_gpu else (x, weight, vector), gradient)

        return self._windows(work)

    def collective(self, kind: str, size_bytes: int, group_size: int) -> list[float]:
        """all_reduce on all groups of neighbours at once, or send to the next of the group; empty on a rank without."""
        group = self._group(group_size)
        message, other = (torch.zeros(size_bytes // 4, device=self.device) for _ in range(2))
        seconds, calls = [], 5 if size_bytes < 2**20 else 2
        for _ in range(WINDOWS + 1):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(calls if group is not None else 0):
                if kind == "all_reduce":
                    dist.all_reduce(message, group=group)
                else:
                    self._send_on(message, other, group_size, group)
            synchronize(self.device)
            seconds.append((time.perf_counter() - start_s) / calls)
        return seconds[1:] if group is not None else []

    def memory_bytes(self) -> int:
        """Bytes this rank may plan to fill."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[1])
        return int(free_memory_bytes() * USABLE_MEMORY / self.world_size)

    def _windows(self, work: Callable[[], object]) -> list[float]:
        """Seconds of a call of ``work`` in each window, all ranks starting each window together."""
        work()
        synchronize(self.device)
        start_s = time.perf_counter()
        work()
        synchronize(self.device)
        once_s = time.perf_counter() - start_s
        # On a GPU calls are queued; waiting for each would time the wait.
        queued = max(1, int(WINDOW_S / 3 / once_s)) if self.device.type == "cuda" else 1
        seconds = []
        for _ in range(WINDOWS):
            dist.barrier()
            calls, passed_s, start_s = 0, 0.0, time.perf_counter()
            while passed_s < WINDOW_S:
                for _ in range(queued):
                    work()
                synchronize(self.device)
                calls += queued
                passed_s = time.perf_counter() - start_s
            seconds.append(passed_s / calls)
        return seconds

    def _group(self, size: int) -> dist.ProcessGroup | None:
        """This rank's group of ``size`` neighbours; None for the ranks left over. All ranks make the same groups."""
        if size not in self._groups:
            mine = None
            for first in range(0, self.world_size - size + 1, size):
                members = list(range(first, first + size))
                group = dist.new_group(members)
                mine = group if self.rank in members else mine
            self._groups[size] = mine
        return self._groups[size]

    def _send_on(
        self, message: torch.Tensor, other: torch.Tensor, group_size: int, group: dist.ProcessGroup | None
    ) -> None:
        place, actions = self.rank % group_size, []
        if place < group_size - 1:
            actions.append(dist.P2POp(dist.isend, message, self.rank + 1, group))
        if place > 0:
            actions.append(dist.P2POp(dist.irecv, other, self.rank - 1, group))
        for request in dist.batch_isend_irecv(actions):
            request.wait()


def small_operators(kind: str) -> tuple[Call, ...]:
    """What ``Measurer.overhead`` runs, but for the views."""
    x, vector = ((8, 8), "float32"), ((8,), "float32")
    block: tuple[Call, ...] = (Call("aten.add.Tensor", (x, x), (x,), (True, True)),)
    if kind == "cpu":
        block += (
            Call("aten.layer_norm.default", (x, vector, vector), (x,), (True,) * 3),
            Call("aten.linear.default", (x, x, vector), (x,), (True,) * 3),
            Call("aten.gelu.default", (x,), (x,), (True,)),
        )
    return block * BLOCKS


def linear_call(sizes: Sizes, dtype: str, width: int) -> Call:
    """What ``Measurer.linear`` runs."""
    x, weight, bias = ((sizes.rows, width), dtype), ((width, width), dtype), ((width,), dtype)
    return Call("aten.linear.default", (x, weight, bias), (x,), (True,) * 3)


def attention_call(sizes: Sizes, is_causal: bool) -> Call:
    """What ``Measurer.attention`` runs."""
    tensor = (sizes.attention, sizes.attention_dtype)
    op, hint = "aten.scaled_dot_product_attention.default", (("is_causal", is_causal),)
    return Call(op, (tensor,) * 3, (tensor,), (True,) * 3, hint)


def large_sum(sizes: Sizes) -> Call:
    """What ``Measurer.large_sum`` runs."""
    large = ((sizes.large_sum,), "float32")
    return Call("aten.add.Tensor", (large, large), (large,), (False, False))


def memory_bound_operators(sizes: Sizes) -> tuple[Call, ...]:
    """What ``Measurer.operators`` runs."""
    x, vector = ((sizes.rows, sizes.wide), "float32"), ((sizes.wide,), "float32")
    return (
        Call("aten.layer_norm.default", (x, vector, vector), (x,), (True,) * 3),
        Call("aten.gelu.default", (x,), (x,), (True,)),
        Call("aten.add.Tensor", (x, x), (x,), (True, True)),
        Call("aten.softmax.int", (x,), (x,), (True,)),
    )


def _measure(ranks: LocalRanks, kind: str, name: str, say: Progress) -> Cluster:
    sizes = SIZES[kind]

    def timed(method: str, **arguments: Any) -> float:
        return fit_seconds(ranks.call(method, arguments))

    launch_s = fit_launch_s(TimedCalls(small_operators(kind), timed("overhead")))
    say("linear layers and attention")
    products: dict[str, list[TimedCalls]] = {dtype: [] for dtype in DTYPES}
    for dtype, found in products.items():
        for width in sizes.widths:
            call = linear_call(sizes, dtype, width)
            found.append(TimedCalls((call,), timed("linear", dtype=dtype, width=width)))
            if 4 * found[-1].seconds > SLOW_CALL_S:  # the next weight is four times this one
                break
    attention = [
        TimedCalls((attention_call(sizes, causal),), timed("attention", is_causal=causal)) for causal in (False, True)
    ]
    say("memory and messages")
    device = fit_device(
        name if kind == "cuda" else f"process on {name}",
        "gpu" if kind == "cuda" else "cpu",
        round_down(min(ranks.call("memory_bytes"))),
        launch_s,
        products,
        attention,
        TimedCalls((large_sum(sizes),), timed("large_sum")),
        TimedCalls(memory_bound_operators(sizes), timed("operators")),
    )
    collectives = []
    for action, group_size in [("all_reduce", size) for size in sorted({2, ranks.n})] + [("send", ranks.n)]:
        for size_bytes in sizes.message_bytes if ranks.n > 1 else ():
            arguments = {"kind": action, "size_bytes": size_bytes, "group_size": group_size}
            collectives.append(TimedCollective(action, size_bytes, group_size, timed("collective", **arguments)))
    link = fit_link(collectives, launch_s) if collectives else Link(device.memory_bytes_per_s / 2, launch_s)
    return measured(device, link, ranks.n)


def measured(device: Device, link: Link, ranks: int) -> Cluster:
    """The cluster of ``ranks`` such devices in one node, numbers short enough to read, their sources beside them."""
    device = replace(
        device,
        peak_flops_per_s={dtype: _short(peak) for dtype, peak in device.peak_flops_per_s.items()},
        memory_bytes_per_s=_short(device.memory_bytes_per_s),
        kernel_launch_s=_short(device.kernel_launch_s),
        attention_efficiency=_short(device.attention_efficiency),
        memory_efficiency=_short(device.memory_efficiency),
    )
    link = Link(_short(link.bandwidth_bytes_per_s), _short(link.latency_s))
    fields = ("memory_bytes", "memory_bytes_per_s", "kernel_launch_s", "attention_efficiency", "memory_efficiency")
    sources = {f"device.{field}": "measured" for field in fields}
    sources |= {f"device.peak_flops_per_s.{dtype}": "measured" for dtype in device.peak_flops_per_s}
    how = "measured" if ranks > 1 else "measured: a copy in memory, there being no other rank"
    for side in ("intra", "inter"):
        sources |= {f"{side}.bandwidth_bytes_per_s": how, f"{side}.latency_s": how}
    title = f"{THIS_MACHINE} ({ranks} rank{'s' * (ranks > 1)})"
    return Cluster(title, device, ranks, ranks, link, link, sources=tuple(sources.items()))


def round_down(value: int) -> int:
    """To two significant digits: free memory changes from call to call."""
    unit = 10 ** max(len(str(value)) - 2, 0)
    return value // unit * unit


def _short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def _file_name(kind: str, name: str, gpus: int) -> str:
    """What the figures depend on: the device, torch, the ranks, and the cores and threads they have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "auto")
    text = f"{kind}-{name}-torch{torch.__version__}-{gpus}ranks-{cores}cores-{threads}threads-{_FORMAT}"
    return "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "_" for c in text)[:200] + ".toml"


def _read(path: Path, gpus: int) -> Cluster | None:
    """The cluster in the file; None where there is none that can be used."""
    try:
        cluster = Cluster.parse(path.read_text(encoding="utf-8"), str(path))
    except (ClusterError, OSError, UnicodeDecodeError):
        return None
    return cluster if cluster.gpus == gpus else None


def write_text(path: Path, text: str) -> None:
    """Beside it and renamed, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:40], suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
