"""Times of this machine at a model's shapes: taken on local ranks, kept in a file beside the machine's constants.

    fill_tables(path, tables, wanted...)   times what the tables lack, keeping what there is as it goes

The file is written every few seconds and when measuring ends, however it ends, so what was timed is never timed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodels.measured import (
    Corrections,
    MeasuredCollective,
    MeasuredError,
    MeasuredOperator,
    MeasuredTables,
    MeasuredUpdate,
    OperatorCall,
)
from runtime.launch import LocalRanks
from runtime.measure import kept_at, write_text
from runtime.timer import UPDATED_TENSORS

Progress = Callable[..., None]

KEEP_EVERY_S = 5.0
TABLES = ".json"  # in place of .toml, the machine's constants
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MESSAGE_BYTES = {"cpu": (2**12, 2**16, 2**19, 2**22, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-3}),
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
}


@dataclass(frozen=True)
class Wanted:
    """What is to be timed. ``operators``: calls with their line of source and below what the integers of operands lie."""

    operators: tuple[tuple[OperatorCall, str, tuple[int, ...]], ...]
    optimizer: str
    refresh: bool = False


def read_tables(path: Path) -> MeasuredTables | None:
    """The tables in a file; None where there are none that can be used."""
    try:
        return MeasuredTables.parse(path.read_text(encoding="utf-8"), str(path))
    except (MeasuredError, OSError, UnicodeDecodeError):
        return None


def priced_with(gpus: int) -> tuple[str, Corrections]:
    """The name that this machine's times are kept under, for ``gpus`` ranks, and the corrections in its tables."""
    path = kept_at(gpus)
    tables = read_tables(path.with_suffix(TABLES))
    return path.name.removesuffix(path.suffix), Corrections() if tables is None else tables.corrections


def fill_tables(
    path: Path, tables: MeasuredTables, wanted: Wanted, device: str, say: Progress
) -> tuple[MeasuredTables, dict[str, str]]:
    """``tables`` with what they lacked of ``wanted``, also written to ``path``; and what does not run, with the reason.

    ``device``: 'cpu' or 'cuda'. Ends early at a KeyboardInterrupt, which is raised again once what there is has been kept.
    Raises RankFailed when a rank ends early.
    """
    todo = _todo(tables, wanted, MESSAGE_BYTES[device])
    if not todo:
        return tables, {}
    refused: dict[str, str] = {}
    with (
        _kept(path, tables) as kept,
        LocalRanks.start(tables.ranks, device=device, rank_class="runtime.timer:Timer") as ranks,
    ):
        for done, (what, arguments) in enumerate(todo):
            say(f"measuring {what}", done, len(todo))
            if what == "operators":
                call, source, below = arguments
                found = _operator(ranks, call, source, below)
                if isinstance(found, str):
                    refused[call.op] = found
                else:
                    kept.add(kept.tables.with_operators([found]))
            elif what == "messages":
                kept.add(kept.tables.with_collectives([_collective(ranks, *arguments)]))
            else:
                kept.add(kept.tables.with_updates([_update(ranks, *arguments)]))
        say("measured", len(todo), len(todo))
    return kept.tables, refused


class _Kept:
    def __init__(self, path: Path, tables: MeasuredTables) -> None:
        self.path, self.tables, self.written_s = path, tables, time.monotonic()

    def add(self, tables: MeasuredTables) -> None:
        self.tables = tables
        if time.monotonic() - self.written_s > KEEP_EVERY_S:
            self.write()

    def write(self) -> None:
        write_text(self.path, self.tables.to_json())
        self.written_s = time.monotonic()


@contextmanager
def _kept(path: Path, tables: MeasuredTables) -> Iterator[_Kept]:
    kept = _Kept(path, tables)
    try:
        yield kept
    finally:
        if kept.tables is not tables:
            kept.write()


def _todo(tables: MeasuredTables, wanted: Wanted, sizes: Iterable[int]) -> list[tuple[str, tuple[Any, ...]]]:
    """Updates and messages first: they are few, and every strategy needs them."""
    updates = {(u.optimizer, u.sharded) for u in tables.updates}
    messages = {(c.kind, c.ranks, c.size_bytes) for c in tables.collectives}
    groups = [n for n in range(2, tables.ranks + 1) if tables.ranks % n == 0]
    found: list[tuple[str, tuple[Any, ...]]] = []
    for sharded in (False, True) if tables.ranks > 1 else (False,):
        if wanted.refresh or (wanted.optimizer, sharded) not in updates:
            found.append(("the optimizer's step", (wanted.optimizer, sharded)))
    for message in ((kind, size, n) for n in groups for kind in KINDS for size in sizes):
        if wanted.refresh or (message[0], message[2], message[1]) not in messages:
            found.append(("messages", message))
    for operator in wanted.operators:
        if wanted.refresh or operator[0] not in tables.of_calls:
            found.append(("operators", operator))
    return found


def _operator(ranks: LocalRanks, call: OperatorCall, source: str, below: Sequence[int]) -> MeasuredOperator | str:
    operands = [
        {"shape": shape, "dtype": dtype, "needs_grad": needs, "below": most}
        for (shape, dtype), needs, most in zip(call.inputs, call.needs_grad, below, strict=True)
    ]
    found = ranks.call("operator", {"expression": source, "operands": operands})
    refused = [str(of_rank["refused"]) for of_rank in found if "refused" in of_rank]
    if refused:
        return refused[0]
    forward, backward = (_mean_s([of_rank[way] for of_rank in found]) for way in ("forward", "backward"))
    return MeasuredOperator(call, short(forward), short(backward))


def _collective(ranks: LocalRanks, kind: str, size_bytes: int, group_size: int) -> MeasuredCollective:
    found = ranks.call("collective", {"kind": kind, "size_bytes": size_bytes, "group_size": group_size})
    return MeasuredCollective(kind, group_size, 1, size_bytes, short(_mean_s(found)))


def _update(ranks: LocalRanks, optimizer: str, sharded: bool) -> MeasuredUpdate:
    """Two steps, of many small tensors and of few large ones, tell what a tensor and what a byte takes."""
    name, options = OPTIMIZERS[optimizer]
    seconds = {}
    for which in UPDATED_TENSORS:
        arguments = {"optimizer": name, "options": dict(options), "sharded": sharded, "which": which}
        seconds[which] = _mean_s(ranks.call("update", arguments))
    (many, small), (few, large) = UPDATED_TENSORS["many"], UPDATED_TENSORS["large"]
    per_tensor = seconds["many"] / many
    per_byte = max(seconds["large"] - few * per_tensor, 0.1 * seconds["large"]) / (4 * few * (large - small))
    return MeasuredUpdate(optimizer, sharded, short(per_tensor), short(per_byte))


def _mean_s(ranks: Sequence[Sequence[float]]) -> float:
    """Of all windows of all ranks: a step is a sum of many calls, and it is their mean that adds up to its time."""
    return statistics.fmean(seconds for windows in ranks for seconds in windows)


def short(seconds: float) -> float:
    """Four significant digits."""
    return float(f"{seconds:.4g}")
