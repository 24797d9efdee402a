"""The device mesh: how many devices along each axis, and who sits where.

Axes, outermost first: ``pp`` (pipeline stages), ``dp`` (shards of the batch), ``tp`` (shards of single operations).
Ranks count row by row, so the ranks of one ``tp`` group are neighbours:

    rank = (pp_index * dp + dp_index) * tp + tp_index

The text form names the axes of degree above one, ``pp2.dp2.tp2``; one device is ``single``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
# The micro-batches of a step, as an axis of time: not part of a mesh, no two of its members exist at once.
MICRO = "micro"


def deal(rows: int, parts: int) -> tuple[int, ...]:
    """``rows`` dealt into ``parts`` as evenly as can be, the longer parts first: 7 over 3 is (3, 2, 2)."""
    least, longer = divmod(rows, parts)
    return tuple(least + (i < longer) for i in range(parts))


def in_lowest_terms(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Shares in the same proportion with no common divisor: (4, 4) is (1, 1). Their sum divides every dim that is cut."""
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


@dataclass(frozen=True, order=True)
class Mesh:
    """Degrees of the three axes; each is at least 1."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh axis {axis} has degree {getattr(self, axis)}; it must be at least 1")

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    def degree(self, axis: str) -> int:
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        return {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}[axis]

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.degree(axis)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """The rank groups along ``axis``: together they hold every rank once."""
        stride, degree = self.stride(axis), self.degree(axis)
        for rank in range(self.size):
            if self.coordinate(rank, axis) == 0:
                yield tuple(rank + stride * i for i in range(degree))

    def __str__(self) -> str:
        parts = [f"{axis}{self.degree(axis)}" for axis in AXES if self.degree(axis) > 1]
        return ".".join(parts) or "single"

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read ``pp2.dp2.tp2`` (any order, each axis at most once) or ``single``."""
        if text == "single":
            return Mesh()
        degrees: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"(pp|dp|tp)([1-9]\d*)", part)
            if match is None or match[1] in degrees:
                raise ValueError(f"{text!r} is not a mesh; write for example dp4, pp2.dp2.tp2 or single")
            degrees[match[1]] = int(match[2])
        return Mesh(**degrees)
