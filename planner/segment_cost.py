"""What one segment of the chain costs on one device, and what a stage made of segments costs.

    SegmentCost                          priced from the lowered graph by planner.chain_costs
    Recomputation                        what keeping less of a segment saves and costs: none, selective or full
    stage_estimate(segments, recompute)  their sum

Memory of a stage holding f micro-batches in flight, over its segments s, each with its recomputation:

    sum_s states_s  +  f * sum_s kept_s  +  max_s temporary_s

                 extra time, in backward      kept                  temporary: what exists only while it runs
    none         0                            activations           t: gradients on their way, scratch (planner.live)
    selective    of what is run again         given by costing      t and what was not kept of the activations
    full         the forward (or given)       input                 t and the activations

Of several stages on one device the states add up, the largest temporary counts once, and f is the worst of the moments
that the schedule brings (``stage_estimates``).

Stages exchange tensors; what that takes is told by ``between_bytes``. Under zero-bubble rank r puts off the gradients of weights
of r micro-batches, and of the one whose backward runs. What these are made of is kept as long: the activations, which f
counts, and the gradients that came to the operators with weights, r + 1 times ``pending_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.ir.plan import MemoryEstimate, StageEstimate


@dataclass(frozen=True)
class Recomputation:
    """One way to keep less of a segment. ``extra_s``: time added to backward, of which ``extra_communication_s``
    communicates; ``kept_bytes``: of a micro-batch, between forward and backward; ``temporary_bytes``: held besides while
    the segment runs."""

    extra_s: float = 0.0
    extra_communication_s: float = 0.0
    kept_bytes: int = 0
    temporary_bytes: int = 0


@dataclass(frozen=True)
class SegmentCost:
    """Times of one micro-batch in seconds, bytes on one device.

    ``forward_s`` and ``backward_s`` include communication (``*_communication_s``, and under ZeRO-3 the gathering of
    weights as far as it is exposed). ``activations_bytes``: kept for the backward of one micro-batch; ``input_bytes``: what is
    kept instead when the segment is recomputed in full. ``temporary_bytes``: when nothing is recomputed. ``pending_bytes``: kept
    of a micro-batch whose gradients of weights are put off. ``crossing_bytes``: of a micro-batch, travels on behind it;
    ``buffers_bytes``: where it arrives, of all micro-batches.
    ``selective``: None where that is no choice; ``full``: None for the forward once more. ``weight_backward_s``: the part of
    ``backward_s`` that only makes gradients of weights. ``transfer_s``: sending its output to a next stage, one way.
    ``*_per_step_s`` are paid once a step; ``unhidden_per_step_s`` is the part of ``gradient_sync_per_step_s`` that dp takes
    whatever else takes time.
    """

    forward_s: float
    backward_s: float
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    activations_bytes: int = 0
    input_bytes: int = 0
    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    temporary_bytes: int = 0
    gradient_sync_per_step_s: float = 0.0
    unhidden_per_step_s: float = 0.0
    optimizer_per_step_s: float = 0.0
    transfer_s: float = 0.0
    weight_backward_s: float = 0.0
    pending_bytes: int = 0
    crossing_bytes: int = 0
    buffers_bytes: int = 0
    selective: Recomputation | None = None
    full: Recomputation | None = None

    @cached_property
    def recomputations(self) -> Mapping[str, Recomputation]:
        """By their words in a plan, the ways to run this segment; 'none' first."""
        full = self.full or Recomputation(
            self.forward_s,
            self.forward_communication_s,
            self.input_bytes,
            self.temporary_bytes + self.activations_bytes,
        )
        found = {"none": Recomputation(kept_bytes=self.activations_bytes, temporary_bytes=self.temporary_bytes)}
        if self.selective is not None:
            found["selective"] = self.selective
        return {**found, "full": full}

    def recomputation(self, word: str) -> Recomputation:
        return self.recomputations[word]

    @cached_property
    def states_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @cached_property
    def least_kept_bytes(self) -> int:
        """Of a micro-batch between forward and backward, however it is recomputed."""
        return min(way.kept_bytes for way in self.recomputations.values())


# Of the segments of a chain; or, where pipeline ranks differ, of each rank those of all segments as if it held them.
RankCosts = Sequence[SegmentCost] | Sequence[Sequence[SegmentCost]]


def of_each_rank(costs: RankCosts, ranks: int) -> list[Sequence[SegmentCost]]:
    """One sequence a rank. Raises ValueError where there are others than ``ranks``."""
    if not costs or isinstance(costs[0], SegmentCost):
        return [costs] * ranks  # type: ignore[list-item]
    if len(costs) != ranks:
        raise ValueError(f"costs on {len(costs)} pipeline ranks for {ranks}")
    return list(costs)  # type: ignore[arg-type]


def stage_estimate(
    segments: Sequence[SegmentCost], recompute: Sequence[str], in_flight: int, last: bool
) -> StageEstimate:
    """The cost of a stage that holds ``segments`` with ``in_flight`` micro-batches; ``last``: it sends nothing on.

    Preconditions: at least one segment; one word of recomputation a segment.
    """
    ways = [segment.recomputation(word) for segment, word in zip(segments, recompute, strict=True)]
    again_s, again_communication_s = sum(way.extra_s for way in ways), sum(way.extra_communication_s for way in ways)
    return StageEstimate(
        forward_s=sum(s.forward_s for s in segments),
        backward_s=sum(s.backward_s for s in segments) + again_s,
        forward_communication_s=sum(s.forward_communication_s for s in segments),
        backward_communication_s=sum(s.backward_communication_s for s in segments) + again_communication_s,
        recomputation_s=max(0.0, again_s - again_communication_s),
        transfer_s=0.0 if last else segments[-1].transfer_s,
        gradient_sync_per_step_s=sum(s.gradient_sync_per_step_s for s in segments),
        optimizer_per_step_s=sum(s.optimizer_per_step_s for s in segments),
        memory=MemoryEstimate(
            weights_bytes=sum(s.weights_bytes for s in segments),
            gradients_bytes=sum(s.gradients_bytes for s in segments),
            optimizer_bytes=sum(s.optimizer_bytes for s in segments),
            activations_bytes=in_flight * sum(way.kept_bytes for way in ways),
            temporary_bytes=max(way.temporary_bytes for way in ways),
        ),
        weight_backward_s=sum(s.weight_backward_s for s in segments),
    )


def stage_estimates(
    segments: RankCosts,
    stages: Sequence[tuple[int, int]],
    recompute: Sequence[str],
    held: Sequence[Sequence[tuple[int, ...]]],
) -> list[StageEstimate]:
    """The estimates of all stages of a plan. ``held``: of each pipeline rank (planner.schedules.held).

    Memory is each stage's share of its device's peak: of the vectors of micro-batches held, the one that keeps most; and
    of the temporary bytes, the most of any of its stages, counted with that one.
    """
    pp, last = len(held), len(stages) - 1
    on = of_each_rank(segments, pp)
    one = [
        stage_estimate(on[number % pp][first:end], recompute[first:end], 1, number == last)
        for number, (first, end) in enumerate(stages)
    ]
    found = list(one)
    for rank, vectors in enumerate(held):
        mine = range(rank, len(stages), pp)
        kept = [one[stage].memory.activations_bytes for stage in mine]
        most = max(vectors, key=lambda counts: sum(n * size for n, size in zip(counts, kept, strict=True)))
        largest = max(mine, key=lambda stage: one[stage].memory.temporary_bytes)
        between = [between_bytes(on[rank], stage, len(stages), flight(vectors, stage // pp)) for stage in mine]
        at_once = max(map(sum, vectors))
        pending = [put_off(rank, at_once) * sum(s.pending_bytes for s in on[rank][a:b]) for a, b in stages[rank::pp]]
        longest = mine[max(range(len(pending)), key=pending.__getitem__)]
        for stage, count, size, exchanged in zip(mine, most, kept, between, strict=True):
            memory = one[stage].memory
            temporary = memory.temporary_bytes if stage == largest else 0
            activations = count * size + exchanged + (max(pending) if stage == longest else 0)
            found[stage] = replace(
                one[stage], memory=replace(memory, activations_bytes=activations, temporary_bytes=temporary)
            )
    return found


def flight(vectors: Sequence[tuple[int, ...]], chunk: int) -> int:
    """The most micro-batches a rank holds of one of its stages; ``vectors``: planner.schedules.held of the rank."""
    return max(vector[chunk] for vector in vectors)


def between_bytes(segments: Sequence[SegmentCost], stage: int, stages: int, held: int) -> int:
    """What a stage that holds ``held`` micro-batches has for its exchange with others, besides inputs that are kept anyway.

    Buffers for what comes from the stage before and for the gradients that come from the one behind, of all
    micro-batches; and what was sent, until its backward. Of the widest cut of the chain, whatever the stage's own.
    """
    crossing = max(segment.crossing_bytes for segment in segments)
    buffers = max(segment.buffers_bytes for segment in segments)
    before = buffers - held * crossing if stage > 0 else 0
    return before + (buffers + held * crossing if stage < stages - 1 else 0)


def put_off(rank: int, held: int) -> int:
    """Of how many micro-batches, of at most ``held``, ``rank`` of a zero-bubble pipeline keeps gradients for those of weights."""
    return min(rank + 1, held)
