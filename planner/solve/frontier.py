"""Which segments of a stage to recompute: the frontier of time against memory over one interval of the chain.

A label says what one choice costs an interval: (extra seconds, bytes kept of a micro-batch, largest recomputed activations).
Labels of [i, j+1) are those of [i, j) extended by keeping or recomputing segment j; a label that is nowhere better than
another is dropped. Equal segments give equal labels, so n of them leave n + 1, not 2^n.

Memory of a label with f micro-batches in flight (planner.segment_cost.stage_estimate):

    states + f * kept + max temporary + again

Where there are too many labels some are left out. What fits is then still known exactly, because the labels of least memory
stay (``least_memory``), and the extra time has a lower bound (``least_extra_s``): the fractional knapsack that recomputes
parts of segments, cheapest by the byte first, and holds nothing while it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.segment_cost import SegmentCost

# More labels than this are thinned out; the fastest one that fits may then be missing (``Frontier.exact``).
MOST_LABELS = 400


@dataclass(frozen=True)
class Label:
    """``extra_s``: forward time spent again. ``recompute``: one flag a segment of the interval."""

    extra_s: float
    kept_bytes: int
    again_bytes: int
    recompute: tuple[bool, ...]

    def memory_bytes(self, in_flight: int, fixed_bytes: int) -> int:
        return fixed_bytes + in_flight * self.kept_bytes + self.again_bytes


class Frontier:
    """Labels of every interval, made when asked for."""

    def __init__(self, segments: Sequence[SegmentCost]) -> None:
        self.segments = segments
        self.exact = True
        self._labels: dict[tuple[int, int], tuple[Label, ...]] = {}
        self._states = [0]
        for segment in segments:
            self._states.append(self._states[-1] + segment.states_bytes)

    def fixed_bytes(self, first: int, end: int) -> int:
        """Bytes that do not depend on what is recomputed."""
        temporary = max(segment.temporary_bytes for segment in self.segments[first:end])
        return self._states[end] - self._states[first] + temporary

    def labels(self, first: int, end: int) -> tuple[Label, ...]:
        """The frontier of segments ``first`` up to ``end``, fastest first."""
        if first == end:
            return (Label(0.0, 0, 0, ()),)
        key = (first, end)
        if key not in self._labels:
            grown = self._extend(self.labels(first, end - 1), self.segments[end - 1])
            if len(grown) > MOST_LABELS:
                self.exact = False
                step = len(grown) / MOST_LABELS
                thin = [grown[int(i * step)] for i in range(MOST_LABELS)]
                grown = pareto([*thin, *least_memory(self.segments[first:end])])
            self._labels[key] = tuple(grown)
        return self._labels[key]

    def _extend(self, labels: tuple[Label, ...], segment: SegmentCost) -> list[Label]:
        grown = [
            Label(x.extra_s, x.kept_bytes + segment.activations_bytes, x.again_bytes, (*x.recompute, False))
            for x in labels
        ]
        grown += [
            Label(
                x.extra_s + segment.forward_s,
                x.kept_bytes + segment.input_bytes,
                max(x.again_bytes, segment.activations_bytes),
                (*x.recompute, True),
            )
            for x in labels
        ]
        return pareto(grown)

    def fastest(self, first: int, end: int, in_flight: int, limit_bytes: int) -> Label | None:
        """The fastest label that fits; among equals the one that holds least. None when none fits."""
        fixed = self.fixed_bytes(first, end)
        plain = sum(segment.activations_bytes for segment in self.segments[first:end])
        if fixed + in_flight * plain <= limit_bytes:
            return Label(0.0, plain, 0, (False,) * (end - first))
        if fixed > limit_bytes:
            return None
        fitting = (x for x in self.labels(first, end) if x.memory_bytes(in_flight, fixed) <= limit_bytes)
        return min(fitting, key=lambda x: (x.extra_s, x.memory_bytes(in_flight, fixed), x.recompute), default=None)

    def least_extra_s(self, first: int, end: int, in_flight: int, limit_bytes: int) -> float:
        """No choice that fits spends less time again than this; exact while no label was left out."""
        part = self.segments[first:end]
        if self.exact:
            fastest = self.fastest(first, end, in_flight, limit_bytes)
            return fastest.extra_s if fastest is not None else 0.0
        excess = self.fixed_bytes(first, end) + in_flight * sum(s.activations_bytes for s in part) - limit_bytes
        return least_recomputation_s(part, in_flight, excess)

    def least_bytes(self, first: int, end: int, in_flight: int) -> int:
        """The least memory any choice needs."""
        fixed = self.fixed_bytes(first, end)
        return min(x.memory_bytes(in_flight, fixed) for x in self.labels(first, end))


def pareto(labels: Sequence[Label]) -> list[Label]:
    """The labels no other beats or equals in all three figures, fastest first; of equals the first."""
    ordered = sorted(labels, key=lambda x: (x.extra_s, x.kept_bytes, x.again_bytes, x.recompute))
    kept: list[Label] = []
    for label in ordered:
        if not any(k.kept_bytes <= label.kept_bytes and k.again_bytes <= label.again_bytes for k in kept):
            kept.append(label)
    return kept


def least_memory(segments: Sequence[SegmentCost]) -> list[Label]:
    """For each size that the largest recomputed activations may have, the label that keeps least."""
    labels = [Label(0.0, sum(s.activations_bytes for s in segments), 0, (False,) * len(segments))]
    for most in sorted({s.activations_bytes for s in segments}):
        again = tuple(s.input_bytes < s.activations_bytes <= most for s in segments)
        pairs = list(zip(segments, again, strict=True))
        labels.append(
            Label(
                sum(s.forward_s for s, flag in pairs if flag),
                sum(s.input_bytes if flag else s.activations_bytes for s, flag in pairs),
                max((s.activations_bytes for s, flag in pairs if flag), default=0),
                again,
            )
        )
    return labels


def least_recomputation_s(segments: Sequence[SegmentCost], in_flight: int, excess_bytes: float) -> float:
    """Least forward time to run again so that ``excess_bytes`` are not kept, parts of segments allowed."""
    again_s = 0.0
    savers = [(s.forward_s, in_flight * (s.activations_bytes - s.input_bytes)) for s in segments]
    for forward_s, saved in sorted((x for x in savers if x[1] > 0), key=lambda x: x[0] / x[1]):
        if excess_bytes <= 0:
            break
        again_s += forward_s * min(1.0, excess_bytes / saved)
        excess_bytes -= saved
    return again_s
