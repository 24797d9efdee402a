"""Every model of the catalogue under every strategy, trained on local ranks and compared with one device.

    python -m benchmarks.census                                   all of them, and the table on the screen
    python -m benchmarks.census --output docs/census.md           the table also as a file
    python -m benchmarks.census --models llama,t5 --strategies tp,auto
    python -m benchmarks.census --cells cells.jsonl               goes on where an earlier run with that file stopped

A cell is equal, refused (a reason the user can act on, told before anything runs), fails (an error) or unequal (the worst).
Cells are made in a process of their own, one after another: when one crashes or gives no answer in time, that cell fails
and a new process goes on with the next. Every model is traced, and run on one device, once.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click

ROOT = Path(__file__).parent.parent
STRATEGIES = ("ddp", "fsdp", "tp", "model", "pp2 mb=2", "dp2.tp2", "pp2.dp2", "auto")
RANKS = 4
CLUSTER = "dgx-a100-80gb"
STEPS = 3
OUTCOMES = ("equal", "refused", "fails", "unequal")
WORKER = (sys.executable, "-m", "benchmarks.census", "--work")
MARKS = {"equal": "equal", "refused": "refused", "fails": "**fails**", "unequal": "**UNEQUAL**"}


@dataclass(frozen=True)
class Cell:
    """``error``: the largest of all tensors. ``reason``: why it is not equal. ``plan``: what ran."""

    model: str
    strategy: str
    outcome: str
    reason: str = ""
    plan: str = ""
    dtype: str = ""
    error: float | None = None
    seconds: float = 0.0


# --- in the process that makes the cells ------------------------------------------------------------------------------


def cells_of(name: str, strategies: Sequence[str]) -> Iterator[Cell]:
    """The cells of one model, as they are made."""
    import torch

    from planner.errors import BadInput, MeshwrightError, TraceError
    from planner.report.verification import error_words
    from planner.single_device import without_dropout
    from planner.trace import Batch, trace
    from planner.verification import Case, Verifier
    from runtime.launch import LocalRanks

    model, dtype = _in_widest(name)
    batch = Batch(model.inputs, model.kwargs, model.target)
    try:
        with without_dropout() as dropped:
            traced = trace(model.model, batch, model.loss_fn)
        case = Case(name, model.model, traced, batch, model.loss_fn, None, tuple(dropped))
        verifier = Verifier(case, STEPS, None, None, start=lambda n: LocalRanks.start(n, timeout_s=120))
    except (BadInput, TraceError) as error:
        yield from (Cell(name, strategy, "refused", _one_line(str(error))) for strategy in strategies)
        return
    except MeshwrightError as error:
        yield from (Cell(name, strategy, "fails", _one_line(str(error))) for strategy in strategies)
        return
    make_plan = _planner(name, traced.graph)
    with verifier:
        for strategy in strategies:
            since = time.perf_counter()
            found = verifier.outcome(strategy, lambda strategy=strategy: make_plan(strategy))  # type: ignore[misc]
            reason = _one_line(found.reason)
            if found.first is not None and found.cause is not None:
                spoken = f"{found.first.kind} of {found.first.name}: {error_words(found.first.error)}"
                operators = f" ({'; '.join(found.cause.operators)})" if found.cause.operators else ""
                reason = f"{spoken}; {found.cause.where}: {_one_line(found.cause.what)}{operators}; {_one_line(found.cause.why)}"
            worst = found.worst.error if found.worst is not None else None
            yield Cell(
                name,
                strategy,
                "fails" if found.outcome == "failed" else found.outcome,
                reason,
                found.configuration,
                str(dtype).removeprefix("torch.")
                + (f" (inside {found.dtype})" if found.dtype not in str(dtype) else ""),
                worst if worst is not None and torch.isfinite(torch.tensor(worst)) else None,
                time.perf_counter() - since,
            )


def _in_widest(name: str) -> tuple[Any, Any]:
    """The model in float64, where rounding cannot hide a mistake; in float32 where it knows no other."""
    import torch

    from tests.zoo import SINGLE_PRECISION, ZOO

    if name not in SINGLE_PRECISION:
        try:
            model = ZOO[name](torch.float64)
            model.loss()
            return ZOO[name](torch.float64), torch.float64
        except (RuntimeError, TypeError, NotImplementedError):
            pass
    return ZOO[name](torch.float32), torch.float32


def _planner(name: str, graph: Any) -> Any:
    from costmodels.hardware import load_cluster
    from planner.ir.mesh import Mesh
    from planner.ir.verify import verify_plan
    from planner.solve.configuration import Evaluator
    from planner.solve.problem import Problem
    from planner.solve.search import search
    from planner.strategies import plan_by_hand

    evaluators: dict[int, Evaluator] = {}

    def evaluator_of(ranks: int) -> Evaluator:
        if ranks not in evaluators:
            cluster = load_cluster(CLUSTER, ranks)
            problem = Problem(name, graph, cluster, "adamw", "float32", cluster.device.memory_bytes)
            evaluators[ranks] = Evaluator(problem)
        return evaluators[ranks]

    def make_plan(strategy: str) -> Any:
        try:
            ranks = Mesh.parse(strategy.split()[0]).size
        except ValueError:  # a strategy by name
            ranks = RANKS
        evaluator = evaluator_of(ranks)
        if strategy == "model" and evaluator.segments in range(2, RANKS):
            evaluator = evaluator_of(evaluator.segments)
        plan = search(evaluator.problem) if strategy == "auto" else plan_by_hand(evaluator, strategy)
        verify_plan(plan, graph)
        return plan

    return make_plan


def _one_line(text: str) -> str:
    """The first line of a message (two where the first only announces), without the folders of this machine."""
    for folder in (*map(Path, sys.path), ROOT):
        text = text.replace(f"{folder.absolute()}/", "")
    lines = [line.strip().removeprefix("| ") for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def work(todo: Sequence[tuple[str, Sequence[str]]], results: IO[str]) -> None:
    """Make the cells of ``todo``; a line of JSON for each."""
    import torch

    torch.set_num_threads(1)
    for name, strategies in todo:
        done: set[str] = set()
        try:
            for cell in cells_of(name, strategies):
                done.add(cell.strategy)
                print(json.dumps(asdict(cell)), file=results, flush=True)
        except Exception as error:
            for strategy in [s for s in strategies if s not in done]:
                cell = Cell(name, strategy, "fails", f"{type(error).__name__}: {_one_line(str(error))}")
                print(json.dumps(asdict(cell)), file=results, flush=True)


# --- in the process that keeps the table ------------------------------------------------------------------------------


def census(
    wanted: Sequence[tuple[str, Sequence[str]]], timeout_s: float, command: Sequence[str] = WORKER
) -> Iterator[Cell]:
    """The cells of each (model, strategies) of ``wanted``, as they are made.

    ``timeout_s``: seconds a cell may take, together with the trace of its model. ``command``: what makes cells, given those
    left to make as JSON; it prints each as a line.
    """
    todo = [(name, list(strategies)) for name, strategies in wanted]
    while todo:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
        process = subprocess.Popen(
            [*command, json.dumps(todo)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        why = ""
        try:
            for line in _lines(process, timeout_s):
                if line is None:
                    why = f"no answer in {timeout_s:.0f} s"
                    break
                cell = Cell(**json.loads(line))
                _strike(todo, cell)
                yield cell
        finally:
            _end(process)
        if todo:
            name, left = todo[0]
            cell = Cell(name, left[0], "fails", why or f"the process ended with exit code {process.returncode}")
            _strike(todo, cell)
            yield cell


def _strike(todo: list[tuple[str, list[str]]], cell: Cell) -> None:
    name, left = todo[0]
    assert name == cell.model and cell.strategy in left, f"{cell} was not asked for"
    left.remove(cell.strategy)
    if not left:
        todo.pop(0)


def _lines(process: subprocess.Popen[str], timeout_s: float) -> Iterator[str | None]:
    """Lines as they come; None when the next takes longer than ``timeout_s``."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


def _end(process: subprocess.Popen[str]) -> None:
    """End the process; its ranks end with it, as they watch for that."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def markdown(cells: Sequence[Cell], strategies: Sequence[str], kept: int = 0) -> str:
    """The table, one row a model; below it every reason once, with the cells it stands for.

    ``kept``: how many cells are those of earlier runs.
    """
    by_place = {(cell.model, cell.strategy): cell for cell in cells}
    models = list(dict.fromkeys(cell.model for cell in cells))
    numbers: dict[tuple[str, str], int] = {}
    for cell in cells:
        if cell.outcome != "equal":
            numbers.setdefault((cell.outcome, _general(cell.reason)), len(numbers) + 1)
    minutes = max(sum(cell.seconds for cell in cells) / 60, 1)
    lines = [
        "# Census",
        "",
        "Every model of the catalogue (`tests/zoo`) under every strategy, trained for 3 steps on local ranks and compared with",
        "one device: losses, every gradient, buffers, and parameters after the last step (`planner verify`). Made by",
        "`python -m benchmarks.census --output docs/census.md`.",
        "",
        f"**{summary(cells)}**",
        "",
        f"{_versions()}; {minutes:.0f} minutes.",
        "4 ranks, processes on a CPU over gloo; 2 for `pp2 mb=2`; for `model` one for each segment of the model, at most 4.",
        "Models run in float64 where their operators have it, so that what is allowed is 1e-9 of a tensor's largest entry,",
        "or 1e-5 where they compute in float32. A number leads to the reason below the table; `error` is the largest of all",
        "tensors in the row.",
        *([f"{kept} cells were kept from runs of earlier versions of the code (`--cells`)."] if kept else []),
        "",
        "| model | " + " | ".join(f"`{s}`" for s in strategies) + " | dtype | error |",
        "|---" * (len(strategies) + 3) + "|",
    ]
    for model in models:
        row = [by_place.get((model, strategy)) for strategy in strategies]
        errors = [cell.error for cell in row if cell is not None and cell.error is not None]
        dtype = next((cell.dtype for cell in row if cell is not None and cell.dtype), "")
        shown = [_mark(cell, numbers) for cell in row]
        lines.append(f"| {model} | {' | '.join(shown)} | {dtype} | {f'{max(errors):.0e}' if errors else ''} |")
    lines += ["", "## Plans of `auto`", ""] if "auto" in strategies else []
    plans: dict[str, list[str]] = {}
    for cell in cells:
        if cell.strategy == "auto" and cell.plan:
            plans.setdefault(cell.plan, []).append(cell.model)
    lines += [
        f"- `{plan}`: {', '.join(names)}" for plan, names in sorted(plans.items(), key=lambda item: -len(item[1]))
    ]
    for outcome, title in (("unequal", "Unequal"), ("fails", "Fails"), ("refused", "Refused")):
        found = [(reason, number) for (kind, reason), number in numbers.items() if kind == outcome]
        if found:
            lines += ["", f"## {title}", ""]
        for reason, number in found:
            places: dict[str, list[str]] = {}
            for cell in cells:
                if cell.outcome == outcome and _general(cell.reason) == reason:
                    places.setdefault(cell.model, []).append(cell.strategy)
            where = "; ".join(f"{model} ({', '.join(names)})" for model, names in places.items())
            lines += [f"{number}. {_escaped(reason)}  ", f"   *{where}*"]
    return "\n".join(lines) + "\n"


def _mark(cell: Cell | None, numbers: Mapping[tuple[str, str], int]) -> str:
    if cell is None:
        return ""
    number = numbers.get((cell.outcome, _general(cell.reason)))
    return MARKS[cell.outcome] + (f" {number}" if number else "")


def _general(reason: str) -> str:
    return reason.strip() or "no reason was given"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


def summary(cells: Sequence[Cell]) -> str:
    counts = {outcome: sum(cell.outcome == outcome for cell in cells) for outcome in OUTCOMES}
    total = max(len(cells), 1)
    shares = ", ".join(f"{outcome} {counts[outcome]} ({counts[outcome] / total:.1%})" for outcome in OUTCOMES)
    models = len({cell.model for cell in cells})
    return f"{models} models x {len({cell.strategy for cell in cells})} strategies = {len(cells)} cells: {shares}"


def _versions() -> str:
    import torch
    import transformers

    return f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


@click.command()
@click.option("--models", help="Comma-separated names of the catalogue. [default: all]")
@click.option("--strategies", help=f"Comma-separated. [default: {','.join(STRATEGIES)}]")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A Markdown file for the table.")
@click.option("--timeout", type=click.FloatRange(min=1), default=180.0, show_default=True, help="Seconds for a cell.")
@click.option(
    "--cells",
    "kept",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON lines: cells that are there are not made again.",
)
@click.option("--work", "todo", hidden=True, help="The cells to make in this process, as JSON.")
def main(
    models: str | None, strategies: str | None, output: Path | None, timeout: float, kept: Path | None, todo: str | None
) -> None:
    """Verify every model of the catalogue under every strategy, and print the table."""
    if todo is not None:
        results = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what models print is none of the results
        work(json.loads(todo), results)
        return
    from tests.zoo import ZOO

    chosen, names = _names(models) or list(ZOO), _names(strategies) or list(STRATEGIES)
    if unknown := [name for name in chosen if name not in ZOO]:
        raise click.BadParameter(f"no model {unknown[0]!r} in the catalogue; it has {', '.join(ZOO)}")
    made = read_cells(kept) if kept is not None else []
    cells = {(cell.model, cell.strategy): cell for cell in made if cell.model in chosen and cell.strategy in names}
    left = [(name, [s for s in names if (name, s) not in cells]) for name in chosen]
    earlier = len(cells)
    for cell in census([(name, missing) for name, missing in left if missing], timeout):
        cells[cell.model, cell.strategy] = cell
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                print(json.dumps(asdict(cell)), file=file)
        place = f"[{len(cells)}/{len(chosen) * len(names)}]"
        click.echo(f"{place} {cell.model} {cell.strategy}: {cell.outcome} {cell.seconds:.1f} s {cell.reason}", err=True)
    found = [cells[name, strategy] for name in chosen for strategy in names]
    text = markdown(found, names, earlier)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    click.echo(text if output is None else summary(found))
    sys.exit(1 if any(cell.outcome in ("unequal", "fails") for cell in found) else 0)


def read_cells(path: Path) -> list[Cell]:
    """The cells in ``path``, if it is there; the last of each place counts."""
    if not path.exists():
        return []
    return [Cell(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


if __name__ == "__main__":
    main()
