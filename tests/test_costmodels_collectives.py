"""Collective times: hand-computed rings, groups that cross nodes, shared network cards; monotone in size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.collectives import COLLECTIVES, LOCAL_MOVES, collective_time_s, spread
from costmodels.hardware import Cluster, Device, Link, load_cluster

GB = 1e9
DEVICE = Device("chip", 1, {"float32": 1.0}, 1.0, 0.0, 1.0)


def cluster(gpus: int, per_node: int = 4, nics: int = 4, latency_s: float = 0.0, peer: float = 0.0) -> Cluster:
    """100 GB/s inside a node, cards of 10 GB/s, no launch cost."""
    intra = Link(100 * GB, latency_s, peer_bandwidth_bytes_per_s=peer)
    return Cluster("box", DEVICE, gpus, per_node, intra, Link(10 * GB, 10 * latency_s), nics)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rings_in_a_node(n: int) -> None:
    box = cluster(n)
    size = 1 * GB
    assert collective_time_s("all_reduce", size, n, 1, box) == pytest.approx(2 * (n - 1) / n * 0.01)
    assert collective_time_s("all_gather", size, n, 1, box) == pytest.approx((n - 1) / n * 0.01)
    assert collective_time_s("reduce_scatter", size, n, 1, box) == pytest.approx((n - 1) / n * 0.01)
    assert collective_time_s("all_to_all", size, n, 1, box) == pytest.approx((n - 1) / n**2 * 0.01)
    assert collective_time_s("broadcast", size, n, 1, box) == pytest.approx(0.01)
    assert collective_time_s("send", size, n, 1, box) == pytest.approx(0.01)


def test_latency_counts_hops() -> None:
    box = cluster(8, latency_s=1e-6)
    assert collective_time_s("all_reduce", 0, 4, 1, box) == pytest.approx(6e-6)
    assert collective_time_s("all_gather", 0, 4, 1, box) == pytest.approx(3e-6)
    assert collective_time_s("all_reduce", 0, 8, 1, box) == pytest.approx(2 * (3e-6 + 10e-6))
    assert collective_time_s("all_gather", 0, 8, 1, box) == pytest.approx(6e-6 + 10e-6)
    assert collective_time_s("all_to_all", 0, 8, 1, box) == pytest.approx(3e-6 + 10e-6)
    assert collective_time_s("send", 0, 2, 4, box) == pytest.approx(10e-6)
    assert collective_time_s("send", 0, 2, 1, box) == pytest.approx(1e-6)


def test_every_collective_pays_one_start_and_on_a_cpu_a_launch() -> None:
    gpu = Device("chip", 1, {"float32": 1.0}, 1.0, 5e-6, 1.0)
    cpu, near = replace(gpu, kind="cpu"), Link(GB, 0.0, start_s=3e-6)
    for kind in COLLECTIVES:
        for device, expected_s in ((gpu, 3e-6), (cpu, 8e-6)):
            box = Cluster("box", device, 8, 4, near, Link(GB, 0.0, start_s=7e-6))
            assert collective_time_s(kind, 0, 4, 1, box) == pytest.approx(expected_s)
            assert collective_time_s(kind, 0, 2, 4, box) == pytest.approx(expected_s + 4e-6)


def test_a_whole_node_group_uses_all_cards_of_the_node() -> None:
    # 8 ranks on 2 nodes: 4 cards of 10 GB/s carry the ring across, slower than the 100 GB/s inside.
    assert spread(8, 1, 8, 4, 4).cards == 4
    assert collective_time_s("all_reduce", GB, 8, 1, cluster(8)) == pytest.approx(2 * 7 / 8 / 40)
    # with a single card in the node it is four times as slow
    assert collective_time_s("all_reduce", GB, 8, 1, cluster(8, nics=1)) == pytest.approx(2 * 7 / 8 / 10)


def test_groups_that_cross_together_share_the_cards() -> None:
    # Two ranks at distance 4 on 2 nodes of 4: four groups cross at once, each with a card or a quarter of the only one.
    assert collective_time_s("all_reduce", GB, 2, 4, cluster(8)) == pytest.approx(1 / 10)
    assert collective_time_s("all_reduce", GB, 2, 4, cluster(8, nics=1)) == pytest.approx(4 / 10)
    # Four ranks at distance 2: two groups cross, two ranks of each on a node.
    assert spread(4, 2, 8, 4, 4).cards == 2
    assert collective_time_s("all_reduce", GB, 4, 2, cluster(8)) == pytest.approx(2 * 3 / 4 / 20)


def test_a_group_inside_a_node_does_not_see_the_network() -> None:
    alone, among_many = (collective_time_s("all_reduce", GB, 4, 1, cluster(gpus)) for gpus in (4, 64))
    assert among_many == alone


def test_the_worst_of_several_groups_counts() -> None:
    # Groups of 3 on nodes of 4: ranks 0-2 stay, ranks 3-5 cross with one rank here and two there.
    lies = spread(3, 1, 12, 4, 4)
    assert (lies.nodes, lies.local) == (2, 3)
    assert lies.cards == 1


def test_all_to_all_over_nodes() -> None:
    # Each of 8 ranks holds 1/8 GB; 4 of 8 parts of it go to the other node, over 4 cards shared by 4 ranks.
    assert collective_time_s("all_to_all", GB, 8, 1, cluster(8)) == pytest.approx(4 * (GB / 8) * (4 / 8) / (40 * GB))


def test_send_shares_cards_among_the_senders() -> None:
    assert collective_time_s("send", GB, 2, 4, cluster(8)) == pytest.approx(0.1)  # four senders, four cards
    assert collective_time_s("send", GB, 2, 4, cluster(8, nics=2)) == pytest.approx(0.2)
    assert collective_time_s("send", GB, 4, 2, cluster(8, nics=1)) == pytest.approx(0.2)  # two senders cross, one card


def test_a_mesh_of_links_is_slow_for_small_groups() -> None:
    box = cluster(4, peer=20 * GB)
    assert collective_time_s("all_gather", GB, 2, 1, box) == pytest.approx(0.5 / 20)
    assert collective_time_s("all_gather", GB, 4, 1, box) == pytest.approx(0.75 / 60)


def test_local_moves_and_groups_of_one_are_free() -> None:
    for kind in LOCAL_MOVES:
        assert collective_time_s(kind, GB, 4, 1, cluster(4)) == 0
    for kind in COLLECTIVES:
        assert collective_time_s(kind, GB, 1, 1, cluster(4)) == 0


@pytest.mark.parametrize(
    ("kind", "size", "n", "stride", "told"),
    [
        ("gather", 1, 2, 1, "unknown collective 'gather'; the kinds are all_reduce"),
        ("all_reduce", -1, 2, 1, "cannot move -1 bytes"),
        ("all_reduce", 1, 8, 1, "groups of 8 ranks at distance 1 do not fit on 4 gpus"),
        ("send", 1, 4, 2, "groups of 4 ranks at distance 2 do not fit on 4 gpus"),
    ],
)
def test_errors(kind: str, size: int, n: int, stride: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        collective_time_s(kind, size, n, stride, cluster(4))


@given(
    kind=st.sampled_from(COLLECTIVES),
    small=st.floats(0, 1e12),
    more=st.floats(0, 1e12),
    log_n=st.integers(0, 5),
    log_stride=st.integers(0, 5),
    name=st.sampled_from(["dgx-h100", "dgx-v100-32gb", "mi300x", "l4"]),
)
def test_monotone_in_size_finite_and_the_same_twice(
    kind: str, small: float, more: float, log_n: int, log_stride: int, name: str
) -> None:
    box = load_cluster(name, 1024)
    one = collective_time_s(kind, small, 2**log_n, 2**log_stride, box)
    two = collective_time_s(kind, small + more, 2**log_n, 2**log_stride, box)
    assert 0 <= one <= two < math.inf
    assert one == collective_time_s(kind, small, 2**log_n, 2**log_stride, box)


@given(size=st.floats(0, 1e12), log_n=st.integers(1, 5), log_stride=st.integers(0, 3))
def test_an_all_reduce_is_its_two_halves(size: float, log_n: int, log_stride: int) -> None:
    box = cluster(256, per_node=8, nics=8)
    n, stride = 2**log_n, 2**log_stride
    halves = sum(collective_time_s(kind, size, n, stride, box) for kind in ("reduce_scatter", "all_gather"))
    assert collective_time_s("all_reduce", size, n, stride, box) == pytest.approx(halves)


@pytest.mark.parametrize(
    ("kind", "preset", "gpus", "size", "published_s"),
    [  # large messages, where protocol switches no longer matter: the presets' own figures must give them back
        ("all_reduce", "dgx-a100-80gb", 8, 2**33, 64.9e-3),  # ND A100 v4, nccl-tests
        ("reduce_scatter", "dgx-h200", 8, 2**34, 41.4e-3),  # 8 x H200, nccl-tests, ring
        ("all_gather", "dgx-h200", 8, 2**34, 41.6e-3),
        ("broadcast", "dgx-h200", 8, 2**34, 47.0e-3),
        ("all_reduce", "b200", 8, 2**33, 22.0e-3),  # 8 x B200, nccl-tests, ring
        ("all_reduce", "gb200-nvl72", 4, 2**33, 19.0e-3),  # ND GB200 v6, nccl-tests, ring
        ("all_reduce", "dgx-v100-16gb", 4, 4_000_000_000, 48.1e-3),  # Jean Zay, 4 x V100-16GB
        ("all_reduce", "dgx-h100", 64, 2**33, 47.6e-3),  # 8 nodes of 8 x H100 with 400 GB/s a node
    ],
)
def test_large_messages_near_published_times(kind: str, preset: str, gpus: int, size: int, published_s: float) -> None:
    assert collective_time_s(kind, size, gpus, 1, load_cluster(preset, gpus)) == pytest.approx(published_s, rel=0.1)
