"""Time of a collective: alpha-beta, the slowest link on the way, network cards shared by the groups that use them.

A group is ``group_size`` ranks with distance ``stride``. All groups of that axis act at the same time, as a training
step makes them. Ranks fill nodes in order, so a group either stays inside a node or spans several. For the slowest
group:

    n   ranks in the group               p   of them on one node
    m   nodes it spans                   alpha, beta   seconds a hop, bytes a second

    beta_intra   what one device reaches towards its peers in the node
    beta_inter   one card's rate x min(cards its p devices own, cards of the node / groups that leave the node)
    beta         the lesser of the two that are used

The bandwidth terms are those of a ring, whose every link carries the same bytes; nodes joined by p parallel rings use p
cards. ``S`` is ``size_bytes``:

    all_reduce        2 (n-1)/n S / beta                 S: the tensor each rank holds (and gets back, whole)
    all_gather        (n-1)/n S / beta                   S: the whole tensor; each rank holds S/n of it before
    reduce_scatter    (n-1)/n S / beta                   S: the whole tensor; each rank holds S/n of it after
    all_to_all        S/n max((p-1)/n / beta_intra, p (n-p)/n / beta_inter)
                                                         S: the whole tensor; each rank holds S/n before and after
    broadcast         S / beta                           S: the tensor every rank gets
    send              S / beta                           S: what one rank sends to the next of its group

and the latency terms, besides the start of a collective (``Link.start_s`` of the farthest link it takes, and the launch of
its kernel, costmodels.compute.on_device_s):

    all_reduce        2 ((p-1) alpha_intra + log2(m) alpha_inter)           a ring in the node, a tree over nodes
    all_gather, reduce_scatter, broadcast      (n-m) alpha_intra + (m-1) alpha_inter
    all_to_all        (p-1) alpha_intra + (m-1) alpha_inter
    send              alpha of the link it takes

Sources: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005 (the terms);
NVIDIA/nccl src/graph/tuning.cc (how hops inside and between nodes are counted).
Moves inside a device (``none``, ``keep``, ``slice``, ``pad``) cost nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from costmodels.compute import on_device_s
from costmodels.hardware import Cluster
from costmodels.views import AnyCluster, Views, picked

LOCAL_MOVES = frozenset({"none", "keep", "slice", "pad"})
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Spread:
    """How the groups of an axis lie over the nodes, for the worst group.

    ``nodes`` it spans, ``local`` ranks of it on one node, ``cards`` network cards it has to itself (0: stays in a
    node).
    """

    nodes: int
    local: int
    cards: float


@lru_cache(maxsize=4096)
def spread(group_size: int, stride: int, gpus: int, gpus_per_node: int, nics_per_node: int) -> Spread:
    """Where the groups of ``group_size`` ranks at distance ``stride`` lie. Raises ValueError when they do not fit."""
    block = group_size * stride
    if group_size < 1 or stride < 1 or block > gpus:
        raise ValueError(f"groups of {group_size} ranks at distance {stride} do not fit on {gpus} gpus")
    groups = [
        Counter((start + offset + i * stride) // gpus_per_node for i in range(group_size))
        for start in range(0, gpus - block + 1, block)
        for offset in range(stride)
    ]
    leaving = Counter(node for ranks in groups if len(ranks) > 1 for node in ranks)
    owned = max(1.0, nics_per_node / gpus_per_node)
    cards = [
        min(count * owned, nics_per_node, nics_per_node / leaving[node])
        for ranks in groups
        if len(ranks) > 1
        for node, count in ranks.items()
    ]
    return Spread(
        nodes=max(len(ranks) for ranks in groups),
        local=max(max(ranks.values()) for ranks in groups),
        cards=min(cards, default=0.0),
    )


@lru_cache(maxsize=4096)
def _leaving_senders(group_size: int, stride: int, gpus: int, gpus_per_node: int) -> int:
    """The most ranks of one node that send to another node when every rank sends to the next of its group."""
    block = group_size * stride
    if block > gpus:
        raise ValueError(f"groups of {group_size} ranks at distance {stride} do not fit on {gpus} gpus")
    senders = Counter(
        rank // gpus_per_node
        for rank in range(gpus // block * block)
        if rank // stride % group_size < group_size - 1 and rank // gpus_per_node != (rank + stride) // gpus_per_node
    )
    return max(senders.values(), default=0)


def collective_time_s(kind: str, size_bytes: float, group_size: int, stride: int, cluster: AnyCluster) -> float:
    """Seconds of one collective of ``size_bytes`` (see the table above) on all groups of an axis at once.

    ``group_size`` ranks at distance ``stride`` form a group; ``send`` goes from each rank to the next of its group. A
    group of one costs nothing; one that was measured takes what it took. Raises ValueError for an unknown kind, a
    negative size or groups that do not fit on the cluster.
    """
    if isinstance(cluster, Views):
        times = (collective_time_s(kind, size_bytes, group_size, stride, view) for view in cluster.clusters)
        return picked(times, cluster.slowest)
    if kind in LOCAL_MOVES:
        return 0.0
    if kind not in COLLECTIVES:
        known = ", ".join((*COLLECTIVES, *sorted(LOCAL_MOVES)))
        raise ValueError(f"unknown collective {kind!r}; the kinds are {known}")
    if size_bytes < 0:
        raise ValueError(f"a collective cannot move {size_bytes} bytes")
    if group_size == 1:
        return 0.0
    if cluster.measured is not None:
        nodes = spread(group_size, stride, cluster.gpus, cluster.gpus_per_node, cluster.nics_per_node).nodes
        measured_s = cluster.measured.collective_s(kind, size_bytes, group_size, nodes)
        if measured_s is not None:
            return measured_s
        modelled_s = collective_time_s(kind, size_bytes, group_size, stride, replace(cluster, measured=None))
        return modelled_s * cluster.measured.corrections.communication
    if kind == "send":
        return on_device_s(_send_s(size_bytes, group_size, stride, cluster), cluster.device)
    return on_device_s(_collective_s(kind, size_bytes, group_size, stride, cluster), cluster.device)


def _collective_s(kind: str, size_bytes: float, group_size: int, stride: int, cluster: Cluster) -> float:
    lies = spread(group_size, stride, cluster.gpus, cluster.gpus_per_node, cluster.nics_per_node)
    n, m, p = group_size, lies.nodes, lies.local
    hop_s, far_s = cluster.intra.latency_s, cluster.inter.latency_s
    intra = cluster.intra.towards(p - 1) if p > 1 else math.inf
    inter = cluster.inter.towards(1) * lies.cards if m > 1 else math.inf
    start_s = (cluster.inter if m > 1 else cluster.intra).start_s
    if kind == "all_to_all":
        transfer_s = size_bytes / n * max((p - 1) / n / intra, p * (n - p) / n / inter)
        return start_s + transfer_s + (p - 1) * hop_s + (m - 1) * far_s
    beta = min(intra, inter)
    if kind == "all_reduce":
        latency_s = 2 * ((p - 1) * hop_s + math.log2(m) * far_s)
        return start_s + 2 * (n - 1) / n * size_bytes / beta + latency_s
    latency_s = (n - m) * hop_s + (m - 1) * far_s
    share = 1.0 if kind == "broadcast" else (n - 1) / n
    return start_s + share * size_bytes / beta + latency_s


def _send_s(size_bytes: float, group_size: int, stride: int, cluster: Cluster) -> float:
    senders = _leaving_senders(group_size, stride, cluster.gpus, cluster.gpus_per_node)
    inside_s = cluster.intra.start_s + cluster.intra.latency_s + size_bytes / cluster.intra.towards(1)
    if senders == 0:
        return inside_s
    owned = max(1.0, cluster.nics_per_node / cluster.gpus_per_node)
    cards = min(owned, cluster.nics_per_node / senders)
    inter_s = cluster.inter.start_s + cluster.inter.latency_s + size_bytes / (cluster.inter.towards(1) * cards)
    return max(inter_s, inside_s)
