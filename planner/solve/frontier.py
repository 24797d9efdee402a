"""What to recompute of the segments of a stage: the frontier of time against memory over one interval of the chain.

A label says what one choice costs an interval: (extra seconds, bytes kept of a micro-batch, most bytes held besides while a
segment runs). Labels grow segment by segment, each with every way to run it (planner.segment_cost.Recomputation); a
label that is nowhere better than another is dropped. Which of equal segments are recomputed does not matter, only how many,
so labels belong to the numbers of segments of each kind: n equal segments with w ways have at most n^(w - 1) labels, and the
intervals of a chain share them.

Memory of a label with f micro-batches in flight (planner.segment_cost.stage_estimate):

    states + f * kept + temporary

Where there are too many labels some are left out. What fits is then still known exactly, because the labels of least memory
stay (``least_memory``), and the extra time has a lower bound (``least_extra_s``): the fractional knapsack that recomputes
parts of segments, cheapest by the byte first, and holds nothing while it does (``least_recomputation_s``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from planner.ir.plan import RECOMPUTATIONS
from planner.segment_cost import SegmentCost

# More labels than this are thinned out; the fastest one that fits may then be missing (``Frontier.exact``).
MOST_LABELS = 1000


@dataclass(frozen=True)
class Label:
    """``extra_s``: time spent on recomputation. ``recompute``: one word a segment of the interval."""

    extra_s: float
    kept_bytes: int
    temporary_bytes: int
    recompute: tuple[str, ...]

    def memory_bytes(self, in_flight: int, fixed_bytes: int) -> int:
        return fixed_bytes + in_flight * self.kept_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True, order=True)
class _Mix:
    """The figures of a label; ``before`` and the last segment's ``kind`` and ``word`` say what it is made of."""

    extra_s: float
    kept_bytes: int
    temporary_bytes: int
    before: _Mix | None = field(default=None, compare=False)
    kind: int = field(default=0, compare=False)
    word: str = field(default="", compare=False)


_FIGURES = attrgetter("extra_s", "kept_bytes", "temporary_bytes")


class Frontier:
    """Labels of every interval, made when asked for."""

    def __init__(self, segments: Sequence[SegmentCost]) -> None:
        self.segments = segments
        self.exact = True
        numbers: dict[SegmentCost, int] = {}
        self._kinds = [numbers.setdefault(segment, len(numbers)) for segment in segments]
        self._of_kind = list(numbers)
        self._mixes: dict[tuple[tuple[int, int], ...], list[_Mix]] = {(): [_Mix(0.0, 0, 0)]}
        self._states = [0]
        self._plain = [0]
        self._least = [0]
        self._temporary: list[int] = []  # where least is kept
        self._least_temporary: list[int] = []
        for segment in segments:
            self._states.append(self._states[-1] + segment.states_bytes)
            self._plain.append(self._plain[-1] + segment.activations_bytes)
            ways = segment.recomputations.values()
            kept, temporary = min((way.kept_bytes, way.temporary_bytes) for way in ways)
            self._least.append(self._least[-1] + kept)
            self._temporary.append(temporary)
            self._least_temporary.append(min(way.temporary_bytes for way in ways))

    def fixed_bytes(self, first: int, end: int) -> int:
        """Bytes that do not depend on what is recomputed: the states."""
        return self._states[end] - self._states[first]

    def labels(self, first: int, end: int) -> tuple[Label, ...]:
        """The frontier of segments ``first`` up to ``end``, fastest first."""
        return tuple(self._label(mix, first, end) for mix in self._frontier(first, end))

    def may_fit(self, first: int, end: int, in_flight: int, limit_bytes: int) -> bool | None:
        """Whether some choice fits; None where only its labels tell. Without them: where each segment keeps least."""
        least = self.fixed_bytes(first, end) + in_flight * (self._least[end] - self._least[first])
        if least + max(self._least_temporary[first:end]) > limit_bytes:
            return False
        return True if least + max(self._temporary[first:end]) <= limit_bytes else None

    def fastest(self, first: int, end: int, in_flight: int, limit_bytes: int) -> Label | None:
        """The fastest label that fits; among equals the one that holds least. None when none fits."""
        fixed = self.fixed_bytes(first, end)
        plain = self._plain[end] - self._plain[first]
        temporary = max(segment.temporary_bytes for segment in self.segments[first:end])
        if fixed + in_flight * plain + temporary <= limit_bytes:
            return Label(0.0, plain, temporary, ("none",) * (end - first))
        if self.may_fit(first, end, in_flight, limit_bytes) is False:
            return None
        room = limit_bytes - fixed
        best: _Mix | None = None
        for mix in self._frontier(first, end):
            if best is not None and mix.extra_s > best.extra_s:
                break
            size = in_flight * mix.kept_bytes + mix.temporary_bytes
            if size <= room and (best is None or size < in_flight * best.kept_bytes + best.temporary_bytes):
                best = mix
        return None if best is None else self._label(best, first, end)

    def least_extra_s(self, first: int, end: int, in_flight: int, limit_bytes: int) -> float:
        """No choice that fits spends less time again than this; exact while no label was left out."""
        part = self.segments[first:end]
        if self.exact:
            fastest = self.fastest(first, end, in_flight, limit_bytes)
            return fastest.extra_s if fastest is not None else 0.0
        excess = self.fixed_bytes(first, end) + in_flight * (self._plain[end] - self._plain[first]) - limit_bytes
        excess += max(self._least_temporary[first:end])
        return least_recomputation_s(part, (in_flight,) * len(part), excess)

    def least_bytes(self, first: int, end: int, in_flight: int) -> int:
        """The least memory any choice needs."""
        mixes = self._frontier(first, end)
        return self.fixed_bytes(first, end) + min(in_flight * x.kept_bytes + x.temporary_bytes for x in mixes)

    def _frontier(self, first: int, end: int) -> list[_Mix]:
        counts: dict[int, int] = {}
        for kind in self._kinds[first:end]:
            counts[kind] = counts.get(kind, 0) + 1
        return self._grown(tuple(sorted(counts.items())))

    def _grown(self, counts: tuple[tuple[int, int], ...]) -> list[_Mix]:
        """The frontier of so many segments of each kind: (kind, number), ascending."""
        missing = []
        while counts not in self._mixes:
            missing.append(counts)
            kind, number = counts[-1]
            counts = (*counts[:-1], (kind, number - 1)) if number > 1 else counts[:-1]
        for wanted in reversed(missing):
            mixes = self._extended(self._mixes[counts], wanted[-1][0])
            if len(mixes) > MOST_LABELS:
                self.exact = False
                step = len(mixes) / MOST_LABELS
                thin = [mixes[int(i * step)] for i in range(MOST_LABELS)]
                mixes = pareto([*thin, *self._least_memory(wanted)])
            self._mixes[wanted] = mixes
            counts = wanted
        return self._mixes[counts]

    def _extended(self, mixes: Sequence[_Mix], kind: int) -> list[_Mix]:
        return pareto(
            _Mix(
                x.extra_s + way.extra_s,
                x.kept_bytes + way.kept_bytes,
                max(x.temporary_bytes, way.temporary_bytes),
                x,
                kind,
                word,
            )
            for word, way in self._of_kind[kind].recomputations.items()
            for x in mixes
        )

    def _least_memory(self, counts: Sequence[tuple[int, int]]) -> list[_Mix]:
        """For each size that the largest temporary bytes may have, the mix that keeps least."""
        kinds = [(kind, number, self._of_kind[kind]) for kind, number in counts]
        found = []
        sizes = [{way.temporary_bytes for way in segment.recomputations.values()} for *_, segment in kinds]
        least = max(map(min, sizes))
        for most in sorted(size for size in set().union(*sizes) if size >= least):
            mix = _Mix(0.0, 0, 0)
            for kind, number, segment in kinds:
                allowed = [(w, word) for word, w in segment.recomputations.items() if w.temporary_bytes <= most]
                way, word = min(allowed, key=lambda x: (x[0].kept_bytes, x[0].extra_s))
                for _ in range(number):
                    extra_s, kept = mix.extra_s + way.extra_s, mix.kept_bytes + way.kept_bytes
                    mix = _Mix(extra_s, kept, max(mix.temporary_bytes, way.temporary_bytes), mix, kind, word)
            found.append(mix)
        return found

    def _label(self, mix: _Mix, first: int, end: int) -> Label:
        """Of equal segments those run again come last, in full behind selectively."""
        words: dict[int, list[str]] = {}
        at: _Mix | None = mix
        while at is not None and at.word:
            words.setdefault(at.kind, []).append(at.word)
            at = at.before
        ordered = {kind: iter(sorted(chosen, key=RECOMPUTATIONS.index)) for kind, chosen in words.items()}
        recompute = tuple(next(ordered[kind]) for kind in self._kinds[first:end])
        return Label(mix.extra_s, mix.kept_bytes, mix.temporary_bytes, recompute)


def pareto(mixes: Iterable[_Mix]) -> list[_Mix]:
    """The mixes no other beats or equals in all three figures, fastest first; of equals the first."""
    kept: list[_Mix] = []
    # Of those kept: again bytes, ascending, and the least that a mix with no more of them keeps, descending.
    agains: list[int] = []
    leasts: list[int] = []
    for mix in sorted(mixes, key=_FIGURES):
        place = bisect_right(agains, mix.temporary_bytes)
        if place and leasts[place - 1] <= mix.kept_bytes:
            continue
        kept.append(mix)
        start = bisect_left(agains, mix.temporary_bytes)
        stop = start
        while stop < len(leasts) and leasts[stop] >= mix.kept_bytes:
            stop += 1
        agains[start:stop], leasts[start:stop] = [mix.temporary_bytes], [mix.kept_bytes]
    return kept


def least_recomputation_s(segments: Sequence[SegmentCost], in_flight: Sequence[float], excess_bytes: float) -> float:
    """Least time of recomputation so that ``excess_bytes`` are not kept, parts of segments allowed. ``in_flight``: how many
    micro-batches are held of each segment.

    The linear relaxation of the multiple-choice knapsack: each segment gives the steps of the convex hull of its ways, by
    (bytes saved, seconds), and the steps are taken in order of seconds a byte (Sinha, Zoltners 1979).
    """
    if excess_bytes <= 0:
        return 0.0
    steps = sorted(
        (
            (extra_s / (held * saved), extra_s, held * saved)
            for segment, held in zip(segments, in_flight, strict=True)
            for saved, extra_s in hull_steps(segment)
        ),
        key=lambda step: step[0],
    )
    again_s = 0.0
    for _, extra_s, saved in steps:
        if excess_bytes <= 0:
            break
        again_s += extra_s * min(1.0, excess_bytes / saved)
        excess_bytes -= saved
    return again_s


@lru_cache(maxsize=4096)
def hull_steps(segment: SegmentCost) -> tuple[tuple[int, float], ...]:
    """(bytes saved of a micro-batch, seconds) from each way on the convex hull to the next, cheapest by the byte first."""
    ways = [(segment.activations_bytes - way.kept_bytes, way.extra_s) for way in segment.recomputations.values()]
    at = (0, 0.0)
    steps: list[tuple[int, float]] = []
    while True:
        beyond = [way for way in ways if way[0] > at[0]]
        if not beyond:
            return tuple(steps)
        following = min(beyond, key=lambda way: ((way[1] - at[1]) / (way[0] - at[0]), -way[0]))
        steps.append((following[0] - at[0], max(0.0, following[1] - at[1])))
        at = following
