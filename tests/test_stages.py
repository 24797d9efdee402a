"""Stages and recomputation against every split x every choice of what to recompute."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.ir.plan import RECOMPUTATIONS, StageEstimate
from planner.paths import critical_path, fill_and_drain_paths
from planner.schedules import held, in_flight
from planner.segment_cost import Recomputation, SegmentCost, stage_estimate, stage_estimates
from planner.simulate import StageTimes, estimate_step, times_of
from planner.solve import frontier, stages
from planner.solve.frontier import Frontier
from planner.solve.stages import NoChoice, StageChoice, StageInfeasible, choose_stages, least_missing
from tests.search_cases import AMPLE, Tried, best_step_s, every_choice, splits

RELATIVE = 1e-9
SECONDS = st.integers(0, 40).map(lambda n: n / 8)
SIZES = st.integers(0, 20)


@st.composite
def segment_costs(draw: st.DrawFn) -> SegmentCost:
    forward_s, backward_s, crossing = draw(SECONDS), draw(SECONDS), draw(st.integers(0, 2))
    return SegmentCost(
        forward_s,
        backward_s,
        forward_s * draw(st.sampled_from([0.0, 0.25, 1.0])),
        backward_s * draw(st.sampled_from([0.0, 0.5])),
        activations_bytes=draw(SIZES),
        input_bytes=draw(SIZES),
        weights_bytes=draw(SIZES),
        gradients_bytes=draw(SIZES),
        temporary_bytes=draw(SIZES),
        gradient_sync_per_step_s=draw(SECONDS),
        optimizer_per_step_s=draw(SECONDS),
        transfer_s=draw(SECONDS),
        pending_bytes=draw(st.integers(0, 3)),
        crossing_bytes=crossing,
        buffers_bytes=5 * crossing,
        selective=draw(st.none() | st.builds(Recomputation, SECONDS, st.just(0.0), SIZES, SIZES)),
    )


@dataclass(frozen=True)
class Instance:
    segments: tuple[SegmentCost, ...]
    pp: int
    micro_batches: int
    schedule: str
    limit_bytes: int

    def choose(self, upper_bound_s: float = math.inf, deadline: float | None = None) -> StageChoice | StageInfeasible:
        choice = choose_stages(
            self.segments,
            self.pp,
            self.micro_batches,
            self.schedule,
            self.limit_bytes,
            upper_bound_s=upper_bound_s,
            deadline=deadline,
        )
        if isinstance(choice, StageChoice):
            return choice
        assert choice.bound_s == math.inf
        return least_missing(self.segments, self.pp, self.micro_batches, self.schedule, self.limit_bytes)

    def every(self) -> list[Tried]:
        return list(every_choice(self.segments, self.pp, self.micro_batches, self.schedule))

    def best_s(self) -> float:
        return best_step_s(self.segments, self.pp, self.micro_batches, self.schedule, self.limit_bytes)


@st.composite
def instances(draw: st.DrawFn, most_segments: int = 6) -> Instance:
    """Chains of some equal and some different segments; limits from hopeless to ample."""
    kinds = draw(st.lists(segment_costs(), min_size=1, max_size=3))
    chain = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_segments))
    pp = draw(st.integers(1, min(3, len(chain))))
    schedule = draw(st.sampled_from(["gpipe", "1f1b"]))
    micro_batches = draw(st.integers(pp if schedule == "1f1b" else 1, 5))
    limit = draw(st.sampled_from([AMPLE, 0]) | st.integers(20, 300))
    return Instance(tuple(chain), pp, micro_batches, schedule, limit)


def check_choice(instance: Instance, choice: StageChoice) -> None:
    """The choice is one of the space, fits, and has the figures it says."""
    tried = {(x.stages, x.recompute): x for x in instance.every()}
    own = tried[choice.stages, choice.recompute]
    assert choice.estimate.step_time_s == own.step_time_s
    assert max(own.memory_bytes) == choice.estimate.peak_memory_bytes <= instance.limit_bytes
    assert choice.bound_s <= choice.estimate.step_time_s


@given(instances())
@settings(max_examples=120)
def test_nothing_is_better_than_the_choice(instance: Instance) -> None:
    choice, best_s = instance.choose(), instance.best_s()
    if isinstance(choice, StageInfeasible):
        assert best_s == math.inf
        check_missing(instance, choice)
        return
    check_choice(instance, choice)
    assert choice.proven
    assert choice.estimate.step_time_s == pytest.approx(best_s, rel=RELATIVE)
    assert choice.bound_s == pytest.approx(best_s, rel=RELATIVE)


@given(
    st.lists(segment_costs(), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=4, max_size=7),
    st.sampled_from(["interleaved", "zero-bubble"]),
    st.sampled_from([2, 4]),
    st.sampled_from([AMPLE, 0]) | st.integers(20, 300),
)
@settings(max_examples=80)
def test_nothing_is_better_with_several_stages_a_rank(
    kinds: list[SegmentCost], chain: list[int], schedule: str, m: int, limit: int
) -> None:
    """Two ranks with two stages each: every even split, each stage computing all or nothing again."""
    segments = [kinds[i % len(kinds)] for i in chain]
    words = RECOMPUTATIONS[:1] if schedule == "zero-bubble" else RECOMPUTATIONS
    best_s = math.inf
    for split in splits(len(segments), 4):
        sizes = [end - first for first, end in split]
        for ways in itertools.product(words, repeat=4) if max(sizes) - min(sizes) <= 1 else ():
            recompute = [way for way, size in zip(ways, sizes, strict=True) for _ in range(size)]
            if any(way not in s.recomputations for way, s in zip(recompute, segments, strict=True)):
                continue
            estimate = estimate_step(
                stage_estimates(segments, split, recompute, held(schedule, 2, m, 2)), schedule, m, limit, 2
            )
            if estimate.fits:
                best_s = min(best_s, estimate.step_time_s)
    choice = choose_stages(segments, 2, m, schedule, limit, chunks=2)
    if not isinstance(choice, StageChoice):
        assert choice.bound_s == best_s == math.inf
        return
    assert (choice.stages[0][0], choice.stages[-1][1]) == (0, len(segments))
    assert choice.estimate.fits and choice.estimate.step_time_s == pytest.approx(best_s, rel=RELATIVE)
    assert choice.bound_s <= best_s * (1 + RELATIVE)


def check_missing(instance: Instance, found: StageInfeasible) -> None:
    """Its bytes are the least by which the fullest stage of any choice is over, and ``stage`` is one such stage."""
    over = [tuple(size - instance.limit_bytes for size in x.memory_bytes) for x in instance.every()]
    least = min(map(max, over))
    assert found.missing_bytes == least > 0
    assert any(max(row) == least == row[found.stage] for row in over)


@given(instances(5), st.integers(1, 60))
@settings(max_examples=60)
def test_what_is_missing(instance: Instance, tenths: int) -> None:
    limit = min(max(x.memory_bytes) for x in instance.every()) * tenths // 61
    instance = Instance(instance.segments, instance.pp, instance.micro_batches, instance.schedule, limit)
    if instance.best_s() == math.inf:
        found = instance.choose()
        assert isinstance(found, StageInfeasible)
        check_missing(instance, found)


@given(instances(5), st.sampled_from([0.0, 0.5, 0.999, 1.0, 1.001, 2.0]))
@settings(max_examples=80)
def test_an_upper_bound_stops_early_but_never_hides_a_better_split(instance: Instance, factor: float) -> None:
    best_s = instance.best_s()
    if best_s == math.inf:
        return
    choice = instance.choose(upper_bound_s=best_s * factor)
    assert isinstance(choice, StageChoice)
    check_choice(instance, choice)
    assert choice.bound_s <= best_s * (1 + RELATIVE)
    if factor > 1:
        assert choice.estimate.step_time_s == pytest.approx(best_s, rel=RELATIVE)
    else:
        assert choice.bound_s >= best_s * factor * (1 - RELATIVE)


@given(instances(5))
@settings(max_examples=50)
def test_what_is_not_promising_ends_with_moved_cuts_and_a_bound_that_holds(instance: Instance) -> None:
    choice = choose_stages(
        instance.segments,
        instance.pp,
        instance.micro_batches,
        instance.schedule,
        instance.limit_bytes,
        promising_s=0.0,
    )
    best_s = instance.best_s()
    if isinstance(choice, NoChoice):
        assert math.isinf(best_s)
        return
    assert choice.estimate.fits
    assert choice.bound_s <= best_s * (1 + RELATIVE)
    assert choice.estimate.step_time_s >= best_s * (1 - RELATIVE)


def test_past_the_deadline_something_legal_comes_back() -> None:
    chain = tuple(SegmentCost(1.0 + i % 3, 2.0 + i % 5, activations_bytes=i, transfer_s=0.5) for i in range(6))
    instance = Instance(chain, 3, 4, "1f1b", AMPLE)
    choice = instance.choose(deadline=time.monotonic() - 1)
    assert isinstance(choice, StageChoice)
    check_choice(instance, choice)
    assert choice.bound_s <= instance.best_s()


@given(instances(5))
@settings(max_examples=40)
def test_the_same_again(instance: Instance) -> None:
    assert instance.choose() == instance.choose()


@given(instances())
@settings(max_examples=60)
def test_with_labels_left_out_the_bound_still_holds(instance: Instance) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "MOST_LABELS", 1)
        choice = instance.choose()
    best_s = instance.best_s()
    if isinstance(choice, StageInfeasible):
        check_missing(instance, choice)
        return
    check_choice(instance, choice)
    assert choice.bound_s <= best_s * (1 + RELATIVE)
    if choice.proven:
        assert choice.estimate.step_time_s == pytest.approx(best_s, rel=RELATIVE)


@given(instances(5), st.integers(1, 2))
@settings(max_examples=60)
def test_with_few_rounds_the_bound_still_holds(instance: Instance, rounds: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "MOST_ROUNDS", rounds)
        choice = instance.choose()
    if isinstance(choice, StageChoice):
        check_choice(instance, choice)
        assert choice.bound_s <= instance.best_s() * (1 + RELATIVE)


STAGES = st.lists(
    st.builds(lambda f, b, r, g, u: StageEstimate(f, b, transfer_s=r, gradient_sync_per_step_s=g, optimizer_per_step_s=u),
              SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    min_size=1, max_size=5,
)  # fmt: skip


def figures(chain: list[StageEstimate]) -> tuple[list[StageTimes], list[float]]:
    return times_of(chain), [s.gradient_sync_per_step_s + s.optimizer_per_step_s for s in chain]


SCHEDULES = st.sampled_from(["gpipe", "1f1b"])


@given(STAGES, st.integers(1, 8), SCHEDULES)
@settings(max_examples=150)
def test_fill_and_drain_paths_are_lower_bounds(chain: list[StageEstimate], micro_batches: int, schedule: str) -> None:
    """Against the formulas written out, and never above the simulation."""
    if schedule == "1f1b":
        micro_batches = max(micro_batches, len(chain))
    m = micro_batches
    times, once = figures(chain)
    step_s = estimate_step(chain, schedule, m, 0).step_time_s
    expected = []
    round_trip = sum(t.forward_s + t.backward_s for t in times) + 2 * sum(t.transfer_s for t in times[:-1])
    for j, (forward_s, backward_s, *_) in enumerate(times):
        w = m if schedule == "gpipe" else min(m, len(chain) - j)
        back = sum(f + b + 2 * r for f, b, r, _ in times[:j])
        there = sum(f + r for f, _, r, _ in times[:j])
        expected += [
            back + m * (forward_s + backward_s) + once[0],
            there + m * (forward_s + backward_s) + once[j],
            round_trip + (m - 1) * forward_s + (m - w) * backward_s + once[0],
            round_trip + (m - w) * forward_s + (m - 1) * backward_s + once[0],
            back + math.ceil(m / w) * (round_trip - back) + once[0],
        ]
    lengths = [path.length_s(times, once) for path in fill_and_drain_paths(schedule, len(chain), m)]
    assert lengths == pytest.approx(expected)
    assert step_s >= max(lengths) * (1 - 1e-12)


@given(STAGES, STAGES, st.integers(1, 8), SCHEDULES)
@settings(max_examples=150)
def test_the_critical_path_is_the_step_and_bounds_every_other(
    chain: list[StageEstimate], other: list[StageEstimate], micro_batches: int, schedule: str
) -> None:
    other = [other[i % len(other)] for i in range(len(chain))]
    path = critical_path(*figures(chain), schedule, micro_batches)
    assert path.length_s(*figures(chain)) == pytest.approx(estimate_step(chain, schedule, micro_batches, 0).step_time_s)
    least_s = path.length_s(*figures(other))
    assert estimate_step(other, schedule, micro_batches, 0).step_time_s >= least_s * (1 - 1e-12)


@given(STAGES, st.integers(0, 4), st.sampled_from(["forward_s", "backward_s"]), st.integers(1, 8), SCHEDULES)
@example([StageEstimate(1.0, 1.0)] * 3, 1, "backward_s", 4, "1f1b")
def test_a_slower_stage_never_makes_a_faster_step(
    chain: list[StageEstimate], at: int, field: str, micro_batches: int, schedule: str
) -> None:
    """The reason why the fastest recomputation that fits is enough."""
    if schedule == "1f1b":
        micro_batches = max(micro_batches, len(chain))
    at %= len(chain)
    slower = [*chain[:at], replace(chain[at], **{field: getattr(chain[at], field) + 1}), *chain[at + 1 :]]
    before, after = (estimate_step(x, schedule, micro_batches, 0).step_time_s for x in (chain, slower))
    assert after >= before


def test_known_answers() -> None:
    even = tuple(SegmentCost(1.0, 2.0) for _ in range(8))
    choice = choose_stages(even, 4, 8, "1f1b", AMPLE)
    assert isinstance(choice, StageChoice)
    assert choice.stages == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert choice.estimate.step_time_s == (8 + 3) * 6.0
    # a head as dear as three layers: the last stage holds one layer fewer
    head = (*even[:7], SegmentCost(3.0, 6.0))
    assert choose_stages(head, 2, 64, "gpipe", AMPLE).stages == ((0, 5), (5, 8))  # type: ignore[union-attr]


def test_recomputes_the_cheapest_that_makes_room() -> None:
    # 30 bytes are kept without recomputation; 22 fit with the first or the last, of which the last is quicker again
    chain = (
        SegmentCost(3.0, 6.0, activations_bytes=10, input_bytes=0),
        SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=9),
        SegmentCost(2.0, 4.0, activations_bytes=10, input_bytes=0),
    )
    instance = Instance(chain, 1, 2, "1f1b", 30)
    assert instance.choose().recompute == ("none",) * 3  # type: ignore[union-attr]
    # f = 2 in flight under gpipe: 60 kept; recomputing segment 2 leaves 40 + 10 while it runs again
    choice = Instance(chain, 1, 2, "gpipe", 50).choose()
    assert isinstance(choice, StageChoice)
    assert choice.recompute == ("none", "none", "full")
    assert choice.estimate.step_time_s == 2 * (18.0 + 2.0)


def test_memory_cuts_unevenly() -> None:
    """1f1b: the first stage holds two micro-batches, the last one."""
    chain = tuple(SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=10) for _ in range(6))
    choice = choose_stages(chain, 2, 4, "1f1b", 40)
    assert isinstance(choice, StageChoice)
    assert choice.stages == ((0, 2), (2, 6))
    assert choose_stages(chain, 2, 4, "1f1b", 39) == NoChoice(math.inf)
    assert least_missing(chain, 2, 4, "1f1b", 39) == StageInfeasible(1, 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("limit", [AMPLE, 420])
def test_a_long_chain_is_proven(schedule: str, limit: int) -> None:
    """A transformer's chain: far too many splits to try one by one."""
    layer = SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=1, weights_bytes=3, transfer_s=0.125)
    embedding = SegmentCost(0.5, 0.6, activations_bytes=4, input_bytes=1)
    head = SegmentCost(2.5, 5.0, activations_bytes=20, input_bytes=1)
    choice = choose_stages((embedding, *[layer] * 32, head), 4, 8, schedule, limit)
    assert isinstance(choice, StageChoice)
    assert choice.proven
    assert ("full" in choice.recompute) == (limit == 420 and schedule == "gpipe")


def test_eight_stages_of_fifty_segments() -> None:
    """An instance whose best split an earlier program missed: the solver's presolve took it for infeasible."""
    layer = SegmentCost(1.0, 2.0, activations_bytes=10, input_bytes=1, weights_bytes=3, transfer_s=0.125)
    embedding = SegmentCost(0.5, 0.6, activations_bytes=4, input_bytes=1)
    head = SegmentCost(2.5, 5.0, activations_bytes=20, input_bytes=1)
    choice = choose_stages((embedding, *[layer] * 48, head), 8, 64, "1f1b", 420)
    assert isinstance(choice, StageChoice)
    assert (choice.estimate.step_time_s, choice.proven) == (pytest.approx(1476.35), True)


@pytest.mark.parametrize("seed", range(12))
def test_longer_chains_with_uneven_times(seed: int) -> None:
    """Against every split, each interval with its fastest recomputation that fits (test_frontier)."""
    draw = random.Random(seed)
    kinds = [
        SegmentCost(
            draw.uniform(0.1, 3),
            draw.uniform(0.1, 5),
            activations_bytes=draw.randint(1, 20),
            input_bytes=draw.randint(0, 3),
            weights_bytes=draw.randint(0, 5),
            transfer_s=draw.uniform(0, 1),
            gradient_sync_per_step_s=draw.uniform(0, 3),
        )
        for _ in range(3)
    ]
    chain = [draw.choice(kinds) for _ in range(13)]
    schedule, micro_batches, limit = (
        draw.choice(["gpipe", "1f1b"]),
        draw.choice([4, 16]),
        draw.choice([AMPLE, 150, 300]),
    )
    labels = Frontier(chain)
    best_s = math.inf
    for split in splits(len(chain), 4):
        parts = []
        for number, (first, end) in enumerate(split):
            flights = in_flight(schedule, 4, micro_batches, number)
            label = labels.fastest(first, end, flights, limit)
            if label is None:
                break
            parts.append(stage_estimate(chain[first:end], label.recompute, flights, number == 3))
        if len(parts) == 4:
            best_s = min(best_s, estimate_step(parts, schedule, micro_batches, limit).step_time_s)
    choice = choose_stages(chain, 4, micro_batches, schedule, limit)
    if isinstance(choice, StageInfeasible):
        assert best_s == math.inf
        return
    assert choice.proven
    assert choice.estimate.step_time_s == pytest.approx(best_s, rel=RELATIVE)


def test_more_stages_than_segments_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 segments cannot make 2 stages"):
        choose_stages([SegmentCost(1.0, 1.0)], 2, 2, "gpipe", AMPLE)
