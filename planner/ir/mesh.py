"""The device mesh: how many devices along each axis, and who sits where.

Axes: ``pp`` (pipeline stages), ``dp`` (shards of the batch), ``tp`` (shards of single operations). Their order says which
ranks are neighbours, and so which links an axis uses: ranks fill nodes in order, and count row by row,

    rank = sum of index * stride over the axes,     stride of an axis = product of the degrees of the axes behind it

so the ranks of a group of the last axis are neighbours. The usual order is pp, dp, tp. The text form names the axes of
degree above one in their order: ``pp2.dp2.tp2``, or ``dp2.pp2.tp2`` with the stages of a pipeline nearer to each other than
the shards of the batch. One device is ``single``.
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
    """Degrees of the three axes; each is at least 1.

    ``order``: the axes of degree above one, outermost first; by default as in AXES.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh axis {axis} has degree {getattr(self, axis)}; it must be at least 1")
        given = self.order or AXES
        order = tuple(axis for axis in given if self.degree(axis) > 1)
        if len(set(given)) != len(given) or any(self.degree(axis) > 1 and axis not in given for axis in AXES):
            raise ValueError(f"the order of a mesh names each of its axes once, not {'.'.join(given)}")
        object.__setattr__(self, "order", order)

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    def degree(self, axis: str) -> int:
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        inner = self.order[self.order.index(axis) + 1 :] if axis in self.order else ()
        return math.prod(self.degree(other) for other in inner)

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.degree(axis)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        return pp * self.stride("pp") + dp * self.stride("dp") + tp * self.stride("tp")

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """The rank groups along ``axis``: together they hold every rank once."""
        stride, degree = self.stride(axis), self.degree(axis)
        for rank in range(self.size):
            if self.coordinate(rank, axis) == 0:
                yield tuple(rank + stride * i for i in range(degree))

    def __str__(self) -> str:
        parts = [f"{axis}{self.degree(axis)}" for axis in self.order]
        return ".".join(parts) or "single"

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read ``pp2.dp2.tp2`` (outermost axis first, each at most once) or ``single``."""
        if text == "single":
            return Mesh()
        degrees: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"(pp|dp|tp)([1-9]\d*)", part)
            if match is None or match[1] in degrees:
                raise ValueError(f"{text!r} is not a mesh; write for example dp4, pp2.dp2.tp2 or single")
            degrees[match[1]] = int(match[2])
        return Mesh(**degrees, order=tuple(degrees))
