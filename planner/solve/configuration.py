"""One configuration of the space and its parts, computed once and shared.

    Configuration     mesh, micro-batches, ZeRO stage, schedule, chunks
    Evaluator         graph -> split batch -> strategies on tp -> segment costs, each kept for the next configuration
    build_plan        decisions -> Plan with its estimate

The strategies of a configuration are those of least time for one micro-batch ('fast'), proven by the 0/1 program; and, for
where memory is short, those of least time when memory has a price ('lean').
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from costmodels.hardware import Cluster
from planner.batch import BatchSplit, split_batch
from planner.costing import Pricing, node_cost, segment_costs
from planner.fold import Folded, fold
from planner.ir.graph import Graph, Node
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched, SegmentInfo
from planner.layouts import record, scaled, strategy_names
from planner.schedules import held, in_flight
from planner.segment_cost import SegmentCost, stage_estimates
from planner.segments import cut_into_segments, segment_count, segment_kinds, segment_label, segment_nodes
from planner.shard import shard
from planner.sharding_rules import Strategy
from planner.simulate import estimate_step
from planner.solve.frontier import least_recomputation_s
from planner.solve.letters import Keep, Letters, solve_letters, whole_letters

FAST, LEAN = "fast", "lean"
# Lean strategies pay for memory as if filling a device took this many times the work of a micro-batch.
LEAN_PRICE = 30.0


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


@dataclass(frozen=True)
class Configuration:
    mesh: Mesh
    micro_batches: int
    zero: int
    schedule: str
    chunks: int = 1

    def __str__(self) -> str:
        schedule = f" schedule={self.schedule}" if self.mesh.pp > 1 else ""
        chunks = f" v={self.chunks}" if self.chunks > 1 else ""
        return f"{self.mesh} mb={self.micro_batches} zero={self.zero}{schedule}{chunks}"


class Evaluator:
    """Prices configurations of one problem; intermediate results are kept."""

    def __init__(self, problem: Problem, keep: Keep | None = None) -> None:
        """``keep``: which strategies of an operator on tp may be used at all."""
        self.problem, self.keep = problem, keep
        self.graph = cut_into_segments(problem.graph)
        self.folded: Folded = fold(self.graph)
        self.segments = segment_count(self.graph)
        self._splits: dict[tuple[int, int], BatchSplit] = {}
        self._work_s: dict[tuple[int, int], float] = {}
        self._ideal: dict[tuple[int, int, int], tuple[SegmentCost, ...]] = {}
        self._letters: dict[tuple[int, int, int, str], Letters] = {}

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
        )

    def work_s(self, dp: int, micro_batches: int) -> float:
        """Seconds of the operators of one micro-batch, forward and backward, on one device (tp = pp = 1), without dp's
        communication: split over n devices it takes at least an n-th."""
        key = (dp, micro_batches)
        if key not in self._work_s:
            graph = self.split(dp, micro_batches).graph
            pricing = Pricing(self.problem.cluster, Mesh(dp=dp), self.problem.optimizer)
            weights = self.folded.weights
            self._work_s[key] = sum(
                node_cost(node, graph.values, pricing).total_s * (weights[node.segment] if node.segment >= 0 else 1)
                for node in graph.nodes
                if node.op != "convert"
            )
        return self._work_s[key]

    def forced_recomputation_s(self, configuration: Configuration) -> float:
        """Forward seconds (of one device, tp = 1) that any plan of the configuration runs again for lack of memory.

        Relaxed: weights and activations cut evenly over tp, memory of all stages pooled, and each stage holding only as
        many micro-batches as the last; then the cheapest recomputation, of fractions of segments, that makes room.
        """
        mesh, micro_batches = configuration.mesh, configuration.micro_batches
        key = (mesh.dp, micro_batches, configuration.zero)
        if key not in self._ideal:
            ideal = replace(configuration, mesh=Mesh(dp=mesh.dp))
            self._ideal[key] = self.costs(ideal, self.letters(ideal))
        costs = self._ideal[key]
        fewest = in_flight(configuration.schedule, mesh.pp, micro_batches, mesh.pp - 1)
        room = self.problem.memory_limit_bytes * mesh.pp * mesh.tp - sum(c.states_bytes for c in costs)
        excess = fewest * sum(c.activations_bytes for c in costs) - room
        return least_recomputation_s(costs, fewest, excess)

    def letters(self, configuration: Configuration, variant: str = FAST, keep: Keep | None = None) -> Letters:
        """Strategies on tp; ``keep`` restricts them under the name ``variant``."""
        mesh = configuration.mesh
        key = (mesh.dp, configuration.micro_batches, mesh.tp, variant)
        if key not in self._letters:
            graph = self.split(mesh.dp, configuration.micro_batches).graph
            if mesh.tp == 1:
                self._letters[key] = whole_letters(graph)
            else:
                price = self._lean_price_us(configuration) if variant == LEAN else 0.0
                pricing = replace(self.pricing(configuration), zero=0)
                kept = self._kept_in_all_pieces(configuration, keep)
                self._letters[key] = solve_letters(graph, pricing, self.folded.weights, kept, price)
        return self._letters[key]

    def _kept_in_all_pieces(self, configuration: Configuration, keep: Keep | None) -> Keep | None:
        """``keep``, or the evaluator's own, without the strategies that smaller pieces of an unevenly cut batch do not have."""
        keep = keep or self.keep
        first, *others = self.split(configuration.mesh.dp, configuration.micro_batches).pieces
        if not others:
            return keep
        offered = [
            (strategy_names(piece.graph, configuration.mesh.tp), Fraction(piece.rows, first.rows)) for piece in others
        ]

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
        graph = self.split(configuration.mesh.dp, configuration.micro_batches).graph
        local = shard(graph, "tp", configuration.mesh.tp, letters.strategies, letters.leaves)
        costs = segment_costs(local.graph, self.pricing(configuration), local.pairs, letters.partial_leaves)
        return tuple(costs[i] for i in self.folded.origin)

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
