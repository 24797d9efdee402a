"""Sharding rules found by execution, for operators nobody wrote one for.

    with_discovered_rules(graph)    the graph, its operators without a rule given the notation that was found for them
    discover_rule(node, values)     that notation, or '' where no dim can be cut

A letter is proposed for dims of one size, at most one of each operand, those of the batch (dim 0 of all) first. It is kept
when the operator run on shards gives, joined, what it gives on the whole: values, and gradients for a random gradient of the
results (joined for an operand that is cut, summed for one that is not), for random inputs and even and uneven shards, in
every trial. Of two axes each may cut a letter, so a letter is tried again on shards of the letters found before it.

Operators that draw random numbers, write into their arguments, or return more than tensors run whole. Large tensors are
tried at smaller sizes. What was found is kept in the user's cache folder by operator, constants, shapes and version of torch,
and tried once more when it is read: a library may have changed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from planner.ir.graph import MODULE, Argument, Graph, Node, Ref, Symbol, Value
from planner.sharding_rules import has_rule

TRIALS = 3
MOST_CANDIDATES = 200
# Larger tensors are tried with smaller dims.
MOST_ELEMENTS = 1 << 16
LETTERS = "btchwdefgklmnopqrsuvxyz"
VERSION = 1

Place = tuple[int | None, ...]
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Letter:
    """The dim of each operand, and of each result, that holds a letter (None: it does not hold it)."""

    operands: Place
    results: tuple[int, ...]


def with_discovered_rules(graph: Graph, cache_dir: Path | None = None) -> Graph:
    """``graph`` with a rule for each operator that has none and gets one, told in its notes.

    ``cache_dir``: where findings are kept; default ``meshwright`` in $XDG_CACHE_HOME or ~/.cache.
    """
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    file = folder / f"rules-{VERSION}.json"
    known = _read(file)
    before = dict(known)
    tried: set[str] = set()
    nodes, notes = [], []
    for node in graph.nodes:
        if not has_rule(node) and not node.rule and (operator := _Operator.of(node, graph.values)) is not None:
            key = _key(node, graph.values)
            if key not in tried and (key not in known or not _still_holds(operator, known[key])):
                known[key] = _discovered(operator)
            tried.add(key)
            if known[key]:
                node = replace(node, rule=known[key])
                notes.append(f"rule found by execution for {node.base}: {known[key]}")
        nodes.append(node)
    if known != before:
        _write(file, known)
    return replace(graph, nodes=tuple(nodes), notes=tuple(dict.fromkeys((*graph.notes, *notes))))


def discover_rule(node: Node, values: Mapping[str, Value]) -> str:
    """The notation of a rule for ``node`` (planner.sharding_rules.rule), '' when none was found."""
    operator = _Operator.of(node, values)
    return "" if operator is None else _discovered(operator)


# --- the operator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operator:
    """A call as a function of its operands. ``values``: operands, ``results``: its results, at the sizes that are tried."""

    call: Callable[[Tensors], Tensors]
    values: tuple[Value, ...]
    results: tuple[Value, ...]

    @staticmethod
    def of(node: Node, values: Mapping[str, Value]) -> _Operator | None:
        function = _function(node)
        if function is None or not node.operands:
            return None

        def call(operands: Tensors) -> Tensors:
            given = iter(operands)
            args = [_resolved(argument, given) for argument in node.args]
            kwargs = {key: _resolved(value, given) for key, value in node.kwargs}
            results = function(*args, **kwargs)
            return list(results) if isinstance(results, tuple | list) else [results]

        operands = tuple(values[name] for name in node.operands)
        if max(v.numel for v in (*operands, *node.outputs)) <= MOST_ELEMENTS:
            return _Operator(call, operands, node.outputs)
        smaller = _smaller((*operands, *node.outputs))
        made = _Operator(call, smaller[: len(operands)], smaller[len(operands) :])
        return made if made.run(made.inputs(0)) is not None else None

    def inputs(self, seed: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Tensors:
        """Random operands; integers are valid as an index into any dim."""
        generator = torch.Generator().manual_seed(seed)
        shapes = shapes or [value.shape for value in self.values]
        smallest = min((size for shape in shapes for size in shape if size > 1), default=1)
        found = []
        for value, shape in zip(self.values, shapes, strict=True):
            dtype = getattr(torch, value.dtype)
            if dtype == torch.bool:
                found.append(torch.rand(shape, generator=generator) < 0.5)
            elif dtype.is_floating_point:
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                found.append(x.to(torch.float64 if value.dtype == "float64" else torch.float32))
            elif dtype.is_complex:
                found.append(torch.randn(shape, generator=generator, dtype=dtype))
            else:
                found.append(torch.randint(0, max(smallest // 2, 1), shape, generator=generator, dtype=dtype))
        return found

    def run(self, operands: Tensors) -> Tensors | None:
        """Its results; None where it does not run, or returns other than tensors of the ranks it should."""
        try:
            results = self.call(operands)
        except Exception:
            return None
        right = len(results) == len(self.results) and all(
            isinstance(x, torch.Tensor) and x.dim() == len(value.shape)
            for x, value in zip(results, self.results, strict=True)
        )
        return results if right else None

    def run_both_ways(self, operands: Tensors, gradients: Tensors | None) -> tuple[Tensors, Tensors] | None:
        """(results, gradients of the operands that have one). ``gradients``: of the results that can have one."""
        leaves = [x.detach().clone() for x in operands]
        wanted = [x.requires_grad_() for x, value in zip(leaves, self.values, strict=True) if value.differentiable]
        results = self.run(leaves)
        if results is None:
            return None
        if not wanted or gradients is None:
            return results, []
        pairs = [(x, g) for x, g in zip(results, gradients, strict=True) if x.requires_grad]
        if not pairs:
            return results, [torch.zeros_like(x) for x in wanted]
        try:
            found = torch.autograd.grad(
                [x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, materialize_grads=True
            )
        except Exception:
            return None
        return [x.detach() for x in results], list(found)


def _function(node: Node) -> Any:
    """The torch operator behind a node; None where it cannot be tried."""
    packet, _, rest = node.op.partition(".")
    name, _, overload = rest.partition(".")
    if node.op == MODULE or node.is_random or not overload:
        return None
    function = getattr(getattr(getattr(torch.ops, packet, None), name, None), overload, None)
    if not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    returned = [str(result.type) for result in function._schema.returns]
    return function if all("Tensor" in kind for kind in returned) else None


def _resolved(argument: Argument, operands: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(operands)
    if isinstance(argument, Symbol):
        return (
            torch.device("cpu") if argument.name == "device" else getattr(torch, argument.name.removeprefix("torch."))
        )
    if isinstance(argument, tuple):
        return [_resolved(item, operands) for item in argument]
    return argument


def _smaller(values: Sequence[Value]) -> tuple[Value, ...]:
    """The values with large dims made small: equal ones equally, others differently."""
    sizes = sorted({size for value in values for size in value.shape if size > 12})
    small = {size: 6 + 2 * i if i < 4 else size for i, size in enumerate(sizes)}
    return tuple(replace(v, shape=tuple(small.get(size, size) for size in v.shape)) for v in values)


# --- finding letters --------------------------------------------------------------------------------------------------


def _discovered(operator: _Operator) -> str:
    found: list[Letter] = []
    for operands in itertools.islice(_candidates(operator), MOST_CANDIDATES):
        if any(_overlaps(operands, letter.operands) for letter in found):
            continue
        results = _result_dims(operator, operands)
        if results is None or any(_overlaps(results, letter.results) for letter in found):
            continue
        letter = Letter(operands, results)
        if all(_holds(operator, letter, seed, found) for seed in range(TRIALS)):
            found.append(letter)
        if len(found) == len(LETTERS):
            break
    return _notation(operator, found) if found else ""


def _candidates(operator: _Operator) -> Iterator[Place]:
    """Dims of one size, one of each operand or none; leading dims first, then few operands without the letter."""
    found: set[Place] = set()
    for size in sorted({size for value in operator.values for size in value.shape if size > 1}):
        options = [(*(d for d, s in enumerate(v.shape) if s == size), None) for v in operator.values]
        found.update(p for p in itertools.islice(itertools.product(*options), 4096) if any(d is not None for d in p))

    def order(place: Place) -> tuple[int, int, int, list[int]]:
        first = next(i for i, d in enumerate(place) if d is not None)
        return place[first] or 0, first, sum(d is None for d in place), [-1 if d is None else d for d in place]

    yield from sorted(found, key=order)


def _overlaps(a: Place, b: Place) -> bool:
    return any(x is not None and x == y for x, y in zip(a, b, strict=True))


def _result_dims(operator: _Operator, operands: Place) -> tuple[int, ...] | None:
    """The dim of each result that shrinks with the operands; None unless every result has just one."""
    whole = operator.inputs(0)
    size = next(x.shape[d] for x, d in zip(whole, operands, strict=True) if d is not None)
    before, after = operator.run(whole), operator.run(_part(whole, operands, 0, size - 1))
    if before is None or after is None:
        return None
    dims: list[int] = []
    for x, y in zip(before, after, strict=True):
        changed = [d for d in range(x.dim()) if x.shape[d] != y.shape[d]]
        if len(changed) != 1 or (x.shape[changed[0]], y.shape[changed[0]]) != (size, size - 1):
            return None
        dims.append(changed[0])
    return tuple(dims)


def _part(tensors: Tensors, dims: Place, first: int, length: int) -> Tensors:
    return [x if d is None else x.narrow(d, first, length) for x, d in zip(tensors, dims, strict=True)]


def _holds(operator: _Operator, letter: Letter, seed: int, others: Sequence[Letter]) -> bool:
    """Whether shards give what the whole gives: for the shapes at hand and for those of a shard of the other letters."""
    shapes = [[list(value.shape) for value in operator.values]]
    for other in others:
        cut = [list(shape) for shape in shapes[0]]
        for shape, d in zip(cut, other.operands, strict=True):
            if d is not None:
                shape[d] = -(-shape[d] // 2)
        shapes.append(cut)
    return all(
        _shards_agree(operator, letter, operator.inputs(seed, [tuple(shape) for shape in each]), seed)
        for each in shapes
    )


def _shards_agree(operator: _Operator, letter: Letter, operands: Tensors, seed: int) -> bool:
    results = operator.run(operands)
    if results is None:
        return False
    generator = torch.Generator().manual_seed(seed + 1000)
    gradients = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) if x.is_floating_point() else x
        for x in results
    ]
    differentiable = any(value.differentiable for value in operator.values)
    whole = operator.run_both_ways(operands, gradients if differentiable else None)
    if whole is None:
        return False
    size = next(x.shape[d] for x, d in zip(operands, letter.operands, strict=True) if d is not None)
    cut = [d for d, value in zip(letter.operands, operator.values, strict=True) if value.differentiable]
    for lengths in _cuts(size):
        parts = []
        for first, length in zip(itertools.accumulate((0, *lengths)), lengths, strict=False):
            share = operator.run_both_ways(
                _part(operands, letter.operands, first, length),
                _part(gradients, letter.results, first, length) if differentiable else None,
            )
            if share is None:
                return False
            parts.append(share)
        values = [
            torch.cat(x, d) for x, d in zip(zip(*(p[0] for p in parts), strict=True), letter.results, strict=True)
        ]
        back = [
            torch.stack(x).sum(0) if d is None else torch.cat(x, d)
            for x, d in zip(zip(*(p[1] for p in parts), strict=True), cut, strict=False)
        ]
        if not _equal(values, whole[0]) or not _equal(back, whole[1]):
            return False
    return True


def _cuts(size: int) -> list[tuple[int, ...]]:
    """Lengths of shards: halves, one row and the rest, three parts."""
    found: set[tuple[int, ...]] = {(size // 2, size - size // 2), (1, size - 1)}
    if size > 2:
        found.add((size - 2 * (size // 3), size // 3, size // 3))
    return sorted(found)


def _equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    if len(found) != len(expected):
        return False
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not (x.is_floating_point() or x.is_complex()):
            if not torch.equal(x, y):
                return False
            continue
        tolerance = 1e-9 if x.dtype in (torch.float64, torch.complex128) else 1e-4
        scale = float(y.abs().nan_to_num().max()) if y.numel() else 0.0
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True):
            return False
    return True


def _notation(operator: _Operator, letters: Sequence[Letter]) -> str:
    def text(value: Value, dims: Sequence[int | None]) -> str:
        named = {d: name for name, d in zip(LETTERS, dims, strict=False) if d is not None}
        return " ".join(named.get(d, "_") for d in range(len(value.shape)))

    left = ", ".join(text(v, [x.operands[i] for x in letters]) for i, v in enumerate(operator.values))
    right = ", ".join(text(v, [x.results[i] for x in letters]) for i, v in enumerate(operator.results))
    return f"{left} -> {right}"


# --- what was found before --------------------------------------------------------------------------------------------


def _still_holds(operator: _Operator, notation: str) -> bool:
    if not notation:
        return True
    left, _, right = notation.partition(" -> ")
    sides = [[part.split() for part in side.split(",")] for side in (left, right)]
    names = sorted({token for side in sides for part in side for token in part} - {"_"})
    letters = []
    for name in names:
        operands = tuple(p.index(name) if name in p else None for p in sides[0])
        results = tuple(p.index(name) for p in sides[1] if name in p)
        if len(operands) != len(operator.values) or len(results) != len(operator.results):
            return False
        letters.append(Letter(operands, results))
    return all(_result_dims(operator, x.operands) == x.results and _holds(operator, x, 99, ()) for x in letters)


def _key(node: Node, values: Mapping[str, Value]) -> str:
    """What a finding depends on: not the names of tensors."""
    tensors = [(values[n].shape, values[n].dtype, values[n].differentiable) for n in node.operands]
    places = {name: f"%{i}" for i, name in enumerate(dict.fromkeys(node.operands))}

    def plain(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return places[argument.name]
        return [plain(item) for item in argument] if isinstance(argument, tuple) else repr(argument)

    text = json.dumps([node.op, plain(node.args), [[k, plain(v)] for k, v in node.kwargs], tensors, torch.__version__])
    return f"{node.op} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _read(file: Path) -> dict[str, str]:
    """Findings by key; what cannot be read is found again."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _write(file: Path, known: Mapping[str, str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(known, indent=1, sort_keys=True))
        beside.replace(file)
    except OSError:
        pass  # found again next time
