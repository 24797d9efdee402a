"""One configuration of the space and its parts, computed once and shared.

    Evaluator         graph -> split batch -> strategies on tp -> segment costs, each kept for the next configuration
    build_plan        decisions -> Plan with its estimate

The strategies of a configuration are those of least time for one micro-batch whose weights fit ('fast'), proven by the 0/1
program; and, for where memory is short, under ZeRO-3 those of least time if nothing hid the moving of weights ('gathered'),
those that hold half as much of the weights ('tight'), and those of least time when memory has a price ('lean').
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from costmodels.mixed import MixedCluster
from costmodels.views import AnyCluster, fastest, picked
from planner.batch import BatchSplit, split_batch
from planner.chain_costs import SegmentOperators, segment_costs, segment_operators
from planner.costing import Pricing, priced_by
from planner.errors import BadInput
from planner.fold import Folded, fold
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.layouts import Keep, kept_in_all_pieces, record
from planner.placement import Place, at_work
from planner.schedules import ZERO_BUBBLE, held
from planner.segment_cost import SegmentCost, stage_estimates
from planner.segments import cut_into_segments, segment_count, segment_infos
from planner.shard import Sharded, shard
from planner.simulate import estimate_step
from planner.solve.letters import Letters, letters_mesh, letters_zero, whole_letters
from planner.solve.letters_program import LettersProgram
from planner.solve.linear_program import NoSolution
from planner.solve.pools import Pool, forced_recomputation_s, least_excess_bytes, most_states_bytes, pools
from planner.solve.problem import Problem
from planner.solve.space import Configuration
from planner.solve.work import SegmentWork, least_crossing_bytes, least_of, rate, work_of_segments

FAST, GATHERED, TIGHT, LEAN = "fast", "gathered", "tight", "lean"
# Lean strategies pay for memory as if filling a device took this many times the work of a micro-batch.
LEAN_PRICE = 3.0


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
        self._work: dict[tuple[int, int, AnyCluster], tuple[SegmentWork, ...]] = {}
        self._crossing: dict[tuple[int, int], int] = {}
        self._ideal: dict[tuple[Mesh, int, int, bool, AnyCluster], tuple[SegmentCost, ...]] = {}
        self._letters: dict[tuple[Mesh, int, int, str, float, AnyCluster | None], Letters] = {}
        self._programs: dict[tuple[Mesh, int, AnyCluster], LettersProgram] = {}
        self._local: dict[int, tuple[Letters, Sharded]] = {}
        self._operators: dict[tuple[int, Mesh, int, Place | AnyCluster], tuple[SegmentOperators, ...]] = {}
        self._costs: dict[tuple[int, Mesh, int, int, bool, Place | None], tuple[SegmentCost, ...]] = {}

    def split(self, dp: int, micro_batches: int) -> BatchSplit:
        """One dp rank's micro-batch of the folded graph. Raises BadInput when the batch cannot be cut so."""
        key = (dp, micro_batches)
        if key not in self._splits:
            self._splits[key] = split_batch(self.folded.graph, dp, micro_batches)
        return self._splits[key]

    def work(
        self, dp: int, micro_batches: int, cut: bool = True, groups: tuple[str, ...] = ()
    ) -> tuple[SegmentWork, ...]:
        """The work of every segment of the whole chain for one micro-batch on one device (tp = 1), without dp's
        communication: if it is ``cut``, over n devices, it takes at least an n-th. On unequal machines the least of all
        devices, or that of devices of ``groups`` that wait for each other. Raises BadInput when the batch cannot be cut so."""
        machine = self.problem.bounding if cut else self.problem.cluster
        if not isinstance(machine, MixedCluster):
            return self._work_on(machine, dp, micro_batches, cut)
        if groups:
            return self._work_on(at_work(machine, groups), dp, micro_batches, cut)
        each = [self._work_on(at_work(machine, (g.name,)), dp, micro_batches, cut) for g in machine.groups]
        return least_of(each)

    def _work_on(self, cluster: AnyCluster, dp: int, micro_batches: int, cut: bool) -> tuple[SegmentWork, ...]:
        pieces = self._as_micro_batches(dp, micro_batches)
        cluster = self.problem.cuttable(cluster) if cut else cluster
        key = (*pieces, cluster)
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
        size, found = self._crossing[key], self.problem.places(configuration)
        if found is None:
            return self.problem.pricing(configuration, self.problem.any_rank(configuration)).send_s(size)
        ways = found if configuration.chunks > 1 else found[:-1]
        return min(place.onward.send_s(size) for place in ways)

    def capacity(self) -> float:
        """So many devices like the fastest do at least the work of all devices in the same time."""
        machine = self.problem.cluster
        if not isinstance(machine, MixedCluster):
            return machine.gpus
        least = self.work(1, 1)
        return sum(group.gpus * rate(least, self.work(1, 1, groups=(group.name,))) for group in machine.groups)

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
        machine = self.problem.bounding
        if tp == 1:
            return self.work_s(dp, micro_batches, cut=machine is not self.problem.cluster) * micro_batches
        cluster = fastest(machine.groups) if isinstance(machine, MixedCluster) else machine
        configuration = Configuration(Mesh(dp=dp, tp=tp), micro_batches, 3, "1f1b")
        program = self._program(configuration.mesh, micro_batches, None, cluster)
        return program.solve(self.problem.pricing(configuration, cluster)).least_s * micro_batches

    def _program(self, mesh: Mesh, micro_batches: int, keep: Keep | None, cluster: AnyCluster) -> LettersProgram:
        """The letters program of a mesh on ``cluster``, kept but where ``keep`` restricts it."""
        key = (mesh, micro_batches, cluster)
        nodes = len(self.split(mesh.dp, micro_batches).graph.nodes)
        self.work_done += nodes // 2
        if keep is None and key in self._programs:
            return self._programs[key]
        self.work_done += nodes // 2
        graph = self.split(mesh.dp, micro_batches).graph
        kept = kept_in_all_pieces(self.split(mesh.dp, micro_batches), mesh.tp, keep or self.keep)
        pricing = self.problem.pricing(Configuration(mesh, micro_batches, 0, "1f1b"), cluster)
        program = LettersProgram(graph, pricing, self.folded.weights, kept)
        if keep is None:
            self._programs[key] = program
        return program

    def ideal_costs(self, configuration: Configuration, place: Place | None = None) -> tuple[SegmentCost, ...]:
        """Segment costs on a device that holds everything of a stage (tp = 1): a tp-th of them, where sizes are meant, is
        the least any letters leave to one device. On unequal machines those on ``place``, or the least of all."""
        machine = self.problem.bounding if configuration.mesh.tp > 1 else self.problem.cluster
        if place is not None:
            return self._ideal_on(place.cluster, configuration)
        if not isinstance(machine, MixedCluster):
            return self._ideal_on(machine, configuration)
        if configuration.mesh.size != machine.gpus:  # of any devices: sizes are meant
            return self._ideal_on(at_work(machine, (machine.groups[0].name,)), configuration)
        each = [
            self._ideal_on(x.cluster, configuration) for x in dict.fromkeys(self.problem.places(configuration) or ())
        ]
        if len(each) == 1:
            return each[0]
        return tuple(picked(same, slowest=False) for same in zip(*each, strict=True))

    def _ideal_on(self, cluster: AnyCluster, configuration: Configuration) -> tuple[SegmentCost, ...]:
        in_two, mesh = configuration.schedule == ZERO_BUBBLE, configuration.mesh
        # Nothing but dp communicates: the other axes only say how far apart its ranks are.
        apart = Mesh(dp=mesh.dp, tp=mesh.stride("dp") if mesh.dp > 1 else 1)
        cluster = self.problem.cuttable(cluster) if mesh.tp > 1 else cluster
        key = (apart, configuration.micro_batches, configuration.zero, in_two, cluster)
        if key not in self._ideal:
            alone = replace(configuration, mesh=Mesh(dp=mesh.dp))
            local = self._sharded(alone, self.letters(alone))
            self._ideal[key] = self._costs_of(replace(alone, mesh=apart), local, cluster)
        return self._ideal[key]

    def forced_recomputation_s(self, configuration: Configuration) -> float:
        """Forward seconds (of one device, tp = 1) that any plan of the configuration runs again for lack of memory;
        infinite where nothing makes room enough.

        Relaxed: weights and activations cut evenly over tp, and memory pooled (pools.py).
        """
        if self.least_excess_bytes(configuration) > 0:
            return math.inf
        costs, tp = self.ideal_costs(configuration), configuration.mesh.tp
        return forced_recomputation_s(self._pools(configuration), costs, tp, self.problem.limits_bytes(configuration))

    def least_excess_bytes(self, configuration: Configuration) -> float:
        """By how much some device exceeds its memory at least, with everything recomputed that makes room."""
        costs, limits = self.ideal_costs(configuration), self.problem.limits_bytes(configuration)
        return least_excess_bytes(self._pools(configuration), costs, configuration.mesh.tp, limits)

    def _pools(self, at: Configuration) -> tuple[Pool, ...]:
        return pools(at.schedule, at.mesh.pp, at.micro_batches, at.chunks, self.segments)

    def least_letters_s(self, configuration: Configuration, exactly: bool) -> float:
        """Least seconds of all micro-batches in all stages together, under any letters whose weights fit; infinite where
        none do. ``exactly``: from the letters themselves, else soon, and a little less, from the program relaxed."""
        mesh, zero = letters_mesh(configuration.mesh), letters_zero(configuration.zero)
        held = self.held_share(configuration)
        cluster = self.problem.any_rank(configuration)
        key = (mesh, configuration.micro_batches, zero, FAST, held, cluster if mesh.tp > 1 else None)
        try:
            if exactly or key in self._letters or mesh.tp == 1:
                return self.letters(configuration).least_s * configuration.micro_batches
            pricing = self.problem.pricing(replace(configuration, mesh=mesh, zero=zero), cluster)
            least_s, found = self._program(mesh, configuration.micro_batches, None, cluster).relax(pricing, held)
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
        zero = zero if mesh.tp > 1 else 0
        cluster = self.problem.any_rank(configuration) if mesh.tp > 1 else None
        key = (mesh, configuration.micro_batches, zero, variant, held, cluster)
        if key in self._letters:
            return self._letters[key]
        if cluster is None:
            found = whole_letters(self.split(mesh.dp, configuration.micro_batches).graph)
        else:
            price = self._lean_price_us(configuration) if variant == LEAN else 0.0
            pricing = self.problem.pricing(replace(configuration, mesh=mesh, zero=zero), cluster)
            program = self._program(mesh, configuration.micro_batches, keep, cluster)
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
        costs, limits = self.ideal_costs(configuration), self.problem.limits_bytes(configuration)
        states = sum(c.states_bytes for c in costs)
        room = most_states_bytes(self._pools(configuration), costs, mesh.tp, limits)
        if not states or room >= states:
            return 1.0
        return min(
            1.0, max(math.ceil(8 * room / self.problem.least_states_bytes(configuration)), math.ceil(8 / mesh.tp)) / 8
        )

    def _lean_price_us(self, configuration: Configuration) -> float:
        work_us = self.work_s(configuration.mesh.dp, configuration.micro_batches) * 1e6
        return LEAN_PRICE * work_us / min(self.problem.limits_bytes(configuration))

    def costs(self, configuration: Configuration, letters: Letters, rank: int = 0) -> tuple[SegmentCost, ...]:
        """The cost of every segment of the whole chain, if it lay on pipeline rank ``rank``."""
        found = self.problem.places(configuration)
        return self._costs_at(configuration, letters, None if found is None else found[rank])

    def rank_costs(self, configuration: Configuration, letters: Letters) -> tuple[tuple[SegmentCost, ...], ...]:
        """``costs`` on every pipeline rank; of ranks alike the same object."""
        found = self.problem.places(configuration) or (None,) * configuration.mesh.pp
        return tuple(self._costs_at(configuration, letters, place) for place in found)

    def _costs_at(self, at: Configuration, letters: Letters, place: Place | None) -> tuple[SegmentCost, ...]:
        key = (id(letters), at.mesh, at.micro_batches, at.zero, at.schedule == ZERO_BUBBLE, place)
        if key not in self._costs:
            on = self.problem.any_rank(at) if place is None else place
            self._costs[key] = self._costs_of(at, self._sharded(at, letters), on, letters.partial_leaves)
        return self._costs[key]

    def _costs_of(
        self,
        configuration: Configuration,
        local: Sharded,
        on: Place | AnyCluster,
        partial: frozenset[str] = frozenset(),
    ) -> tuple[SegmentCost, ...]:
        pricing = self.problem.pricing(configuration, on)
        key = (id(local), configuration.mesh, configuration.micro_batches, on)
        if key not in self._operators:
            self._operators[key] = segment_operators(local.graph, pricing)
        costs = segment_costs(local.graph, pricing, local.pairs, partial, self._operators[key])
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
        costs, limits = self.rank_costs(configuration, letters), self.problem.limits_bytes(configuration)
        split = self.split(mesh.dp, configuration.micro_batches)
        schedule, chunks = configuration.schedule, configuration.chunks
        most = held(schedule, mesh.pp, configuration.micro_batches, chunks)
        estimates = stage_estimates(costs, stages, recompute, most)
        estimate = estimate_step(estimates, schedule, configuration.micro_batches, limits, chunks)
        return Plan(
            model=problem.name,
            graph_digest=problem.graph.digest,
            mesh=mesh,
            micro_batches=configuration.micro_batches,
            schedule=configuration.schedule,
            zero=configuration.zero,
            stages=tuple(stages),
            recompute=tuple(recompute),
            segments=segment_infos(self.graph),
            layouts=record(
                split.graph,
                split.dp,
                letters.strategies,
                letters.leaves,
                mesh.dp,
                mesh.tp,
                self.folded.kinds(self.graph),
            ),
            global_batch=problem.graph.batch_size,
            cluster=problem.cluster.name,
            precision=problem.precision,
            optimizer=problem.optimizer,
            strategy=strategy,
            estimate=estimate,
            bound_s=bound_s,
            searched=searched,
            notes=(
                *problem.graph.notes,
                *notes,
                *priced_by(self._sharded(configuration, letters).graph, problem.cluster),
            ),
            seed=problem.seed,
            chunks=chunks,
            groups=configuration.groups,
            placement=tuple(place.words for place in self.problem.places(configuration) or ()),
        )
