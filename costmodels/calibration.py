"""The constants of a machine from times measured on it: those with which the cost model's own formulas give the times.

    l                    fit_launch_s  seconds = launches l                                   small operators
    peak of a dtype      fit_device    seconds = launches l + flops / peak                    median over products
    memory rate          fit_device    seconds = launches l + bytes / rate                    of a large sum
    efficiencies         fit_device    the same, relative to the peak and to the rate         attention; mixed operators
    alpha, beta          fit_link      seconds = launches l + a (1 / beta) + b alpha          least squares, relative errors

l is the time of one small operator. Launches, flops, bytes, a and b are what costmodels.compute and costmodels.collectives
give for a device or link whose other constants cost nothing. The squares are weighted by the predicted times, found by
iteration: weights by the measured ones would favour fits below the measured times.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels.collectives import collective_time_s
from costmodels.compute import operator_time_s
from costmodels.hardware import Cluster, Device, Link
from costmodels.operators import Hint, Tensor

_ITERATIONS = 20
_FREE = 1e30


@dataclass(frozen=True)
class Call:
    """One call of an operator, as costmodels.compute.operator_time_s takes it."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    hint: Hint = ()


@dataclass(frozen=True)
class TimedCalls:
    """``seconds`` of all ``calls`` together, with the backward of those whose inputs need gradients."""

    calls: tuple[Call, ...]
    seconds: float

    def predicted_s(self, device: Device) -> float:
        times = [operator_time_s(c.op, c.inputs, c.outputs, c.needs_grad, device, c.hint) for c in self.calls]
        return sum(time.forward_s + time.backward_s for time in times)


@dataclass(frozen=True)
class TimedCollective:
    """``seconds`` of one collective of ``size_bytes`` (as in costmodels.collectives) among ``ranks`` of one node."""

    kind: str
    size_bytes: int
    ranks: int
    seconds: float


def fit_launch_s(small: TimedCalls) -> float:
    """Seconds of one launch, from operators too small to take time for anything else."""
    return small.seconds / small.predicted_s(_launching(_free("cpu")))


def fit_device(
    name: str,
    kind: str,
    memory_bytes: int,
    kernel_launch_s: float,
    products: Mapping[str, Sequence[TimedCalls]],
    attention: Sequence[TimedCalls],
    large_sum: TimedCalls,
    operators: TimedCalls,
) -> Device:
    """A device from the times of: matrix products by dtype, fused attention, a large sum, mixed memory-bound operators.

    The peaks are what products reach, so ``matmul_efficiency`` is 1; the other efficiencies are at most 1. Attention is
    compared to the peak of its own dtype, which ``products`` must have. ``memory_bytes`` and ``kernel_launch_s`` are
    taken as they are.
    """
    free = _free(kind)
    computing, moving = replace(free, peak_flops_per_s={"float32": 1.0}), replace(free, memory_bytes_per_s=1.0)

    launch_s = kernel_launch_s if kind == "cpu" else 0.0  # a GPU starts the next operator while it works on one

    def rates(timed: Sequence[TimedCalls], unit: Device) -> list[float]:
        return [t.predicted_s(unit) / beyond(t.seconds, launch_s * t.predicted_s(_launching(free))) for t in timed]

    peaks = {dtype: statistics.median(rates(timed, computing)) for dtype, timed in products.items()}
    together = TimedCalls(tuple(c for t in attention for c in t.calls), sum(t.seconds for t in attention))
    dtype = together.calls[0].inputs[0][1]
    (attention_rate,), (memory_rate,), (operator_rate,) = (
        rates([timed], unit) for timed, unit in ((together, computing), (large_sum, moving), (operators, moving))
    )
    return Device(
        name=name,
        kind=kind,
        memory_bytes=memory_bytes,
        matmul_efficiency=1.0,
        peak_flops_per_s=peaks,
        memory_bytes_per_s=memory_rate,
        kernel_launch_s=kernel_launch_s,
        attention_efficiency=min(attention_rate / peaks[dtype], 1.0),
        memory_efficiency=min(operator_rate / memory_rate, 1.0),
    )


def _free(kind: str) -> Device:
    """Nothing costs anything on it."""
    return Device("free", 1, {"float32": _FREE}, _FREE, 0.0, 1.0, kind, attention_efficiency=1.0)


def _launching(free: Device) -> Device:
    """Only launches cost, a second each: times on it count them."""
    return replace(free, kernel_launch_s=1.0)


def fit_seconds(ranks: Sequence[Sequence[float]]) -> float:
    """One time from every rank's repetitions: the median over repetitions of the mean over ranks.

    A rank without any doesn't count. Raises ValueError when the others differ in number.
    """
    repetitions = zip(*(seconds for seconds in ranks if seconds), strict=True)
    return statistics.median(statistics.fmean(one) for one in repetitions)


def beyond(seconds: float, launch_s: float) -> float:
    """``seconds`` without launches; noise can't make it less than a tenth."""
    return max(seconds - launch_s, seconds / 10)


def fit_link(timed: Sequence[TimedCollective], launch_s: float) -> Link:
    """The link inside a node with which ``collective_time_s`` comes closest to ``timed``; latency at least 0.

    Where times don't grow with the size (noise, or messages too small to tell), the bandwidth is such that no message
    spends more than 1 % of its time on its bytes. Raises ValueError without two times.
    """
    if len(timed) < 2:
        raise ValueError("a link is fitted to at least two times")
    rows = [(_time_s(t, 0.0), _time_s(t, 1.0) - _time_s(t, 0.0), beyond(t.seconds, launch_s)) for t in timed]
    weights = [1 / seconds**2 for _, _, seconds in rows]
    for _ in range(_ITERATIONS):
        inverse, alpha = _least_squares(rows, weights)
        weights = [1 / max(a * inverse + b * alpha, 1e-12) ** 2 for a, b, _ in rows]
    return Link(1 / inverse, alpha)


def _least_squares(rows: Sequence[tuple[float, float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """(x, y), x above and y at least 0, with a x + b y closest to s for the rows (a, b, s)."""

    def total(i: int, j: int) -> float:
        return sum(weight * row[i] * row[j] for row, weight in zip(rows, weights, strict=True))

    aa, ab, bb, sa, sb = total(0, 0), total(0, 1), total(1, 1), total(2, 0), total(2, 1)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (sa * bb - sb * ab) / determinant, (sb * aa - sa * ab) / determinant
        if x > 0:
            return (x, y) if y >= 0 else (sa / aa, 0.0)
    return 0.01 * min(s / a for a, _, s in rows if a), sb / bb


def _time_s(timed: TimedCollective, latency_s: float) -> float:
    """What the formula says of the collective on a link of 1 byte per second, launches being free."""
    device = Device("unit", 1, {"float32": 1.0}, 1.0, 0.0, 1.0)
    link = Link(1.0, latency_s)
    unit = Cluster("unit", device, timed.ranks, timed.ranks, link, link)
    return collective_time_s(timed.kind, timed.size_bytes, timed.ranks, 1, unit)
