"""Rows of a benchmark's table, each made in a process of its own: its memory is its own, and no row can end the others.

made(module, row, limit_s)      run ``python -m module --row JSON``; its answer, or why there is none
answer(make)                    the other side: read the row, make it, print the answer
table(headings, rows, ..)       for the screen or a document
TimedEvaluator                  the search's evaluator, which tells pricing from solving
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.solve.configuration import Evaluator

ROOT = Path(__file__).parent.parent
Row = Mapping[str, Any]


def made(module: str, row: Row, limit_s: float) -> dict[str, Any]:
    """What ``module`` answers for ``row``. A row that fails or takes too long has ``error`` and nothing else."""
    command = [sys.executable, "-m", module, "--row", json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s, env=one_thread())
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {limit_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": last}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def answer(make: Callable[[Row], Row], row: str) -> None:
    """Make the row and print it, with the peak memory of this process."""
    since = time.perf_counter()
    found = dict(make(json.loads(row)))
    found["seconds"] = time.perf_counter() - since
    found["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


def show(headings: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool) -> None:
    """Print a table as its rows come: for a document line by line; for the screen at the end, and until then its first column."""
    if markdown:
        for line in itertools.chain((headings, ["---"] * len(headings)), rows):
            print("| " + " | ".join(line) + " |", flush=True)
        return
    table, progress = Table(*headings), Console(stderr=True)
    for row in rows:
        table.add_row(*row)
        progress.print(row[0], style="dim", highlight=False)
    Console().print(table)


class TimedEvaluator(Evaluator):
    """``pricing_s``: seconds spent cutting the batch and pricing operators, segments and plans."""

    pricing_s = 0.0
    _inside = False

    def _timed(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._inside:
            return make(*arguments, **options)
        since, self._inside = time.perf_counter(), True
        try:
            return make(*arguments, **options)
        finally:
            self._inside = False
            self.pricing_s += time.perf_counter() - since

    def split(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(super().split, *arguments, **options)

    def work_s(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(super().work_s, *arguments, **options)

    def costs(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(super().costs, *arguments, **options)

    def build_plan(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(super().build_plan, *arguments, **options)
