"""The space of a search, from coarse to fine.

    Region           degree of tp, then all degrees     tp8, pp4.dp2.tp8
    Shape            and micro-batches                  pp4.dp2.tp8 mb=16
    Configuration    and order of axes, ZeRO, schedule  pp4.dp2.tp8 mb=16 zero=1 schedule=1f1b

A coarser one stands for all it contains, ``contains``; a lower bound of it holds for each of them. What is left open by a
configuration, the letters of the operators, the stages and the recomputation, is solved for (letters_program.py, stages.py).

    numbers of micro-batches     those that divide a rank's rows; powers of two where there are none
    orders of the axes           all that differ in the links an axis uses; one where all links are alike
    orders of the groups         on unequal machines, all that differ in where pipeline ranks lie (planner.placement)
    ZeRO                         0 to 3 on dp
    schedules                    those that exist (planner.schedules.check); interleaved and zero-bubble with 1, 2, 4 or 8
                                 stages a rank; where they are several, evenly filled and each recomputed in one way
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from costmodels.hardware import Cluster
from costmodels.mixed import Machine, MixedCluster
from planner.ir.mesh import AXES, Mesh
from planner.ir.plan import SCHEDULES
from planner.placement import orders_of_groups, places
from planner.schedules import IN_ROUNDS, ZERO_BUBBLE, check

MOST_CHUNKS = 8


@dataclass(frozen=True)
class Region:
    """Everything with this degree of tp, or (``mesh``, in the usual order of axes) with these degrees."""

    tp: int
    mesh: Mesh | None = None

    def __str__(self) -> str:
        return f"tp{self.tp}" if self.mesh is None else str(self.mesh)


@dataclass(frozen=True)
class Shape:
    """``mesh`` in the usual order of axes."""

    mesh: Mesh
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.mesh} mb={self.micro_batches}"


@dataclass(frozen=True)
class Configuration:
    """``groups``: the order in which ranks fill the groups of unequal machines; (): that of the cluster."""

    mesh: Mesh
    micro_batches: int
    zero: int
    schedule: str
    chunks: int = 1
    groups: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.mesh} mb={self.micro_batches} zero={self.zero}"
        if self.mesh.pp > 1:
            text += f" schedule={self.schedule}"
        text += f" v={self.chunks}" if self.chunks > 1 else ""
        return text + (f" groups={'+'.join(self.groups)}" if self.groups else "")

    @property
    def shape(self) -> Shape:
        return Shape(Mesh(self.mesh.pp, self.mesh.dp, self.mesh.tp), self.micro_batches)

    def differs(self, other: Configuration) -> int:
        """In how many respects two configurations differ: shape, order of axes, of groups, ZeRO stage, schedule."""
        mine = (self.shape, self.mesh.order, self.groups, self.zero, (self.schedule, self.chunks))
        theirs = (other.shape, other.mesh.order, other.groups, other.zero, (other.schedule, other.chunks))
        return sum(a != b for a, b in zip(mine, theirs, strict=True))

    @property
    def stages(self) -> int:
        return self.mesh.pp * self.chunks


Part = Region | Shape | Configuration


def contains(part: Part, configuration: Configuration) -> bool:
    """Whether ``part`` of the space holds ``configuration``."""
    if isinstance(part, Region):
        return part.tp == configuration.mesh.tp and part.mesh in (None, configuration.shape.mesh)
    if isinstance(part, Shape):
        return part == configuration.shape
    return part == configuration


@dataclass(frozen=True)
class Space:
    """All plans for ``batch`` rows of a chain of ``segments`` segments on ``cluster``."""

    cluster: Machine
    batch: int
    segments: int

    def regions(self) -> Iterator[Region]:
        sizes = [group.gpus for group in self._groups]
        return (Region(tp) for tp in divisors(self.cluster.gpus) if all(size % tp == 0 for size in sizes))

    @property
    def _groups(self) -> tuple[Cluster, ...]:
        return self.cluster.groups if isinstance(self.cluster, MixedCluster) else (self.cluster,)

    def narrower(self, region: Region) -> Iterator[Region]:
        """A region of any degrees of pp and dp, by those, the least dp first."""
        gpus = self.cluster.gpus // region.tp
        for dp in divisors(gpus):
            mesh = Mesh(gpus // dp, dp, region.tp)
            if dp <= self.batch and mesh.pp <= self.segments and self.arrangements(mesh):
                yield Region(region.tp, mesh)

    def shapes(self, mesh: Mesh) -> Iterator[Shape]:
        return (Shape(mesh, m) for m in micro_batch_counts(self.batch, mesh.dp))

    def configurations(self, shape: Shape) -> Iterator[Configuration]:
        m, degrees = shape.micro_batches, shape.mesh
        for schedule, chunks in schedules(degrees.pp, m, self.segments):
            for zero in zero_stages(degrees.dp, schedule):
                for mesh, groups in self.arrangements(degrees):
                    yield Configuration(mesh, m, zero, schedule, chunks, groups)

    def usual(self, states_bytes: int, limit_bytes: int) -> Iterator[Configuration]:
        """What a person might try: without tp, every number of stages; with tp inside a node, one stage, and the fewest whose
        weights, gradients and optimizer state (``states_bytes`` in all) take at most half the memory. Under 1f1b, and
        interleaved with two stages a rank and ZeRO-1."""
        gpus = self.cluster.gpus
        for tp in divisors(gpus):
            if tp > min(group.gpus_per_node for group in self._groups):
                break
            few = next((pp for pp in divisors(gpus // tp) if 2 * states_bytes <= pp * tp * limit_bytes), 1)
            for pp in divisors(gpus // tp) if tp == 1 else sorted({1, few}):
                dp = gpus // tp // pp
                if dp > self.batch or pp > self.segments:
                    continue
                mesh = Mesh(pp, dp, tp)
                for m, groups in itertools.product(micro_batch_counts(self.batch, dp), self._orders_of_groups(mesh)):
                    kinds = set(schedules(pp, m, self.segments))
                    if ("1f1b", 1) in kinds:
                        for zero in {0, max(zero_stages(dp, "1f1b"))}:
                            yield Configuration(mesh, m, zero, "1f1b", groups=groups)
                    if ("interleaved", 2) in kinds:
                        yield Configuration(mesh, m, 1 if dp > 1 else 0, "interleaved", 2, groups)

    def neighbours(self, at: Configuration) -> Iterator[Configuration]:
        """Other schedules, ZeRO stages and orders of the same shape; and the same with degrees or micro-batches doubled or
        halved."""
        mesh, m = at.mesh, at.micro_batches
        yield from self.configurations(at.shape)
        for factors in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)):
            for divided in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)):
                degrees = [mesh.degree(axis) * f for axis, f in zip(AXES, factors, strict=True)]
                if (factors == divided) != (factors == (1, 1, 1)) or any(
                    d % by for d, by in zip(degrees, divided, strict=True)
                ):
                    continue
                pp, dp, tp = (d // by for d, by in zip(degrees, divided, strict=True))
                if pp * dp * tp != self.cluster.gpus or pp > self.segments or dp > self.batch:
                    continue
                counts = micro_batch_counts(self.batch, dp)
                for number in (m // 2, m, 2 * m):
                    if number in counts:
                        yield from self._alike(Shape(Mesh(pp, dp, tp), number), at)

    def _alike(self, shape: Shape, at: Configuration) -> Iterator[Configuration]:
        """The configurations of ``shape`` in the usual order with the schedule and ZeRO stage of another."""
        for found in self.configurations(shape):
            same = (found.schedule, found.chunks) == (at.schedule, at.chunks) or shape.mesh.pp == 1 or at.mesh.pp == 1
            if same and found.zero == at.zero and found.mesh == shape.mesh:
                yield found

    def arrangements(self, mesh: Mesh) -> tuple[tuple[Mesh, tuple[str, ...]], ...]:
        """``mesh`` with its axes in every order that differs in the links they use, the usual order first; each with every
        order of the groups that differs in where pipeline ranks lie.

        With one node all are alike. Otherwise the ranks of a group that share a node tell orders apart.
        """
        found: dict[tuple[object, ...], tuple[Mesh, tuple[str, ...]]] = {}
        for order in itertools.permutations(mesh.order):
            ordered = Mesh(mesh.pp, mesh.dp, mesh.tp, order)
            if isinstance(self.cluster, Cluster) and self.cluster.gpus <= self.cluster.gpus_per_node:
                return ((ordered, ()),)
            links = tuple(self._link(ordered, axis, group) for axis in AXES for group in self._groups)
            for groups in self._orders_of_groups(ordered):
                lie = None if isinstance(self.cluster, Cluster) else places(self.cluster, groups, ordered)
                found.setdefault((links, lie), (ordered, groups))
        return tuple(found.values())

    def orders(self, mesh: Mesh) -> tuple[Mesh, ...]:
        """``mesh`` with its axes in every order that differs."""
        return tuple(dict.fromkeys(ordered for ordered, _ in self.arrangements(mesh)))

    def _orders_of_groups(self, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
        return ((),) if isinstance(self.cluster, Cluster) else orders_of_groups(self.cluster, mesh)

    def _link(self, mesh: Mesh, axis: str, group: Cluster) -> tuple[int, int]:
        """What the links of an axis depend on: its stride, up to a node, and whether the groups fill nodes evenly."""
        stride, node = mesh.stride(axis), group.gpus_per_node
        return (min(stride, node), stride % node if stride > node else 0) if mesh.degree(axis) > 1 else (0, 0)

    def __iter__(self) -> Iterator[Configuration]:
        for wide in self.regions():
            for region in self.narrower(wide):
                assert region.mesh is not None
                for shape in self.shapes(region.mesh):
                    yield from self.configurations(shape)


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def micro_batch_counts(batch: int, dp: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying: those that divide a rank's rows; powers of two where there are none."""
    rows = batch // dp
    powers = tuple(2**i for i in range(rows.bit_length()))
    if batch % dp:
        return powers
    even = divisors(rows)
    return even if len(even) > 2 or rows < 4 else tuple(sorted({*even, *powers}))


def schedules(pp: int, micro_batches: int, segments: int) -> Iterator[tuple[str, int]]:
    """The schedules there are, with the stages each rank holds: 1, or a power of two under those in rounds."""
    if pp == 1:
        yield "1f1b", 1  # one stage runs each micro-batch forward and backward before the next
        return
    for schedule in SCHEDULES:
        chunks = 1
        while pp * chunks <= segments and (chunks <= MOST_CHUNKS if schedule in IN_ROUNDS else chunks == 1):
            if not check(schedule, pp, micro_batches, chunks):
                yield schedule, chunks
            chunks *= 2


def zero_stages(dp: int, schedule: str) -> tuple[int, ...]:
    return (0,) if dp == 1 else (0, 1) if schedule == ZERO_BUBBLE else (0, 1, 2, 3)
