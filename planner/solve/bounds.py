"""Lower bounds of a step: of the parts of a space (``Bounds``), and from the work of its segments and the schedule alone.

    region tp          the least of its degrees
    region tp, dp      T >= min (W(all rows) + S) / (dp pp), one program for all dp; or the least of its shapes
    shape              T >= schedule_bound_s, the least of all schedules, with  D >= min (M W(rows) + S) / dp,  M = dp m,
                       rows = batch / M: no ZeRO stage leaves a rank less than a dp-th of S
    configuration      the same, with  D >= min (m (W + E) + S) + A + U,  and what travels between stages: S and E, what
                       ZeRO-3 exposes, on its own mesh, for letters whose weights fit; A, the forward passes run again because
                       not even an ideal sharding of the activations fits (Evaluator.forced_recomputation_s); U, what dp does
                       once a step with nothing to hide behind

W is the time of the operators and conversions of so many rows on the devices of a tp group, all stages together, S what their
parameters cost once a step; the minimum is over all letters, with tp on the best links and nothing that travels on dp or
between stages. A step takes as long as its slowest stage, so no less than the mean. W is subadditive, as the price of
every operator and collective is: n runs of rows/n cost no less than one run of them all, so the bound of a region is one.
Measured times need not be, so with them the bounds of regions and shapes take prices that are (Problem.bounding).

    pipeline_bound_s   t = time of one micro-batch      T >= a t / (1 - (1 - a/m)^pp)            gpipe and 1f1b: a = 1

For pp = 1 this is m t. In general a prefix_j + m t_j <= T for each stage j (planner.simulate.lower_bound_s), and then the times
t_j sum to no more than T (1 - (1 - a/m)^pp) / a. Under zero-bubble a stage waits for the forward of those above alone: a is its
least share.

    schedule_bound_s   also T >= (D + sum_r p_r) / pp                        D: all that all stages together do in a step

where rank r waits for p_r before its first forward (``fill_s``): the forward of the stages above, at least r segments, or r q
where every rank has several stages of at least q segments each, and r transfers; then for their backward and its transfers as
well, where D is micro-batches alone. And T is no less than one micro-batch through all stages and back with its transfers,
under zero-bubble without the gradients of weights.

On unequal machines (planner.placement) W, S and all else are the least of any of the devices in question, operator by operator
for programs and segment by segment otherwise. Let rank r take at least 1/c_r of the least time for every segment (``rate``), so
that a second of it counts c_r <= 1 seconds of the least work. Then, for work of segments, sums over ranks are weighted:

    schedule_bound_s   T >= (D + sum_r c_r p_r) / sum_r c_r            D: m micro-batches, and min c of what else there is
    pipeline_bound_s   T >= t / v_1,   v_r = max(v_{r+1}, c_r / m + (1 - a/m) v_{r+1}),   v_{pp+1} = 0

since sum_r c_r t_r >= t, and v_r is the most of it that rank r and those behind it reach in a second that is left to them: each
takes all it can of it, or leaves it to those behind. For c = 1 it is the form above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.mixed import MixedCluster
from costmodels.views import AnyCluster
from planner.errors import BadInput
from planner.ir.mesh import Mesh
from planner.placement import Place
from planner.schedules import ZERO_BUBBLE
from planner.solve.configuration import Evaluator
from planner.solve.letters import letters_mesh, letters_zero
from planner.solve.space import Configuration, Part, Region, Shape, Space, schedules
from planner.solve.work import SegmentWork, least_of, rate
from planner.states import reduces_alone

Work = Sequence[SegmentWork]  # of every segment, for one micro-batch


def pipeline_bound_s(
    micro_batch_s: float, pp: int, micro_batches: int, share: float = 1.0, rates: Sequence[float] = ()
) -> float:
    """Least step time of pp stages whose times for one micro-batch sum to ``micro_batch_s``.

    ``share``: of the time of the stages above, what a stage waits for at least. ``rates``: of each stage, where they differ:
    its time counts that many times in the sum.
    """
    if rates:
        most = 0.0  # of the sum, in a step of one second that is left to a stage and those behind it
        for rate in reversed(rates):
            most = max(most, rate / micro_batches + most * (1.0 - share / micro_batches))
        return micro_batch_s / most
    if pp == 1:
        return micro_batches * micro_batch_s
    return share * micro_batch_s / (1.0 - (1.0 - share / micro_batches) ** pp)


def schedule_bound_s(
    work: Work,
    least_s: float,
    pp: int,
    micro_batches: int,
    schedule: str,
    chunks: int,
    transfer_s: float = 0.0,
    unequal: Unequal | None = None,
    once_s: float = 0.0,
) -> float:
    """Least step time of a schedule, whatever the stages. ``least_s``: all that all stages together do in a step, at least;
    ``transfer_s``: sending a micro-batch from one stage to the next, at least. ``unequal``: the ranks, where ``work`` is the
    least of them all; ``once_s``: what all stages together do in a step besides the micro-batches, at least."""
    rates = unequal.rates if unequal else ()
    total_s = sum(forward_s + backward_s for forward_s, backward_s, *_ in work)
    least = len(work) // (pp * chunks) if chunks > 1 else 1
    above = work[: (pp - 1) * least]
    waits = fill_s([f for f, *_ in above], pp, least, transfer_s)
    late_s = (max(least_s, micro_batches * total_s) + waits) / pp
    if rates:
        counted_s = micro_batches * total_s + min(rates) * once_s
        late_s = max(late_s, (counted_s + fill_s([f for f, *_ in above], pp, least, transfer_s, rates)) / sum(rates))
    round_trip_s = total_s + 2 * (pp * chunks - 1) * transfer_s
    if schedule == ZERO_BUBBLE:
        round_trip_s -= sum(w for _, _, w, *_ in work)
    late_s = max(late_s, round_trip_s)
    if schedule == ZERO_BUBBLE and chunks == 1:
        share = unequal.forward_share if unequal else forward_share(work)
        return max(late_s, pipeline_bound_s(total_s, pp, micro_batches, share, rates) if share else 0.0)
    if schedule == ZERO_BUBBLE:
        return late_s
    waits = fill_s([f + b for f, b, *_ in above], pp, least, 2 * transfer_s)
    late_s = max(late_s, (micro_batches * total_s + waits) / pp)
    if rates:
        waits = fill_s([f + b for f, b, *_ in above], pp, least, 2 * transfer_s, rates)
        late_s = max(late_s, (micro_batches * total_s + waits) / sum(rates))
    return max(late_s, pipeline_bound_s(total_s, pp, micro_batches, 1.0, rates)) if chunks == 1 else late_s


def fill_s(
    segments_s: Sequence[float], pp: int, least: int, transfer_s: float = 0.0, rates: Sequence[float] = ()
) -> float:
    """What all ranks wait for together, where rank r waits for the first r ``least`` segments and r transfers; ``rates``: what a
    second of each counts."""
    each = (sum(segments_s[: rank * least]) + rank * transfer_s for rank in range(pp))
    return sum(rate * wait_s for rate, wait_s in zip(rates or (1.0,) * pp, each, strict=True))


def forward_share(work: Work) -> float:
    """The least that forward takes of the time of a segment."""
    return min((f / (f + b) for f, b, *_ in work if f + b > 0), default=0.0)


@dataclass(frozen=True)
class Unequal:
    """What tells pipeline ranks apart: ``rates``, so many seconds of the least work does a rank in a second, at most; and the
    least share of forward on any."""

    rates: tuple[float, ...]
    forward_share: float

    @staticmethod
    def of(least: Work, each: Sequence[Work]) -> Unequal:
        """``each``: the work of the whole chain on each rank."""
        return Unequal(tuple(rate(least, own) for own in each), min(map(forward_share, each)))


class Bounds:
    """Lower bounds of the parts of a space (space.py), for any letters; programs once solved are kept."""

    def __init__(self, evaluator: Evaluator, space: Space) -> None:
        self.evaluator, self.space = evaluator, space
        # Tp -> seconds of regions; tp -> micro-batches of all ranks of dp of shapes -> seconds; and of configurations,
        # what their programs differ in -> micro-batches -> seconds.
        self.of_regions: dict[int, float] = {}
        self.of_shapes: dict[int, dict[int, float]] = {}
        self._known_lies: dict[Mesh, tuple[tuple[tuple[str, ...], ...], ...]] = {}
        self.of_configurations: dict[tuple[Mesh, int, float, AnyCluster], dict[int, float]] = {}

    def of(self, part: Part, sharpness: int = 0, enough_s: float = math.inf) -> float:
        """A lower bound of a part of the space. Raises BadInput where the batch cannot be cut so.

        The first of a shape or configuration is from what is known; the second from its program, of a configuration relaxed;
        the third from its letters. Where a bound of ``enough_s`` is at hand, no program is solved for a better one.
        """
        if isinstance(part, Region):
            return self._region_s(part, enough_s)
        mesh, m = part.mesh, part.micro_batches
        if isinstance(part, Shape):
            bound_s = self._shape_s(part, self._known_of_shape_s(part))
            if not sharpness or bound_s >= enough_s:
                return bound_s
            return self._shape_s(part, self._least_of_shape_s(part))
        cluster = self.evaluator.problem.any_rank(part)
        key = (letters_mesh(mesh), letters_zero(part.zero), self.evaluator.held_share(part), cluster)
        solved = self.of_configurations.setdefault(key, {})
        if sharpness > 1 or (sharpness and m not in solved):
            solved[m] = self.evaluator.least_letters_s(part, sharpness > 1)
        exact = self.evaluator.problem.cluster.measured is not None  # measured times need not be subadditive
        fewer = [m] if exact else [number for number in solved if m % number == 0]
        known = max((solved.get(number, 0.0) for number in fewer), default=0.0)
        return self._configuration_s(part, max(known, self._known_of_shape_s(part.shape)))

    def _known_of_shape_s(self, shape: Shape) -> float:
        """Least seconds of all work of a step in all stages, from the programs solved so far."""
        dp, pieces = shape.mesh.dp, shape.mesh.dp * shape.micro_batches
        solved = self.of_shapes.get(shape.mesh.tp, {})
        return max((least_s for fewer, least_s in solved.items() if pieces % fewer == 0), default=0.0) / dp

    def _least_of_shape_s(self, shape: Shape) -> float:
        """The same from its own program, one for all shapes with as many micro-batches in all ranks of dp together."""
        tp, pieces = shape.mesh.tp, shape.mesh.dp * shape.micro_batches
        solved = self.of_shapes.setdefault(tp, {})
        if pieces not in solved and self.space.batch % pieces == 0:
            try:
                solved[pieces] = self.evaluator.least_s(tp, 1, pieces)
            except BadInput:
                solved[pieces] = 0.0  # cut otherwise it may be possible
        return self._known_of_shape_s(shape)

    def _region_s(self, region: Region, enough_s: float) -> float:
        """From its shapes, where that is enough, else from the program of its tp too."""
        mesh = region.mesh
        if mesh is None:
            return min((self._region_s(part, enough_s) for part in self.space.narrower(region)), default=math.inf)
        share = region.tp / self.space.cluster.gpus
        filled_s = min((self._of_work_s(shape) for shape in self.space.shapes(mesh)), default=math.inf)
        if math.isinf(filled_s):
            return 0.0  # no shape is possible; each will say why
        if filled_s >= enough_s:
            return filled_s
        if region.tp not in self.of_regions:
            self.of_regions[region.tp] = self.evaluator.least_s(region.tp, 1, 1)
        return max(self.of_regions[region.tp] * share, filled_s)

    def _of_work_s(self, shape: Shape) -> float:
        """The bound of a shape without its program; infinite where the batch cannot be cut so."""
        try:
            return self._shape_s(shape, 0.0)
        except BadInput:
            return math.inf

    def _shape_s(self, shape: Shape, least_s: float) -> float:
        """The least bound of any schedule, and of any way in which pipeline ranks lie on unequal machines."""
        mesh, m = shape.mesh, shape.micro_batches
        kinds = tuple(schedules(mesh.pp, m, self.evaluator.segments))
        if not isinstance(self.space.cluster, MixedCluster):
            own = self._work(mesh, m)
            return min((schedule_bound_s(own, least_s, mesh.pp, m, *kind) for kind in kinds), default=math.inf)
        best_s = math.inf
        for groups in self._lies(mesh):
            each = [self._work(mesh, m, names) for names in groups]
            own = least_of(each)
            unequal = Unequal.of(own, each)
            for kind in kinds:
                best_s = min(best_s, schedule_bound_s(own, least_s, mesh.pp, m, *kind, unequal=unequal))
        return best_s

    def _work(self, mesh: Mesh, m: int, groups: tuple[str, ...] = ()) -> Work:
        """The least work that is left to one device of tp."""
        work = self.evaluator.work(mesh.dp, m, cut=mesh.tp > 1, groups=groups)
        return tuple(segment.over(mesh.tp) for segment in work)

    def _lies(self, mesh: Mesh) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The groups of machines of each pipeline rank, in every way there is."""
        if mesh not in self._known_lies:
            found: dict[tuple[tuple[str, ...], ...], None] = {}
            for ordered, groups in self.space.arrangements(mesh):
                lie = self.evaluator.problem.places(Configuration(ordered, 1, 0, "1f1b", 1, groups))
                found[tuple(place.groups for place in lie or ())] = None
            self._known_lies[mesh] = tuple(found)
        return self._known_lies[mesh]

    def _configuration_s(self, part: Configuration, least_s: float) -> float:
        """That of its schedule, with what travels on dp, what is done once a step, and what must be computed again."""
        mesh, m = part.mesh, part.micro_batches
        again_s = self.evaluator.forced_recomputation_s(part) / mesh.tp
        if math.isinf(again_s) or (again_s and part.schedule == ZERO_BUBBLE):
            return math.inf
        places = self.evaluator.problem.places(part)
        ranks = {place: self._on_rank(part, place) for place in places or (None,)}
        own = least_of([rank.work for rank in ranks.values()])
        unequal = None if places is None else Unequal.of(own, [ranks[place].work for place in places])
        once_s = sum(map(min, zip(*(rank.once_s for rank in ranks.values()), strict=True)))
        unhidden_s = sum(map(min, zip(*(rank.unhidden_s for rank in ranks.values()), strict=True)))
        work_s = sum(f + b for f, b, *_ in own)
        least_s = max(least_s + unhidden_s, m * work_s + once_s) + m * again_s
        transfer_s = self.evaluator.transfer_s(part)
        schedule = (part.schedule, part.chunks)
        bound_s = schedule_bound_s(own, least_s, mesh.pp, m, *schedule, transfer_s, unequal, once_s + m * again_s)
        if again_s and part.chunks == 1:
            rates = unequal.rates if unequal else ()
            bound_s = max(bound_s, pipeline_bound_s(work_s + again_s * min(rates, default=1.0), mesh.pp, m, 1.0, rates))
        return bound_s

    def _on_rank(self, part: Configuration, place: Place | None) -> _Rank:
        """Of the whole chain, if it lay on one pipeline rank; ``place``: where, on unequal machines."""
        tp = part.mesh.tp
        ideal = self.evaluator.ideal_costs(part, place)
        groups = () if place is None else place.groups
        alone = self.evaluator.work(part.mesh.dp, part.micro_batches, cut=tp > 1, groups=groups)
        own = tuple(
            segment._replace(forward_s=c.forward_s, backward_s=c.backward_s).over(tp)
            for c, segment in zip(ideal, alone, strict=True)
        )
        more_s = [work.backward_s - c.backward_s / tp for c, work in zip(ideal, own, strict=True)]
        once_s = [
            c.optimizer_per_step_s / tp + max(0.0, c.gradient_sync_per_step_s / tp - more)
            for c, more in zip(ideal, more_s, strict=True)
        ]
        unhidden_s = [max(0.0, c.unhidden_per_step_s / tp - more) for c, more in zip(ideal, more_s, strict=True)]
        if reduces_alone(self.evaluator.problem.any_rank(part)):  # the program counts what travels on dp
            unhidden_s = [0.0] * len(own)
        return _Rank(own, once_s, unhidden_s)


@dataclass(frozen=True)
class _Rank:
    """What one device of a pipeline rank does of every segment at least: of a micro-batch; once a step; and of that, what dp
    exposes whatever else there is."""

    work: Work
    once_s: Sequence[float]
    unhidden_s: Sequence[float]
