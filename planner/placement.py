"""Which devices of a mixed cluster each pipeline rank lies on, and what prices it.

Ranks fill the groups one after the other, in an order that is part of a configuration. A pipeline rank has dp x tp devices:

    all of one group         their prices are those of that group
    of several groups        the batch is dealt equally, so every rank waits for the slowest: each price is the most of those
                             of the groups' devices, links the slower of the group's own and the one that joins the groups;
                             the memory is that of the smallest device

A tp group that would cross groups is no part of the space. Between pipeline ranks on different groups tensors take the joining
link, whose cards the senders of a node share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from costmodels.collectives import collective_time_s
from costmodels.hardware import Cluster, Link
from costmodels.mixed import Machine, MixedCluster, joined_bytes_per_s, slower
from costmodels.views import AnyCluster, Views
from planner.ir.mesh import Mesh

FREE = Link(bandwidth_bytes_per_s=1e30, latency_s=0.0)


@dataclass(frozen=True)
class Boundary:
    """The way from one pipeline rank to another: the slowest of those of its pairs of devices.

    ``inside``: groups that hold both devices of a pair, with the size and stride of the groups of ranks that send there.
    ``across``: pairs of groups. ``senders``: devices of a pipeline rank, ``link``: what joins groups.
    """

    inside: tuple[tuple[Cluster, int, int], ...]
    across: tuple[tuple[Cluster, Cluster], ...]
    senders: int
    link: Link

    def send_s(self, size_bytes: float) -> float:
        """Seconds until ``size_bytes`` of each device have come to its counterpart."""
        inside = [collective_time_s("send", size_bytes, n, stride, cluster) for cluster, n, stride in self.inside]
        return max([*inside, *(self._joined_s(size_bytes, *pair) for pair in self.across)])

    def add_s(self, size_bytes: float) -> float:
        """Seconds in which both have the sum of their ``size_bytes``: an all-reduce of pairs."""
        inside = [collective_time_s("all_reduce", size_bytes, 2, stride, cluster) for cluster, _, stride in self.inside]
        return max([*inside, *(self._joined_s(size_bytes, *pair) + self.link.latency_s for pair in self.across)])

    def _joined_s(self, size_bytes: float, one: Cluster, other: Cluster) -> float:
        rate = joined_bytes_per_s(self.senders, one, other, self.link)
        return self.link.start_s + self.link.latency_s + size_bytes / rate


@dataclass(frozen=True)
class Place:
    """Of one pipeline rank: the names of its groups, what prices its work and collectives, the memory of its smallest device,
    the ways to the rank behind it (of the last one: to the first) and to the other end of the pipeline."""

    groups: tuple[str, ...]
    cluster: AnyCluster
    memory_bytes: int
    onward: Boundary
    to_the_end: Boundary

    @property
    def words(self) -> str:
        return "+".join(self.groups)


@lru_cache(maxsize=1024)
def places(cluster: MixedCluster, order: tuple[str, ...], mesh: Mesh) -> tuple[Place, ...] | None:
    """Where each pipeline rank of ``mesh`` lies; None where a tp group would cross groups.

    ``order``: names of the groups as ranks fill them; (): the cluster's own order.
    """
    groups = cluster.in_order(order)
    of_rank = [group for group in groups for _ in range(group.gpus)]
    if any(len({of_rank[rank].name for rank in ranks}) > 1 for ranks in mesh.groups("tp")):
        return None
    stages = [[rank for rank in range(mesh.size) if mesh.coordinate(rank, "pp") == stage] for stage in range(mesh.pp)]

    def boundary(one: int, other: int) -> Boundary:
        pairs = {(of_rank[a].name, of_rank[b].name) for a, b in zip(stages[one], stages[other], strict=True)}
        inside = tuple(_sending(cluster, mesh, a) for a, b in sorted(pairs) if a == b)
        across = tuple((cluster.group(a), cluster.group(b)) for a, b in sorted(pairs) if a != b)
        return Boundary(inside, across, mesh.size // mesh.pp, cluster.inter)

    found = []
    for stage, ranks in enumerate(stages):
        names = {of_rank[rank].name for rank in ranks}
        mine = tuple(group for group in cluster.groups if group.name in names)
        found.append(
            Place(
                tuple(group.name for group in mine),
                _view(cluster, mesh, mine),
                min(group.device.memory_bytes for group in mine),
                boundary(stage, (stage + 1) % mesh.pp),
                boundary(stage, mesh.pp - 1 if stage == 0 else 0),
            )
        )
    return tuple(found)


def _sending(cluster: MixedCluster, mesh: Mesh, name: str) -> tuple[Cluster, int, int]:
    group, stride = cluster.group(name), mesh.stride("pp")
    if 2 * stride > group.gpus:
        group = replace(group, gpus=cluster.gpus)
    return group, min(mesh.pp, group.gpus // stride), stride


def _view(cluster: MixedCluster, mesh: Mesh, groups: Sequence[Cluster]) -> AnyCluster:
    """What prices ranks on ``groups``. Where they leave their group's own nodes, as if all nodes were like these."""
    if len(groups) == 1:
        (group,) = groups
        block = max(mesh.degree(axis) * mesh.stride(axis) for axis in ("dp", "tp"))
        return group if block <= group.gpus else replace(group, gpus=cluster.gpus)
    wide = (replace(g, gpus=cluster.gpus, inter=slower(g.inter, cluster.inter)) for g in groups)
    return Views(tuple(wide), slowest=True)


@lru_cache(maxsize=1024)
def orders_of_groups(cluster: MixedCluster, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The orders of the groups that differ in where the pipeline ranks of ``mesh`` lie, () for the cluster's own order."""
    names = [group.name for group in cluster.groups]
    found: dict[object, tuple[str, ...]] = {}
    for order in itertools.permutations(names):
        lie = places(cluster, order, mesh)
        if lie is not None:
            found.setdefault(lie, () if list(order) == names else order)
    return tuple(found.values())


@lru_cache(maxsize=256)
def at_work(cluster: MixedCluster, names: tuple[str, ...] = ()) -> AnyCluster:
    """Devices of the groups of these ``names``, which all wait for the slowest, that talk in no time: for bounds."""
    groups = cluster.in_order(names)
    bare = tuple(
        replace(group, gpus=cluster.gpus, gpus_per_node=cluster.gpus, intra=FREE, inter=FREE, sources=())
        for group in groups
    )
    return bare[0] if len(bare) == 1 else Views(bare, slowest=True)


def limit_of(machine: Machine, memory_bytes: int, limit_bytes: int) -> int:
    """What a plan may fill of a device: of one kind of machine the limit, of a mixed cluster no more than the device has."""
    return min(memory_bytes, limit_bytes) if isinstance(machine, MixedCluster) else limit_bytes
