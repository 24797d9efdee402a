"""Constants fitted to times that the cost model itself predicts come back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.calibration import (
    Call,
    TimedCalls,
    TimedCollective,
    beyond,
    fit_device,
    fit_launch_s,
    fit_link,
    fit_seconds,
)
from costmodels.collectives import collective_time_s
from costmodels.hardware import Cluster, Device, Link

LARGE = ((4096, 256), "float32")
ROW = ((256,), "float32")
HEADS = ((2, 4, 256, 64), "float32")
SUM = Call("aten.add.Tensor", (LARGE, LARGE), (LARGE,), (False, False))
MIXED = (
    Call("aten.layer_norm.default", (LARGE, ROW, ROW), (LARGE,), (True, True, True)),
    Call("aten.gelu.default", (LARGE,), (LARGE,), (True,)),
)
SIZES = [(size, ranks) for ranks in (2, 4) for size in (2**12, 2**18, 2**22)]


def product(dtype: str, n: int) -> Call:
    square = ((n, n), dtype)
    return Call("aten.mm.default", (square, square), (square,), (False, False))


def attention(is_causal: bool) -> Call:
    op, hint = "aten.scaled_dot_product_attention.default", (("is_causal", is_causal),)
    return Call(op, (HEADS,) * 3, (HEADS,), (True,) * 3, hint)


def device(**changes: object) -> Device:
    peaks = {"float32": 30e9, "bfloat16": 70e9}
    fast = Device("box", 10**9, peaks, 16e9, 1e-5, 1.0, "cpu", attention_efficiency=0.5, memory_efficiency=0.25)
    return replace(fast, **changes)  # type: ignore[arg-type]


def timed(true: Device, *calls: Call) -> TimedCalls:
    return TimedCalls(calls, TimedCalls(calls, 0.0).predicted_s(true))


def fitted(true: Device, **changes: TimedCalls) -> Device:
    arguments = {
        "products": {dtype: [timed(true, product(dtype, n)) for n in (256, 512)] for dtype in true.peak_flops_per_s},
        "attention": [timed(true, attention(False)), timed(true, attention(True))],
        # the large sum reaches the whole rate, the mixed operators the efficiency's part of it
        "large_sum": timed(replace(true, memory_efficiency=1.0), SUM),
        "operators": timed(true, *MIXED),
    } | changes
    return fit_device(true.name, true.kind, true.memory_bytes, true.kernel_launch_s, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_device_comes_back_from_its_own_times(kind: str) -> None:
    true = device(kind=kind)
    found = fitted(true)
    assert (found.name, found.kind, found.memory_bytes) == (true.name, kind, true.memory_bytes)
    assert found.peak_flops_per_s == pytest.approx(true.peak_flops_per_s, rel=1e-9)
    for name in (
        "memory_bytes_per_s", "kernel_launch_s", "matmul_efficiency", "attention_efficiency", "memory_efficiency",
    ):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-9), name


def test_a_launch_is_the_time_over_the_operators_of_both_directions() -> None:
    """A sum has one launch each way; a linear with a bias one forward and three backward."""
    x, vector = ((8, 8), "float32"), ((8,), "float32")
    add = Call("aten.add.Tensor", (x, x), (x,), (True, True))
    linear = Call("aten.linear.default", (x, x, vector), (x,), (True,) * 3)
    assert fit_launch_s(TimedCalls((add,) * 10, 1.0)) == pytest.approx(1 / 20)
    assert fit_launch_s(TimedCalls((add, linear, linear), 1.0)) == pytest.approx(1 / 10)


def test_attention_is_compared_to_the_peak_of_its_dtype() -> None:
    true = device()
    half = ((2, 4, 256, 64), "bfloat16")
    call = replace(attention(False), inputs=(half,) * 3, outputs=(half,))
    found = fitted(true, attention=[timed(true, call)])  # type: ignore[arg-type]
    assert found.attention_efficiency == pytest.approx(0.5, rel=1e-9)


def test_efficiencies_stay_at_most_one() -> None:
    true = device()
    found = fitted(true, operators=timed(device(memory_bytes_per_s=1e12), *MIXED))
    assert found.memory_efficiency == 1.0


def test_one_slow_product_of_three_does_not_count() -> None:
    true = device()
    calls = [timed(true, product("float32", n)) for n in (256, 512, 1024)]
    calls[1] = replace(calls[1], seconds=50 * calls[1].seconds)
    found = fitted(true, products={"float32": calls})  # type: ignore[arg-type]
    assert found.peak("float32") == pytest.approx(30e9, rel=1e-9)


def test_the_median_of_repetitions_and_the_mean_of_ranks() -> None:
    assert fit_seconds([[1.0, 9.0, 2.0], [3.0, 1.0, 4.0]]) == 3.0  # of 2, 5 and 3
    assert fit_seconds([[1.0, 5.0, 3.0], []]) == 3.0  # a rank outside every group
    with pytest.raises(ValueError):
        fit_seconds([[1.0, 2.0], [1.0]])


def test_launches_never_take_all_of_a_time() -> None:
    assert beyond(5.0, 1.0) == 4.0
    assert beyond(1.0, 5.0) == 0.1


def collectives(link: Link, launch_s: float, kinds: tuple[str, ...] = ("all_reduce", "send")) -> list[TimedCollective]:
    def seconds(kind: str, size: int, ranks: int) -> float:
        true = Cluster("box", device(kernel_launch_s=launch_s), ranks, ranks, link, link)
        return collective_time_s(kind, size, ranks, 1, true)

    return [TimedCollective(kind, size, ranks, seconds(kind, size, ranks)) for kind in kinds for size, ranks in SIZES]


@given(beta=st.floats(1e8, 1e12), alpha=st.floats(1e-6, 1e-2), launch_s=st.floats(0, 1e-6))
def test_a_link_comes_back_from_its_own_times(beta: float, alpha: float, launch_s: float) -> None:
    found = fit_link(collectives(Link(beta, alpha), launch_s), launch_s)
    # with a large alpha and beta the largest message takes 1e-9 of its time for its bytes: only alpha shows
    if alpha * beta < 1e9:
        assert found.bandwidth_bytes_per_s == pytest.approx(beta, rel=1e-4)
    assert found.latency_s == pytest.approx(alpha, rel=1e-4)


def test_alpha_and_beta_of_two_times_by_hand() -> None:
    """all_reduce among 4: 6 alpha + 1.5 S / beta; 6 us and 6 us + 1.5 ms for 1 MB at alpha 1 us, beta 1 GB/s."""
    small, large = TimedCollective("all_reduce", 1000, 4, 7.5e-6), TimedCollective("all_reduce", 10**6, 4, 1.506e-3)
    found = fit_link([small, large], 0.0)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-9)
    assert found.latency_s == pytest.approx(1e-6, rel=1e-9)


def test_times_without_latency_give_none() -> None:
    """A launch that is longer than the least time would make alpha negative."""
    found = fit_link(collectives(Link(1e9, 0.0), 0.0), 1e-7)
    assert found.latency_s == 0.0
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_times_that_shrink_with_size_give_a_finite_link() -> None:
    times = [TimedCollective("send", size, 2, 1e-3 - size * 1e-12) for size in (2**12, 2**18, 2**22)]
    found = fit_link(times, 0.0)
    assert found.latency_s == pytest.approx(1e-3, rel=0.02)
    assert 2**22 / found.bandwidth_bytes_per_s <= 1.01e-5


def test_scatter_in_both_directions_cancels() -> None:
    """Times 30 % above and below: the fit lies between, not below all of them."""
    true = Link(1e9, 1e-4)
    times = collectives(true, 0.0)
    noisy = [replace(t, seconds=t.seconds * factor) for t in times for factor in (0.7, 1.3)]
    found = fit_link(noisy, 0.0)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert found.latency_s == pytest.approx(1e-4, rel=1e-6)


def test_one_time_is_not_enough_for_a_link() -> None:
    with pytest.raises(ValueError, match="two times"):
        fit_link([TimedCollective("send", 8, 2, 1.0)], 0.0)
