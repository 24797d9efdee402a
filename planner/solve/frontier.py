"""Which segments of a stage to recompute: the frontier of time against memory over one interval of the chain.

A label says what one choice costs an interval: (extra seconds, bytes kept of a micro-batch, largest recomputed activations).
Labels of [i, j+1) are those of [i, j) extended by keeping or recomputing segment j; a label that is nowhere better than
another is dropped. Equal segments give equal labels, so n of them leave n + 1, not 2^n.

Memory of a label with f micro-batches in flight (planner.segment_cost.stage_estimate):

    states + f * kept + max temporary + again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.segment_cost import SegmentCost

# More labels than this are thinned out; the answer is then good but not proven (``Frontier.exact``).
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
            self._labels[key] = self._extend(self.labels(first, end - 1), self.segments[end - 1])
        return self._labels[key]

    def _extend(self, labels: tuple[Label, ...], segment: SegmentCost) -> tuple[Label, ...]:
        grown = [
            Label(x.extra_s, x.kept_bytes + segment.activations_bytes, x.again_bytes, (*x.recompute, False)) for x in labels
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
        kept = pareto(grown)
        if len(kept) > MOST_LABELS:
            self.exact = False
            step = len(kept) / MOST_LABELS
            kept = [kept[int(i * step)] for i in range(MOST_LABELS - 1)] + [kept[-1]]
        return tuple(kept)

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
