"""Times measured on one machine, as data: operators at the shapes a model has, collectives by size, the optimizer's step.

    MeasuredTables     the tables; JSON as text
    operator_price     what a call takes by the tables, and how that came about

The price of an operator call, forward and backward apart:

    measured    the time of this very call (operator, shapes, dtypes, operands with gradients, arguments that matter)
    scaled      f(c) = f'(c') model(c) / model(c')     c': the measured call of the same operator nearest in shape
    modelled    the cost model's (costmodels.compute): no call of the operator was measured

A collective's time is read off its measured times, linearly in the size; beyond the largest by the slope of the last two.
The optimizer's step takes ``tensor_s`` a tensor and ``byte_s`` a byte of it.

Measured times are no roofline: a call cut in two may take less than half as long, since its halves fit a cache. Lower bounds
that price the whole to bound its parts need prices that hold for the parts as well: ``bounding`` tables give every call the
least ratio of measured to modelled time of its operator, and every collective the best rate measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from costmodels.compute import NO_TIME, OperatorTime, operator_time_s
from costmodels.hardware import Device
from costmodels.operators import Hint, Tensor, base_name

FORMAT = 1
MEASURED, SCALED, MODELLED, FREE = "measured", "scaled", "modelled", "free"


class MeasuredError(ValueError):
    """Tables that cannot be read; the message says what, where and what to do."""


class OperatorCall(NamedTuple):
    """What costmodels.compute.operator_time_s is asked: a call, its tensors as one device holds them."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    hint: Hint = ()

    @property
    def kind(self) -> tuple[str, str, int]:
        """Calls of one kind scale to one another."""
        return base_name(self.op), self.inputs[0][1] if self.inputs else "", len(self.inputs)


@dataclass(frozen=True)
class MeasuredOperator:
    """Seconds of one call, and of its backward (0 where no operand needs a gradient)."""

    call: OperatorCall
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredCollective:
    """Seconds of a collective of ``size_bytes`` (costmodels.collectives) on all groups of ``ranks`` over ``nodes`` at once."""

    kind: str
    ranks: int
    nodes: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredUpdate:
    """A step of ``optimizer``: seconds a tensor, and a byte of parameters. ``sharded``: of weights that ZeRO cuts."""

    optimizer: str
    sharded: bool
    tensor_s: float
    byte_s: float


@dataclass(frozen=True)
class Corrections:
    """What measured and modelled times are multiplied with, from real runs; ``runs``: how many are behind it."""

    forward: float = 1.0
    backward: float = 1.0
    communication: float = 1.0
    update: float = 1.0
    runs: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "communication", "update"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise MeasuredError(f"correction {name} is {getattr(self, name)}; it must be a finite number above 0")


@dataclass(frozen=True, eq=False)
class MeasuredTables:
    """``device``, ``software``, ``ranks`` and ``threads`` (of each rank): what the times were measured on and with."""

    device: str
    software: str
    ranks: int
    threads: int
    operators: tuple[MeasuredOperator, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    updates: tuple[MeasuredUpdate, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    bounding: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeasuredTables) and (self is other or self._content == other._content)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _content(self) -> tuple[object, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.device, self.ranks, len(self.operators), len(self.collectives), self.bounding, self.corrections)
        )

    # --- text ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text form; ``MeasuredTables.parse`` reads it back to equal tables."""
        head: dict[str, Any] = {"format": FORMAT, "device": self.device, "software": self.software}
        head |= {"ranks": self.ranks, "threads": self.threads, "corrections": asdict(self.corrections)}
        rows = {
            "operators": [
                {**o.call._asdict(), "hint": dict(o.call.hint), "forward_s": o.forward_s, "backward_s": o.backward_s}
                for o in self.operators
            ],
            "collectives": [asdict(c) for c in self.collectives],
            "updates": [asdict(u) for u in self.updates],
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for key, table in rows.items():
            inside = ",\n".join(f"  {json.dumps(row)}" for row in table)
            lines.append(f" {json.dumps(key)}: [\n{inside}\n ]" if table else f" {json.dumps(key)}: []")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def parse(text: str, source: str = "tables") -> MeasuredTables:
        """Read the text form. Raises MeasuredError naming ``source`` and what is wrong in it."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise MeasuredError(f"{source} is not valid JSON: {error}. Measure again.") from None
        try:
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise MeasuredError(f"it is not of format {FORMAT}")
            return MeasuredTables(
                _typed(data, "device", str),
                _typed(data, "software", str),
                _typed(data, "ranks", int),
                _typed(data, "threads", int),
                tuple(_operator(row, f"operators[{i}]") for i, row in enumerate(_typed(data, "operators", list))),
                _rows(MeasuredCollective, data, "collectives"),
                _rows(MeasuredUpdate, data, "updates"),
                _row(Corrections, data.get("corrections", {}), "corrections"),
            )
        except MeasuredError as error:
            raise MeasuredError(f"{source}: {error}. Measure again.") from None

    # --- adding -------------------------------------------------------------------------------------------------------

    def with_operators(self, found: Iterable[MeasuredOperator]) -> MeasuredTables:
        """These tables with ``found`` in place of what they had for the same calls."""
        table = {o.call: o for o in self.operators} | {o.call: o for o in found}
        return replace(self, operators=tuple(table.values()))

    def with_collectives(self, found: Iterable[MeasuredCollective]) -> MeasuredTables:
        def key(c: MeasuredCollective) -> tuple[object, ...]:
            return c.kind, c.ranks, c.nodes, c.size_bytes

        table = {key(c): c for c in self.collectives} | {key(c): c for c in found}
        return replace(self, collectives=tuple(table.values()))

    def with_updates(self, found: Iterable[MeasuredUpdate]) -> MeasuredTables:
        table = {(u.optimizer, u.sharded): u for u in (*self.updates, *found)}
        return replace(self, updates=tuple(table.values()))

    def scaled(self, operators: float = 1.0, messages: float = 1.0) -> MeasuredTables:
        """All times of operators (and updates), and of messages, multiplied: another machine's, as a guess."""
        old = self.corrections
        corrections = replace(
            old,
            forward=old.forward * operators,
            backward=old.backward * operators,
            update=old.update * operators,
            communication=old.communication * messages,
        )
        return replace(self, corrections=corrections)

    def bounding_below(self) -> MeasuredTables:
        """Tables by which no part of a call costs less than its share of the call's price."""
        return replace(self, bounding=True)

    # --- reading ------------------------------------------------------------------------------------------------------

    @cached_property
    def of_calls(self) -> Mapping[OperatorCall, MeasuredOperator]:
        return {o.call: o for o in self.operators}

    @cached_property
    def of_kinds(self) -> Mapping[tuple[str, str, int], tuple[MeasuredOperator, ...]]:
        found: dict[tuple[str, str, int], list[MeasuredOperator]] = {}
        for o in self.operators:
            found.setdefault(o.call.kind, []).append(o)
        return {kind: tuple(rows) for kind, rows in found.items()}

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, int], tuple[tuple[int, float], ...]]:
        """By kind, ranks and nodes: (size, seconds) by size; a message takes no longer than a larger one did."""
        found: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for c in sorted(self.collectives, key=lambda c: -c.size_bytes):
            curve = found.setdefault((c.kind, c.ranks, c.nodes), [])
            curve.append((c.size_bytes, min(c.seconds, curve[-1][1] if curve else math.inf)))
        return {key: tuple(reversed(curve)) for key, curve in found.items()}

    def collective_s(self, kind: str, size_bytes: float, ranks: int, nodes: int) -> float | None:
        """Seconds of a collective; None where its kind was not measured among so many ranks."""
        curve = self._curves.get((kind, ranks, nodes))
        if not curve:
            return None
        if self.bounding:
            seconds = size_bytes * min(s / size for size, s in curve if size)
            return min(seconds, _interpolated(curve, size_bytes)) * self.corrections.communication
        return _interpolated(curve, size_bytes) * self.corrections.communication

    def update_s(self, optimizer: str, size_bytes: float, tensors: int, sharded: bool) -> float | None:
        """Seconds to update ``tensors`` of ``size_bytes`` together; None where that was not measured."""
        for u in self.updates:
            if (u.optimizer, u.sharded) == (optimizer, sharded):
                return (tensors * u.tensor_s + size_bytes * u.byte_s) * self.corrections.update
        return None


def _interpolated(curve: tuple[tuple[int, float], ...], size: float) -> float:
    """Seconds at ``size``; below the smallest those of the smallest, and of a single point beyond it in proportion."""
    smallest, at_smallest = curve[0]
    if size <= smallest:
        return at_smallest
    if len(curve) == 1:
        return at_smallest * size / max(smallest, 1)
    (a, at_a), (b, at_b) = next(
        ((low, high) for low, high in zip(curve, curve[1:], strict=False) if size <= high[0]), curve[-2:]
    )
    return at_a + (size - a) * (at_b - at_a) / (b - a)


@lru_cache(maxsize=65536)
def operator_price(call: OperatorCall, device: Device, tables: MeasuredTables | None) -> tuple[OperatorTime, str]:
    """The time of a call by ``tables`` (None: by the cost model), and how it came about: one of the words above, or 'free'."""
    modelled = operator_time_s(call.op, call.inputs, call.outputs, call.needs_grad, device, call.hint)
    if tables is None or modelled == NO_TIME:
        return modelled, FREE if modelled == NO_TIME else MODELLED
    alike = tables.of_kinds.get(call.kind, ())
    if tables.bounding:
        ratios = [_ratios(other, device) for other in alike]
        forward = min((f for f, _ in ratios), default=1.0)
        backward = min((b for _, b in ratios if b is not None), default=1.0)
        return _scaled(modelled, forward, backward, tables.corrections), SCALED if alike else MODELLED
    exact = tables.of_calls.get(call)
    if exact is not None:
        times = replace(modelled, forward_s=exact.forward_s, backward_s=exact.backward_s)
        return _scaled(times, 1.0, 1.0, tables.corrections), MEASURED
    if not alike:
        return _scaled(modelled, 1.0, 1.0, tables.corrections), MODELLED
    forward, _ = _ratios(min(alike, key=lambda other: _distance(call, other.call)), device)
    differentiated = [other for other in alike if other.backward_s > 0]
    nearest = min(differentiated, key=lambda other: _distance(call, other.call), default=None)
    behind = _ratios(nearest, device)[1] if nearest is not None else None
    return _scaled(modelled, forward, 1.0 if behind is None else behind, tables.corrections), SCALED


def _scaled(time: OperatorTime, forward: float, backward: float, corrections: Corrections) -> OperatorTime:
    return replace(
        time,
        forward_s=time.forward_s * forward * corrections.forward,
        backward_s=time.backward_s * backward * corrections.backward,
    )


def _ratios(measured: MeasuredOperator, device: Device) -> tuple[float, float | None]:
    """Measured over modelled time, forward and backward (None: no backward)."""
    call = measured.call
    time = operator_time_s(call.op, call.inputs, call.outputs, call.needs_grad, device, call.hint)
    forward = measured.forward_s / time.forward_s if time.forward_s > 0 else 1.0
    backward = measured.backward_s / time.backward_s if time.backward_s > 0 and measured.backward_s > 0 else None
    return forward, backward


def _distance(a: OperatorCall, b: OperatorCall) -> tuple[float, ...]:
    """How far two calls of a kind are apart: other operands with gradients count most, then sizes, by their logarithms."""
    total = 0.0
    for (shape, _), (other, _) in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=False):
        if len(shape) == len(other):
            total += sum(abs(math.log(max(m, 1) / max(n, 1))) for m, n in zip(shape, other, strict=True))
        else:
            total += 1.0 + abs(math.log(max(math.prod(shape), 1) / max(math.prod(other), 1)))
    return float(a.needs_grad != b.needs_grad), float(a.hint != b.hint), total


# --- parsing ----------------------------------------------------------------------------------------------------------


def _typed(data: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise MeasuredError(f"{where}{name} is {value!r}, not a {kind.__name__}")
    return value


def _seconds(data: Mapping[str, Any], name: str, where: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise MeasuredError(f"{where}{name} is {value!r}, not a finite number of seconds")
    return float(value)


def _rows(cls: Any, data: Mapping[str, Any], name: str) -> Any:
    return tuple(_row(cls, row, f"{name}[{i}]") for i, row in enumerate(_typed(data, name, list)))


def _row(cls: Any, row: Any, where: str) -> Any:
    """An instance of ``cls`` from a JSON object that has exactly its fields."""
    if not isinstance(row, dict) or (row and row.keys() != {f.name for f in fields(cls)}):
        raise MeasuredError(f"{where} is {row!r}; its fields are {', '.join(f.name for f in fields(cls))}")
    types: Mapping[Any, type] = {"str": str, "int": int, "bool": bool}
    return cls(**{
        f.name: _seconds(row, f.name, f"{where}.") if f.type == "float" else _typed(row, f.name, types[f.type], f"{where}.")
        for f in fields(cls)
        if row
    })  # fmt: skip


def _operator(row: Any, where: str) -> MeasuredOperator:
    if not isinstance(row, dict):
        raise MeasuredError(f"{where} is {row!r}, not an object")
    dot = f"{where}."
    try:
        tensors = [
            tuple((tuple(map(int, shape)), str(dtype)) for shape, dtype in row[k]) for k in ("inputs", "outputs")
        ]
        hint = tuple((str(key), _frozen(value)) for key, value in row["hint"].items())
        needs = tuple(map(bool, row["needs_grad"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeasuredError(f"{where} is no operator call ({type(error).__name__}: {error})") from None
    call = OperatorCall(_typed(row, "op", str, dot), tensors[0], tensors[1], needs, hint)
    return MeasuredOperator(call, _seconds(row, "forward_s", dot), _seconds(row, "backward_s", dot))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
