"""What is planned: a graph, a machine and limits; and what a configuration of the space means there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from costmodels.hardware import Cluster
from costmodels.memory import state_bytes
from costmodels.mixed import Machine, MixedCluster, of_each_group
from costmodels.views import AnyCluster, fastest, with_devices
from planner.costing import Pricing
from planner.errors import BadInput
from planner.ir.graph import Graph
from planner.placement import Place, limit_of, places
from planner.schedules import ZERO_BUBBLE
from planner.solve.space import Configuration


@dataclass(frozen=True)
class Problem:
    """What is planned: ``graph`` as traced, ``cluster`` with the number of devices to use, and limits.

    ``memory_limit_bytes``: of every device; of a mixed cluster it holds for those that have more.
    """

    name: str
    graph: Graph
    cluster: Machine
    optimizer: str
    precision: str
    memory_limit_bytes: int
    seed: int = 0

    @property
    def mean_limit_bytes(self) -> float:
        """Of all devices."""
        cluster, limit = self.cluster, self.memory_limit_bytes
        if not isinstance(cluster, MixedCluster):
            return limit
        return sum(g.gpus * limit_of(cluster, g.device.memory_bytes, limit) for g in cluster.groups) / cluster.gpus

    def with_more_memory(self, more_bytes: int) -> Problem:
        """On every device."""

        def larger(group: Cluster) -> Cluster:
            return replace(group, device=replace(group.device, memory_bytes=group.device.memory_bytes + more_bytes))

        cluster = self.cluster
        if isinstance(cluster, MixedCluster):
            cluster = of_each_group(cluster, larger)
        return replace(self, cluster=cluster, memory_limit_bytes=self.memory_limit_bytes + more_bytes)

    def places(self, configuration: Configuration) -> tuple[Place, ...] | None:
        """Where each pipeline rank lies on unequal machines; None where all devices are alike.

        Raises BadInput where a tp group would lie on several groups of machines.
        """
        cluster = self.cluster
        if not isinstance(cluster, MixedCluster):
            return None
        found = places(cluster, configuration.groups, configuration.mesh)
        if found is None:
            raise BadInput(
                f"{configuration.mesh} would cut single operators over devices of several groups ({cluster.words}); "
                "choose a degree of tp that divides each, as the innermost axis"
            )
        return found

    def limits_bytes(self, configuration: Configuration) -> tuple[int, ...]:
        """What may be filled of a device of each pipeline rank."""
        cluster, limit = self.cluster, self.memory_limit_bytes
        found = self.places(configuration)
        if found is None:
            return (limit,) * configuration.mesh.pp
        return tuple(limit_of(cluster, place.memory_bytes, limit) for place in found)

    def pricing(self, configuration: Configuration, on: Place | AnyCluster) -> Pricing:
        """On one pipeline rank, or on devices of a cluster wherever they lie."""
        place = on if isinstance(on, Place) else None
        return Pricing(
            on.cluster if isinstance(on, Place) else on,
            configuration.mesh,
            self.optimizer,
            configuration.zero,
            configuration.micro_batches,
            configuration.schedule != ZERO_BUBBLE,
            place.onward if place is not None else None,
            place.to_the_end if place is not None else None,
        )

    def any_rank(self, configuration: Configuration) -> AnyCluster:
        """What prices a bound that holds on every pipeline rank, and letters, which all share."""
        found = self.places(configuration)
        if found is None:
            assert not isinstance(self.cluster, MixedCluster)
            return self.cluster
        return fastest(place.cluster for place in found)

    def cuttable(self, cluster: AnyCluster) -> AnyCluster:
        """The cluster for work that is to be cut by tp: rows that are not aligned may be in shards, so none are slower."""
        sizes = self._row_sizes
        return with_devices(
            cluster,
            lambda device: (
                device
                if all(2 * size % device.alignment_bytes == 0 for size in sizes)
                else replace(device, alignment_bytes=1)
            ),
        )

    @cached_property
    def bounding(self) -> Machine:
        """The cluster for prices of a whole that bound those of its parts (costmodels.measured)."""
        cluster = self.cluster
        if isinstance(cluster, MixedCluster) or cluster.measured is None:
            return cluster
        return replace(cluster, measured=cluster.measured.bounding_below())

    @cached_property
    def _row_sizes(self) -> frozenset[int]:
        return frozenset(size for value in self.graph.values.values() for size in value.shape[-2:])

    def least_states_bytes(self, configuration: Configuration) -> float:
        """What all weights would take with gradients and optimizer state if each took what the least of them takes a byte."""
        optimizer, zero, dp = self.optimizer, configuration.zero, configuration.mesh.dp
        sizes, kinds = self._weights
        software = self.cluster.software
        each = [
            state_bytes(10**6, dtype, optimizer, zero, dp, software=software).total_bytes / 10**6 if trainable else 1.0
            for trainable, dtype in kinds
        ]
        return min(each, default=0.0) * sizes

    @cached_property
    def _weights(self) -> tuple[int, tuple[tuple[bool, str], ...]]:
        """Bytes of all weights, and the kinds there are: whether trained, and the dtype."""
        weights = [leaf for leaf in self.graph.leaves if leaf.kind == "parameter"]
        kinds = dict.fromkeys((leaf.trainable, leaf.value.dtype) for leaf in weights)
        return sum(leaf.value.size_bytes for leaf in weights), tuple(kinds)
