"""One configuration of the space and its parts, computed once and shared.

    Evaluator         graph -> split batch -> strategies on tp -> segment costs, each kept for the next configuration
    build_plan        decisions -> Plan with its estimate

The strategies of a configuration are those of least time for one micro-batch whose weights fit ('fast'), proven by the 0/1
program; and, for where memory is short, under ZeRO-3 those of least time if nothing hid the moving of weights ('gathered'),
those that hold half as much of the weights ('tight'), and those of least time when memory has a price ('lean').
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from costmodels.collectives import collective_time_s
from costmodels.hardware import Cluster
from costmodels.memory import state_bytes
from planner.batch import BatchSplit, split_batch
from planner.costing import Pricing, segment_costs
from planner.errors import BadInput
from planner.fold import Folded, fold
from planner.ir.graph import Graph, Node
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched, SegmentInfo
from planner.layouts import record, scaled, strategy_names
from planner.schedules import ZERO_BUBBLE, held
from planner.segment_cost import SegmentCost, stage_estimates
from planner.segments import cut_into_segments, segment_count, segment_kinds, segment_label, segment_nodes
from planner.shard import Sharded, shard
from planner.sharding_rules import Strategy
from planner.simulate import estimate_step
from planner.solve.letters import Letters, whole_letters
from planner.solve.letters_program import Keep, LettersProgram
from planner.solve.linear_program import NoSolution
from planner.solve.pools import Pool, forced_recomputation_s, least_bytes, most_states_bytes, pools
from planner.solve.space import Configuration
from planner.solve.work import SegmentWork, least_crossing_bytes, work_of_segments

FAST, GATHERED, TIGHT, LEAN = "fast", "gathered", "tight", "lean"
# Lean strategies pay for memory as if filling a device took this many times the work of a micro-batch.
LEAN_PRICE = 3.0


@dataclass(frozen=True)
class Problem:
    """What is planned: ``graph`` as traced, ``cluster`` with the number of devices to use, and limits."""

    name: str
    graph: Graph
    cluster: Cluster
    optimizer: str
    precision: str
    memory_limit_bytes: int
    seed: int = 0


def letters_mesh(mesh: Mesh) -> Mesh:
    """A mesh on which letters cost the same: with neighbours on tp, and dp next, the pipeline does not matter."""
    is_usual = mesh.stride("tp") == 1 and (mesh.dp == 1 or mesh.stride("dp") == mesh.tp)
    return Mesh(dp=mesh.dp, tp=mesh.tp) if is_usual else mesh


def letters_zero(zero: int) -> int:
    """The ZeRO stages that differ to letters: none, weights whole but updated in shares, weights in shares."""
    return zero if zero in (0, 3) else 1


class Evaluator:
    """Prices configurations of one problem; intermediate results are kept."""

    def __init__(self, problem: Problem, keep: Keep | None = None) -> None:
        """``keep``: which strategies of an operator on tp may be used at all."""
        self.problem, self.keep = problem, keep
        self.graph = cut_into_segments(problem.graph)
        self.folded: Folded = fold(self.graph)
        self.segments = segment_count(self.graph)
        self.work_done = 0  # operators put into programs so far
        self._splits: dict[tuple[int, int], BatchSplit] = {}
        self._work: dict[tuple[int, int, bool], tuple[SegmentWork, ...]] = {}
        self._crossing: dict[tuple[int, int], int] = {}
        self._ideal: dict[tuple[Mesh, int, int, bool, bool], tuple[SegmentCost, ...]] = {}
        self._letters: dict[tuple[Mesh, int, int, str, float], Letters] = {}
        self._programs: dict[tuple[Mesh, int, bool], LettersProgram] = {}
        self._local: dict[int, tuple[Letters, Sharded]] = {}
        self._costs: dict[tuple[int, Mesh, int, int, bool], tuple[SegmentCost, ...]] = {}

    def split(self, dp: int, micro_batches: int) -> BatchSplit:
        """One dp rank's micro-batch of the folded graph. Raises BadInput when the batch cannot be cut so."""
        key = (dp, micro_batches)
        if key not in self._splits:
            self._splits[key] = split_batch(self.folded.graph, dp, micro_batches)
        return self._splits[key]

    def pricing(self, configuration: Configuration) -> Pricing:
        return Pricing(
            self.problem.cluster,
            configuration.mesh,
            self.problem.optimizer,
            configuration.zero,
            configuration.micro_batches,
            configuration.schedule != ZERO_BUBBLE,
        )

    @cached_property
    def bounding(self) -> Cluster:
        """The cluster for prices of a whole that bound those of its parts (costmodels.measured)."""
        cluster = self.problem.cluster
        return cluster if cluster.measured is None else replace(cluster, measured=cluster.measured.bounding_below())

    @cached_property
    def _cuttable(self) -> Cluster:
        """The cluster for work that is to be cut by tp: rows that are not aligned may be in shards, so none are slower."""
        device = self.problem.cluster.device
        sizes = {size for value in self.graph.values.values() for size in value.shape[-2:]}
        if all(2 * size % device.alignment_bytes == 0 for size in sizes):
            return self.bounding
        return replace(self.bounding, device=replace(device, alignment_bytes=1))

    def work(self, dp: int, micro_batches: int, cut: bool = True) -> tuple[SegmentWork, ...]:
        """The work of every segment of the whole chain for one micro-batch on one device (tp = 1), without dp's
        communication: if it is ``cut``, over n devices, it takes at least an n-th. Raises BadInput when the batch cannot be
        cut so."""
        pieces = self._as_micro_batches(dp, micro_batches)
        cluster = self._cuttable if cut else self.problem.cluster
        key = (*pieces, cluster is not self.problem.cluster)
        if key not in self._work:
            work = work_of_segments(
                self.split(*pieces).graph, Pricing(cluster, Mesh(dp=pieces[0]), self.problem.optimizer)
            )
            self._work[key] = tuple(work[i] for i in self.folded.origin)
        return self._work[key]

    def transfer_s(self, configuration: Configuration) -> float:
        """Least seconds of sending a micro-batch from one stage to the next, wherever the chain is cut."""
        mesh = configuration.mesh
        if mesh.pp == 1:
            return 0.0
        key = (mesh.dp, configuration.micro_batches)
        if key not in self._crossing:
            self._crossing[key] = least_crossing_bytes(self.split(*key).graph, set(self.folded.origin[:-1]))
        return collective_time_s("send", self._crossing[key], mesh.pp, mesh.stride("pp"), self.problem.cluster)

    def work_s(self, dp: int, micro_batches: int, cut: bool = True) -> float:
        """The sum of ``work``."""
        return sum(work.forward_s + work.backward_s for work in self.work(dp, micro_batches, cut))

    def _as_micro_batches(self, dp: int, micro_batches: int) -> tuple[int, int]:
        """(1, dp micro_batches) where that gives pieces of the same rows, else (dp, micro_batches)."""
        pieces = dp * micro_batches
        if dp == 1 or self.problem.graph.batch_size % pieces:
            return dp, micro_batches
        try:
            self.split(1, pieces)
        except BadInput:
            return dp, micro_batches
        return 1, pieces

    def least_s(self, tp: int, dp: int, micro_batches: int) -> float:
        """Least seconds of all micro-batches on the devices of a tp group, in all stages together, under any letters.

        Operators and conversions on tp, with the ranks of a group as neighbours, and what parameters cost once a step, in
        dp-th shares; nothing that travels on dp. Raises BadInput when the batch cannot be cut so.
        """
        cluster = self.bounding
        if tp == 1:
            return self.work_s(dp, micro_batches, cut=cluster is not self.problem.cluster) * micro_batches
        configuration = Configuration(Mesh(dp=dp, tp=tp), micro_batches, 3, "1f1b")
        program = self._program(configuration.mesh, micro_batches, None, cluster)
        return program.solve(replace(self.pricing(configuration), cluster=cluster)).least_s * micro_batches

    def _program(
        self, mesh: Mesh, micro_batches: int, keep: Keep | None, cluster: Cluster | None = None
    ) -> LettersProgram:
        """The letters program of a mesh on ``cluster`` (default: the problem's), kept but where ``keep`` restricts it."""
        cluster = cluster or self.problem.cluster
        key = (mesh, micro_batches, cluster is not self.problem.cluster)
        nodes = len(self.split(mesh.dp, micro_batches).graph.nodes)
        self.work_done += nodes // 2
        if keep is None and key in self._programs:
            return self._programs[key]
        self.work_done += nodes // 2
        graph = self.split(mesh.dp, micro_batches).graph
        kept = self._kept_in_all_pieces(mesh.dp, micro_batches, mesh.tp, keep)
        pricing = replace(self.pricing(Configuration(mesh, micro_batches, 0, "1f1b")), cluster=cluster)
        program = LettersProgram(graph, pricing, self.folded.weights, kept)
        if keep is None:
            self._programs[key] = program
        return program

    def ideal_costs(self, configuration: Configuration) -> tuple[SegmentCost, ...]:
        """Segment costs on a device that holds everything of a stage (tp = 1): a tp-th of them, where sizes are meant, is
        the least any letters leave to one device."""
        in_two, mesh = configuration.schedule == ZERO_BUBBLE, configuration.mesh
        # Nothing but dp communicates: the other axes only say how far apart its ranks are.
        apart = Mesh(dp=mesh.dp, tp=mesh.stride("dp") if mesh.dp > 1 else 1)
        key = (apart, configuration.micro_batches, configuration.zero, in_two, mesh.tp > 1)
        if key not in self._ideal:
            alone = replace(configuration, mesh=Mesh(dp=mesh.dp))
            local = self._sharded(alone, self.letters(alone))
            cluster = self._cuttable if mesh.tp > 1 else self.problem.cluster
            self._ideal[key] = self._costs_of(replace(alone, mesh=apart), local, cluster=cluster)
        return self._ideal[key]

    def forced_recomputation_s(self, configuration: Configuration) -> float:
        """Forward seconds (of one device, tp = 1) that any plan of the configuration runs again for lack of memory;
        infinite where nothing makes room enough.

        Relaxed: weights and activations cut evenly over tp, and memory pooled (pools.py).
        """
        if self.least_bytes(configuration) > self.problem.memory_limit_bytes:
            return math.inf
        costs, tp = self.ideal_costs(configuration), configuration.mesh.tp
        return forced_recomputation_s(self._pools(configuration), costs, tp, self.problem.memory_limit_bytes)

    def least_bytes(self, configuration: Configuration) -> float:
        """A lower bound of the memory of the fullest device, with everything recomputed that makes room."""
        return least_bytes(self._pools(configuration), self.ideal_costs(configuration), configuration.mesh.tp)

    def _pools(self, at: Configuration) -> tuple[Pool, ...]:
        return pools(at.schedule, at.mesh.pp, at.micro_batches, at.chunks, self.segments)

    def least_letters_s(self, configuration: Configuration, exactly: bool) -> float:
        """Least seconds of all micro-batches in all stages together, under any letters whose weights fit; infinite where
        none do. ``exactly``: from the letters themselves, else soon, and a little less, from the program relaxed."""
        mesh, zero = letters_mesh(configuration.mesh), letters_zero(configuration.zero)
        held = self.held_share(configuration)
        key = (mesh, configuration.micro_batches, zero, FAST, held)
        try:
            if exactly or key in self._letters or mesh.tp == 1:
                return self.letters(configuration).least_s * configuration.micro_batches
            pricing = self.pricing(replace(configuration, mesh=mesh, zero=zero))
            least_s, found = self._program(mesh, configuration.micro_batches, None).relax(pricing, held)
        except NoSolution:
            return math.inf
        if found is not None:
            self._letters[key] = found
        return least_s * configuration.micro_batches

    def letters(self, configuration: Configuration, variant: str = FAST, keep: Keep | None = None) -> Letters:
        """Strategies on tp; ``keep`` restricts them under the name ``variant``.

        Raises NoSolution where the weights do not fit under any.
        """
        held = 1.0 if keep is not None else self.held_share(configuration)
        if variant in (TIGHT, LEAN):
            tighter = max(math.ceil(4 * held), math.ceil(8 / configuration.mesh.tp)) / 8
            try:
                return self._solved_letters(configuration, variant, keep, tighter)
            except NoSolution:
                pass  # not all weights can be cut: as the fast ones
        return self._solved_letters(configuration, variant, keep, held)

    def variants(self, configuration: Configuration) -> tuple[str, ...]:
        """The strategies that are tried, all but the first where memory is short."""
        if configuration.mesh.tp == 1:
            return (FAST,)
        return (FAST, *((GATHERED,) if configuration.zero == 3 else ()), TIGHT, LEAN)

    def leanest_letters(self, configuration: Configuration) -> Letters:
        """Strategies on tp with a price on memory and no limit, for what fits nowhere."""
        return self._solved_letters(configuration, LEAN, None, 1.0)

    def _solved_letters(self, configuration: Configuration, variant: str, keep: Keep | None, held: float) -> Letters:
        mesh, zero = letters_mesh(configuration.mesh), letters_zero(configuration.zero)
        key = (mesh, configuration.micro_batches, zero, variant, held)
        if key in self._letters:
            return self._letters[key]
        if mesh.tp == 1:
            found = whole_letters(self.split(mesh.dp, configuration.micro_batches).graph)
        else:
            price = self._lean_price_us(configuration) if variant == LEAN else 0.0
            pricing = self.pricing(replace(configuration, mesh=mesh, zero=zero))
            program = self._program(mesh, configuration.micro_batches, keep)
            found = program.solve(pricing, price, held, gathered=variant == GATHERED)
        self._letters[key] = found
        return found

    def held_share(self, configuration: Configuration) -> float:
        """The share of all weights that a device of a tp group can hold at most, over all stages, in eighths rounded up:
        with gradients and optimizer state, and the least that must be kept for backward.

        Where weights differ in what is held with them (frozen ones, those ZeRO leaves whole), as if all were of the kind
        that takes least.
        """
        mesh = configuration.mesh
        if mesh.tp == 1:
            return 1.0
        costs, limit = self.ideal_costs(configuration), self.problem.memory_limit_bytes
        states = sum(c.states_bytes for c in costs)
        room = most_states_bytes(self._pools(configuration), costs, mesh.tp, limit)
        if not states or room >= states:
            return 1.0
        return min(1.0, max(math.ceil(8 * room / self._least_states_bytes(configuration)), math.ceil(8 / mesh.tp)) / 8)

    def _least_states_bytes(self, configuration: Configuration) -> float:
        """What all weights would take with gradients and optimizer state if each took what the least of them takes a byte."""
        optimizer, zero, dp = self.problem.optimizer, configuration.zero, configuration.mesh.dp
        sizes, kinds = self._weights
        software = self.problem.cluster.software
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

    def _kept_in_all_pieces(self, dp: int, micro_batches: int, tp: int, keep: Keep | None) -> Keep | None:
        """``keep``, or the evaluator's own, without what smaller pieces of an unevenly cut batch do not have."""
        keep = keep or self.keep
        first, *others = self.split(dp, micro_batches).pieces
        if not others:
            return keep
        offered = [(strategy_names(piece.graph, tp), Fraction(piece.rows, first.rows)) for piece in others]

        def kept(node: Node, strategy: Strategy) -> bool:
            everywhere = all(
                strategy.name in names[node.name] or scaled(strategy.name, rows) in names[node.name]
                for names, rows in offered
            )
            return everywhere and (keep is None or keep(node, strategy))

        return kept

    def _lean_price_us(self, configuration: Configuration) -> float:
        work_us = self.work_s(configuration.mesh.dp, configuration.micro_batches) * 1e6
        return LEAN_PRICE * work_us / self.problem.memory_limit_bytes

    def costs(self, configuration: Configuration, letters: Letters) -> tuple[SegmentCost, ...]:
        """The cost of every segment of the whole chain."""
        in_two = configuration.schedule == ZERO_BUBBLE
        key = (id(letters), configuration.mesh, configuration.micro_batches, configuration.zero, in_two)
        if key not in self._costs:
            local = self._sharded(configuration, letters)
            self._costs[key] = self._costs_of(configuration, local, letters.partial_leaves)
        return self._costs[key]

    def _costs_of(
        self,
        configuration: Configuration,
        local: Sharded,
        partial: frozenset[str] = frozenset(),
        cluster: Cluster | None = None,
    ) -> tuple[SegmentCost, ...]:
        pricing = self.pricing(configuration)
        pricing = pricing if cluster is None else replace(pricing, cluster=cluster)
        costs = segment_costs(local.graph, pricing, local.pairs, partial)
        return tuple(costs[i] for i in self.folded.origin)

    def _sharded(self, configuration: Configuration, letters: Letters) -> Sharded:
        """One device's graph under ``letters``, which are kept so that no others get their id."""
        if id(letters) not in self._local:
            graph = self.split(configuration.mesh.dp, configuration.micro_batches).graph
            local = shard(graph, "tp", configuration.mesh.tp, letters.strategies, letters.leaves)
            self._local[id(letters)] = letters, local
        return self._local[id(letters)][1]

    def build_plan(
        self,
        configuration: Configuration,
        letters: Letters,
        stages: Sequence[tuple[int, int]],
        recompute: Sequence[str],
        strategy: str,
        bound_s: float = 0.0,
        searched: tuple[Searched, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> Plan:
        """The plan of these decisions, priced."""
        problem, mesh = self.problem, configuration.mesh
        costs = self.costs(configuration, letters)
        split = self.split(mesh.dp, configuration.micro_batches)
        schedule, chunks = configuration.schedule, configuration.chunks
        most = held(schedule, mesh.pp, configuration.micro_batches, chunks)
        estimates = stage_estimates(costs, stages, recompute, most)
        estimate = estimate_step(estimates, schedule, configuration.micro_batches, problem.memory_limit_bytes, chunks)
        return Plan(
            model=problem.name,
            graph_digest=problem.graph.digest,
            mesh=mesh,
            micro_batches=configuration.micro_batches,
            schedule=configuration.schedule,
            zero=configuration.zero,
            stages=tuple(stages),
            recompute=tuple(recompute),
            segments=self._segment_infos(),
            layouts=record(
                split.graph, split.dp, letters.strategies, letters.leaves, mesh.dp, mesh.tp, self._kinds_of_folded()
            ),
            global_batch=problem.graph.batch_size,
            cluster=problem.cluster.name,
            precision=problem.precision,
            optimizer=problem.optimizer,
            strategy=strategy,
            estimate=estimate,
            bound_s=bound_s,
            searched=searched,
            notes=(*problem.graph.notes, *notes),
            seed=problem.seed,
            chunks=chunks,
        )

    def _kinds_of_folded(self) -> tuple[int, ...]:
        """The kind each segment of the folded graph has in the whole chain."""
        kinds = dict(zip(self.folded.origin, segment_kinds(self.graph), strict=True))
        return tuple(kinds[number] for number in sorted(kinds))

    def _segment_infos(self) -> tuple[SegmentInfo, ...]:
        values: Mapping[str, int] = {x.name: x.value.numel for x in self.graph.leaves if x.kind == "parameter"}
        infos = []
        for kind, nodes in zip(segment_kinds(self.graph), segment_nodes(self.graph), strict=True):
            read = {name for node in nodes for name in node.operands}
            parameters = sum(values[name] for name in read if name in values)
            infos.append(SegmentInfo(kind, segment_label(self.graph, nodes), len(nodes), parameters))
        return tuple(infos)
