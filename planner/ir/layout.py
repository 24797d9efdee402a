"""The algebra of layouts on one mesh axis.

A *placement* says how one axis of k devices holds a tensor:

    R           replicated: every device holds the whole tensor
    P           partial: the tensor is the sum over the devices
    S(d,outer)  sharded: dim d is seen as (outer, k, rest) and cut in the middle; S(d) is S(d,1)

A *pair* is the placement of a value and of its gradient. Four pairs are used, and a bare value where no gradient flows:

    S(d,o):S(d,o)   R:R   P:R   R:P   and   R:-  P:-  S(d,o):-

One primitive, ``move(from, to)``, changes a placement:

    move    to R          to P            to S'
    R       none          keep (rank 0)   slice
    P       all_reduce    none            reduce_scatter
    S       all_gather    pad             none if equal, else all_to_all

A *conversion* f -> t of a pair is ``move(value f, value t)`` forward and ``move(gradient t, gradient f)`` backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True, order=True)
class Placement:
    """``kind`` is 'R', 'P' or 'S'; ``dim`` and ``outer`` only mean something for 'S'."""

    kind: str
    dim: int = -1
    outer: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer})"

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Placement:
        if text in ("R", "P"):
            return Placement(text)
        match = re.fullmatch(r"S\((\d+)(?:,(\d+))?\)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a placement; write R, P, S(1) or S(1,3)")
        return Placement("S", int(match[1]), int(match[2] or 1))

    def local_shape(self, shape: tuple[int, ...], k: int, share: int = 1) -> tuple[int, ...]:
        """The shape one of ``k`` devices holds; where shares differ, the one with ``share`` of ``k`` equal units.

        Raises ValueError when ``k`` does not divide.
        """
        if self.kind != "S":
            return shape
        size = shape[self.dim]
        if size % (self.outer * k):
            raise ValueError(f"dim {self.dim} of {shape} cannot be cut as {self} on {k} devices")
        return (*shape[: self.dim], size // k * share, *shape[self.dim + 1 :])


R = Placement("R")
P = Placement("P")


def S(dim: int, outer: int = 1) -> Placement:
    return Placement("S", dim, outer)


@dataclass(frozen=True)
class Pair:
    """Placement of a value and of its gradient (None where no gradient flows)."""

    value: Placement
    gradient: Placement | None

    @cached_property
    def _hash(self) -> int:
        placements = (self.value,) if self.gradient is None else (self.value, self.gradient)
        return hash(tuple((ord(p.kind), p.dim, p.outer) for p in placements))  # of numbers: the same in every process

    def __hash__(self) -> int:
        return self._hash  # pairs are keys of large tables

    def __str__(self) -> str:
        return f"{self.value}:{self.gradient if self.gradient is not None else '-'}"

    @property
    def is_shard(self) -> bool:
        return self.value.kind == "S"

    @lru_cache(maxsize=4096)  # noqa: B019 - few distinct pairs exist
    def without_gradient(self) -> Pair:
        return Pair(self.value, None)

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Pair:
        value, separator, gradient = text.rpartition(":")
        if not separator:
            raise ValueError(f"{text!r} is not a pair; write for example R:R, P:R, R:P, S(1):S(1) or R:-")
        return Pair(Placement.parse(value), None if gradient == "-" else Placement.parse(gradient))


WHOLE = Pair(R, R)
PARTIAL = Pair(P, R)
REPLICATED = Pair(R, P)


@lru_cache(maxsize=4096)
def shard(dim: int, outer: int = 1) -> Pair:
    return Pair(S(dim, outer), S(dim, outer))


def move(source: Placement, target: Placement) -> str:
    """The name of the primitive that turns ``source`` into ``target`` (see the table above)."""
    if source == target:
        return "none"
    return {
        ("R", "P"): "keep",
        ("R", "S"): "slice",
        ("P", "R"): "all_reduce",
        ("P", "S"): "reduce_scatter",
        ("S", "R"): "all_gather",
        ("S", "P"): "pad",
        ("S", "S"): "all_to_all",
    }[source.kind, target.kind]


COMMUNICATING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


@lru_cache(maxsize=65536)
def conversion(source: Pair, target: Pair) -> tuple[str, str]:
    """(forward move, backward move) of ``source -> target``; the backward move is 'none' where no gradient flows."""
    forward = move(source.value, target.value)
    if source.gradient is None or target.gradient is None:
        return forward, "none"
    return forward, move(target.gradient, source.gradient)
