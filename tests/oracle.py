"""Every plan of a small problem, priced one by one: what the search must not be worse than, and no bound above.

Priced by the functions that price any plan (split_batch, shard, segment_costs, stage_estimates, estimate_step), on the whole
graph, not folded; none of the solver's code chooses anything here. The space is written down anew, from docs/search.md.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from costmodels.mixed import MixedCluster
from planner.batch import BatchSplit, split_batch
from planner.chain_costs import segment_costs
from planner.costing import Pricing
from planner.errors import BadInput
from planner.ir.graph import Graph, Leaf
from planner.ir.layout import REPLICATED, WHOLE, Pair
from planner.ir.mesh import AXES, Mesh
from planner.placement import Place, places
from planner.schedules import check
from planner.segment_cost import SegmentCost
from planner.segments import cut_into_segments, node_classes, segment_count
from planner.shard import SHARED, shard
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.solve.problem import Problem
from planner.solve.space import Configuration
from tests.search_cases import AMPLE, every_estimate


@dataclass(frozen=True)
class Frontier:
    """The fastest plan for every memory limit. ``points``: (bytes on the fullest device, step time in seconds), by bytes
    ascending and seconds descending."""

    points: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(points: Iterable[tuple[int, float]]) -> Frontier:
        kept: list[tuple[int, float]] = []
        for size, seconds in sorted(points):
            if not kept or seconds < kept[-1][1]:
                kept.append((size, seconds))
        return Frontier(tuple(kept))

    def best_s(self, limit_bytes: int) -> float:
        """Infinite where nothing fits."""
        place = bisect_right(self.points, limit_bytes, key=lambda point: point[0])
        return self.points[place - 1][1] if place else math.inf


RankCosts = tuple[tuple[SegmentCost, ...], ...]  # of all segments, on each pipeline rank


def every_plan_of(
    costs: RankCosts, configuration: Configuration, sizes: tuple[int, ...] = ()
) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) of every split and recomputation that fits ``sizes``, a device of each pipeline rank (default: ample)."""
    for estimate in every_estimate(costs, configuration, sizes or AMPLE):
        if estimate.fits:
            yield estimate.peak_memory_bytes, estimate.step_time_s


def micro_batches(batch: int, dp: int) -> set[int]:
    """Those that divide a rank's rows; powers of two where there are none."""
    rows, powers = batch // dp, {m for m in (1, 2, 4, 8, 16, 32) if m <= batch // dp}
    if batch % dp:
        return powers
    even = {m for m in range(1, rows + 1) if rows % m == 0}
    return even | powers if rows > 3 and even == {1, rows} else even


def every_configuration(problem: Problem, segments: int) -> Iterator[Configuration]:
    """With the axes in every order, also where links are alike."""
    gpus, batch = problem.cluster.gpus, problem.graph.batch_size
    for pp, dp, tp in itertools.product(range(1, gpus + 1), repeat=3):
        if pp * dp * tp != gpus or pp > segments or dp > batch:
            continue
        meshes = {Mesh(pp, dp, tp, order) for order in itertools.permutations(AXES)}
        kinds = [(word, 1) for word in ("gpipe", "1f1b", "zero-bubble")] if pp > 1 else [("1f1b", 1)]
        kinds += [(word, v) for word in ("interleaved", "zero-bubble") for v in (2, 4, 8)] if pp > 1 else []
        for m, (schedule, chunks) in itertools.product(sorted(micro_batches(batch, dp)), kinds):
            if pp * chunks > segments or check(schedule, pp, m, chunks):
                continue
            for zero in (0,) if dp == 1 else (0, 1) if schedule == "zero-bubble" else (0, 1, 2, 3):
                for mesh, groups in itertools.product(sorted(meshes), orders_of_groups(problem)):
                    yield Configuration(mesh, m, zero, schedule, chunks, groups)


def orders_of_groups(problem: Problem) -> list[tuple[str, ...]]:
    """All of them; () for the cluster's own."""
    cluster = problem.cluster
    if not isinstance(cluster, MixedCluster):
        return [()]
    names = tuple(group.name for group in cluster.groups)
    return [() if order == names else order for order in itertools.permutations(names)]


@dataclass(frozen=True)
class Assignment:
    """A strategy for every operator, by name, and a stored pair for every leaf."""

    strategies: dict[str, Strategy]
    leaves: dict[str, Pair]


class Oracle:
    """The plans of ``problem``, whatever its memory limit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = cut_into_segments(problem.graph)
        self.segments = segment_count(self.graph)
        self._splits: dict[tuple[int, int], BatchSplit | None] = {}

    @cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        """Those whose batch can be cut so."""
        found = every_configuration(self.problem, self.segments)
        return tuple(c for c in found if self.split(c) is not None and self.places(c) is not None)

    def places(self, configuration: Configuration) -> tuple[Place | None, ...] | None:
        """Of each pipeline rank on unequal machines; None where tp would cross groups."""
        cluster = self.problem.cluster
        if isinstance(cluster, MixedCluster):
            return places(cluster, configuration.groups, configuration.mesh)
        return (None,) * configuration.mesh.pp

    def sizes(self, configuration: Configuration) -> tuple[int, ...]:
        """Memory of a device of each pipeline rank; (): ample."""
        return tuple(place.memory_bytes for place in self.places(configuration) or () if place is not None)

    def split(self, configuration: Configuration) -> BatchSplit | None:
        """None where the batch cannot be cut so."""
        key = (configuration.mesh.dp, configuration.micro_batches)
        if key not in self._splits:
            try:
                self._splits[key] = split_batch(self.graph, *key)
            except BadInput:
                self._splits[key] = None
        return self._splits[key]

    def is_even(self, configuration: Configuration) -> bool:
        """Whether all micro-batches have equally many rows."""
        split = self.split(configuration)
        return split is not None and len(split.pieces) == 1

    def costs(self, configuration: Configuration, assignment: Assignment) -> RankCosts:
        return tuple(self._costs_at(place, configuration, assignment) for place in self.places(configuration) or ())

    def _costs_at(
        self, place: Place | None, configuration: Configuration, assignment: Assignment
    ) -> tuple[SegmentCost, ...]:
        split = self.split(configuration)
        assert split is not None
        local = shard(split.graph, "tp", configuration.mesh.tp, assignment.strategies, assignment.leaves)
        cluster = self.problem.cluster if place is None else place.cluster
        assert not isinstance(cluster, MixedCluster)
        pricing = Pricing(
            cluster,
            configuration.mesh,
            self.problem.optimizer,
            configuration.zero,
            configuration.micro_batches,
            configuration.schedule != "zero-bubble",
            None if place is None else place.onward,
            None if place is None else place.to_the_end,
        )
        partial = frozenset(name for name, pair in assignment.leaves.items() if pair == REPLICATED)
        return segment_costs(local.graph, pricing, local.pairs, partial)

    @cached_property
    def without_tp(self) -> dict[Configuration, Frontier]:
        """Every plan of the configurations without tp."""
        found = {}
        for configuration in self.configurations:
            if configuration.mesh.tp == 1:
                (whole,) = self.assignments(configuration)[0]
                costs = self.costs(configuration, whole)
                found[configuration] = Frontier.of(every_plan_of(costs, configuration, self.sizes(configuration)))
        return found

    def with_tp(self, configuration: Configuration, most: int, draw: random.Random) -> tuple[Frontier, bool]:
        """Every plan under any letters, and whether these are all: where there are more than ``most`` letters, that many
        are drawn."""
        assignments, whole = self.assignments(configuration, most, draw)
        priced = dict.fromkeys(self.costs(configuration, assignment) for assignment in assignments)
        sizes = self.sizes(configuration)
        points = (point for costs in priced for point in every_plan_of(costs, configuration, sizes))
        return Frontier.of(points), whole

    def assignments(
        self, configuration: Configuration, most: int = 1, draw: random.Random | None = None
    ) -> tuple[list[Assignment], bool]:
        """Letters of the operators on tp and pairs of the weights; all, or ``most`` of them drawn, and whether all.

        Operators of equal segments share theirs, and so do the weights they read.
        """
        split, k = self.split(configuration), configuration.mesh.tp
        assert split is not None
        graph = split.graph
        options = strategies_of(graph, k)
        by_class = node_classes(graph)
        readers = {
            leaf.name: tuple(
                sorted({(by_class[n.name], n.operands.index(leaf.name)) for n in graph.consumers[leaf.name]})
            )
            for leaf in graph.leaves
            if leaf.kind in ("parameter", "buffer")
        }
        stored = {key: pairs_of(graph, key, options) if k > 1 else [WHOLE] for key in dict.fromkeys(readers.values())}
        every = [*options.values(), *stored.values()]
        is_all = math.prod(map(len, every)) <= most
        assert is_all or draw is not None
        drawn = itertools.product(*every) if is_all else ([draw.choice(o) for o in every] for _ in range(most))  # type: ignore[union-attr]
        found = []
        for chosen in drawn:
            letters = dict(zip(options, chosen[: len(options)], strict=True))
            pairs = dict(zip(stored, chosen[len(options) :], strict=True))
            found.append(
                Assignment(
                    {node.name: letters[by_class[node.name]] for node in graph.nodes},
                    {leaf.name: own(leaf, pairs.get(readers.get(leaf.name, ()), WHOLE)) for leaf in graph.leaves},
                )
            )
        return found, is_all


def strategies_of(graph: Graph, k: int) -> dict[object, tuple[Strategy, ...]]:
    """Of every class of operators; without tp, and of what segments share, whole alone."""
    found: dict[object, tuple[Strategy, ...]] = {}
    cuts, classes = find_cuts(graph), node_classes(graph)
    for node in graph.nodes:
        if classes[node.name] not in found:
            mine = strategies(rule_of(node, graph.values), node, graph.values, max(k, 2), cuts[node.name])
            if k == 1 or node.segment == SHARED:
                mine = tuple(s for s in mine if s.name == "R")
            found[classes[node.name]] = mine
    return found


def pairs_of(graph: Graph, readers: object, options: dict[object, tuple[Strategy, ...]]) -> list[Pair]:
    """How a weight may be stored: whole, or as one of its readers may ask for it."""
    assert isinstance(readers, tuple)
    asked = {s.operands[place] for reader, place in readers for s in options[reader]}
    return sorted({WHOLE, *(pair for pair in asked if pair.is_shard or pair == REPLICATED)}, key=str)


def own(leaf: Leaf, pair: Pair) -> Pair:
    return pair if leaf.value.differentiable else pair.without_gradient()


def with_limit(problem: Problem, limit_bytes: int) -> Problem:
    return replace(problem, memory_limit_bytes=limit_bytes)
