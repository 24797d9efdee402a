"""Predicted step times beside times that others measured.

    python -m benchmarks.published                         every source of data/measured
    python -m benchmarks.published --only megatron
    python -m benchmarks.published --rows FILE.csv --source a100_gpt_grid       other rows of the same columns
    python -m benchmarks.published --worst 20              the rows that are predicted worst

A source (SOURCES) is a file of rows with the software that ran them (costmodels.software). Constants of that software which
nothing else tells are calibrated on every fifth row (``calibrates``: the first, sixth, ... of the file); errors are of the
others. What is shown:

    MAPE          mean of |predicted / measured - 1|
    worst         the largest
    rank          Spearman's rank correlation of predicted and measured times
    regret        among measured plans of one model, batch and number of GPUs: the measured time of the plan predicted to be
                  the fastest, over the best measured, less 1; median, mean and worst
"""

from __future__ import annotations

import csv
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import click

from benchmarks.rows import ROOT, show
from benchmarks.shapes import SHAPES, Shape, graph_of
from costmodels.hardware import Cluster, load_cluster
from costmodels.software import load_software
from planner.errors import MeshwrightError
from planner.garbage import uncollected
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.strategies import plan_by_hand

FOLDER = ROOT / "benchmarks" / "data" / "measured"
EVERY = 5
CLUSTERS = {
    "A100-SXM-80GB": "dgx-a100-80gb",
    "A100-SXM-40GB": "dgx-a100-40gb",
    "H100-SXM-80GB": "dgx-h100",
    "H100-SXM-94GB": "dgx-h100",
    "V100-SXM2-32GB": "dgx-v100-32gb",
}
Row = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """``kind``: how its models are built: megatron (attention in several kernels, dropout), mpt or llama."""

    name: str
    software: str
    kind: str
    cluster: str = ""


SOURCES = (
    Source("a100_gpt_grid", "megatron-deepspeed", "megatron", "dgx-a100-80gb"),
    Source("megatron_papers", "megatron-lm", "megatron"),
    Source("fsdp_llmfoundry", "llm-foundry", "mpt"),
    Source("torchtitan", "torchtitan", "llama"),
)


@dataclass(frozen=True)
class Predicted:
    """``row`` of its file, counted from 0. ``reason``: why there is no prediction."""

    source: str
    row: int
    name: str
    group: str
    strategy: str
    measured_s: float
    predicted_s: float = math.nan
    reason: str = ""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def calibrates(self) -> bool:
        return self.row % EVERY == 0


def read(path: Path) -> tuple[Row, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def number(row: Row, name: str, default: int = 1) -> int:
    text = row.get(name, "")
    return int(float(text)) if text else default


def shape_of(row: Row, kind: str) -> Shape:
    """The model of a row. Megatron pads its vocabulary to a multiple of 128 for each rank of tp."""
    layers, hidden, heads = (number(row, name) for name in ("layers", "hidden", "heads"))
    vocabulary, length = number(row, "vocab", 51200), number(row, "seq_len")
    if kind == "llama":
        name = row["model"].lower().replace("llama-3.1", "llama-3")
        return replace(SHAPES[name], length=length, float_loss=True)
    if kind == "mpt":
        return Shape("gpt", layers, hidden, heads, 0, 4 * hidden, vocabulary, length, biases=False, float_loss=True)
    block = 128 * number(row, "tp")
    padded = -(-vocabulary // block) * block
    return Shape("gpt", layers, hidden, heads, 0, 4 * hidden, padded, length, fused=False, dropout=0.1, float_loss=True)


def strategy_of(row: Row, kind: str) -> str:
    """The row's configuration in the grammar of strategies."""
    pp, dp, tp, chunks = (number(row, name) for name in ("pp", "dp", "tp", "vp"))
    mesh = ".".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1) or "single"
    micro_batches = number(row, "global_batch") // dp // number(row, "micro_batch")
    words = [mesh, f"mb={micro_batches}", f"zero={number(row, 'zero_stage', 0) if dp > 1 else 0}"]
    recompute = row.get("recompute") or "none"
    words.append(f"recompute={recompute.split()[0]}")
    if pp > 1:
        words.append("split=layers")
        alone = "1f1b" if micro_batches >= pp else "gpipe"  # with fewer the order is the same
        words.append(f"schedule=interleaved v={chunks}" if chunks > 1 else f"schedule={alone}")
    if tp > 1 and row.get("sequence_parallel") in ("0", "0.0"):
        words.append("sequence=whole")
    return " ".join(words)


def cluster_of(row: Row, source: Source) -> Cluster:
    cluster = load_cluster(source.cluster or CLUSTERS[row["gpu_type"]], number(row, "gpus"))
    return cluster.run_by(load_software(source.software))


@lru_cache(maxsize=4)
def _evaluator(shape: Shape, batch: int, cluster: Cluster, dtype: str) -> Evaluator:
    graph = graph_of(shape, batch, dtype)
    return Evaluator(Problem("published", graph, cluster, "adamw", dtype, cluster.device.memory_bytes))


def predict(row: Row, number_in_file: int, source: Source, cluster: Cluster | None = None) -> Predicted:
    """``cluster``: instead of the row's own."""
    shape, strategy = shape_of(row, source.kind), strategy_of(row, source.kind)
    machines = cluster or cluster_of(row, source)
    dtype = "float16" if row.get("precision", "").startswith("fp16") else "bfloat16"
    group = f"{row['model']} {row['seq_len']} batch {row['global_batch']} on {row['gpus']}"
    one = Predicted(source.name, number_in_file, row["model"], group, strategy, float(row["iteration_time_s"]))
    if "fp8" in row.get("precision", ""):
        return replace(one, reason="products in float8 are not modelled")
    if "every 2nd" in row.get("recompute", ""):
        return replace(one, reason="recomputation of every second layer has no word in the grammar of strategies")
    try:
        plan = plan_by_hand(_evaluator(shape, number(row, "global_batch"), machines, dtype), strategy)
    except MeshwrightError as error:
        return replace(one, reason=str(error))
    return replace(one, predicted_s=plan.estimate.step_time_s)


def predictions(rows: Sequence[Row], source: Source) -> Iterator[Predicted]:
    """In the order in which traced graphs are used again."""
    numbered = sorted(enumerate(rows), key=lambda item: (str(shape_of(item[1], source.kind)), item[1]["global_batch"]))
    with uncollected():
        for place, row in numbered:
            if row.get("iteration_time_s"):
                yield predict(row, place, source)


# --- figures ----------------------------------------------------------------------------------------------------------


def mape(found: Iterable[Predicted]) -> float:
    return statistics.fmean(abs(one.error) for one in found)


def rank_correlation(found: Sequence[Predicted]) -> float:
    """Spearman's; NaN where one of both is always the same."""
    measured, predicted = [one.measured_s for one in found], [one.predicted_s for one in found]
    if len(set(measured)) < 2 or len(set(predicted)) < 2:
        return math.nan
    return statistics.correlation(ranks(measured), ranks(predicted))


def ranks(values: Sequence[float]) -> list[float]:
    """Of each its place when sorted; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def regrets(found: Iterable[Predicted]) -> list[float]:
    """Of every group with several plans, sorted."""
    groups: dict[str, list[Predicted]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)
    return sorted(
        min(group, key=lambda one: one.predicted_s).measured_s / min(one.measured_s for one in group) - 1
        for group in groups.values()
        if len(group) > 1
    )


def percent(value: float) -> str:
    return f"{value:.1%}"


HEADINGS = ("source", "rows", "judged", "MAPE", "bias", "worst", "rank", "regret median", "mean", "worst", "groups")


def summary(name: str, found: Sequence[Predicted], judged: Sequence[Predicted]) -> tuple[str, ...]:
    if not judged:
        return (name, str(len(found)), "0", *[""] * (len(HEADINGS) - 3))
    lost = regrets(found)
    shown = [percent(f(lost)) for f in (statistics.median, statistics.fmean, max)] if lost else ["", "", ""]
    worst = max(judged, key=lambda one: abs(one.error))
    return (
        name,
        str(len(found)),
        str(len(judged)),
        percent(mape(judged)),
        percent(statistics.fmean(one.error for one in judged)),
        percent(worst.error),
        f"{rank_correlation(judged):.3f}",
        *shown,
        str(len(lost)),
    )


def parts(source: Source, rows: Sequence[Row], found: Sequence[Predicted]) -> Iterator[tuple[str, list[Predicted]]]:
    """The source as a whole, then by one and several nodes or by GPU, where that tells rows apart."""
    yield source.name, list(found)
    kinds: dict[str, list[Predicted]] = {}
    for one in found:
        row = rows[one.row]
        nodes = "one node" if number(row, "gpus") <= number(row, "gpus_per_node", 8) else "several nodes"
        kinds.setdefault(f"{source.name}, {row['gpu_type'].split(' (')[0]}, {nodes}", []).append(one)
    if len(kinds) > 1:
        yield from sorted(kinds.items())


@click.command()
@click.option("--only", default="", help="Sources whose name holds this.")
@click.option("--rows", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Another file.")
@click.option("--source", "named", default="", help="With --rows: the source whose rows these are like.")
@click.option("--worst", type=int, default=0, help="Also show so many of the worst predictions.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
def main(only: str, file: Path | None, named: str, worst: int, markdown: bool) -> None:
    """Predictions beside published measurements."""
    chosen = [source for source in SOURCES if (source.name == named if file else only in source.name)]
    if not chosen:
        raise click.ClickException(f"no such source; the sources are {', '.join(source.name for source in SOURCES)}")
    lines, bad = [], []
    for source in chosen:
        rows = read(file or FOLDER / f"{source.name}.csv")
        all_found = list(predictions(rows, source))
        found = [one for one in all_found if not one.reason]
        for name, some in parts(source, rows, found):
            lines.append(summary(name, some, some if file else [one for one in some if not one.calibrates]))
        bad += sorted(found, key=lambda one: -abs(one.error))[:worst]
        for one in all_found:
            if one.reason:
                click.echo(f"{one.name} {one.strategy}: {one.reason}", err=True)
    show(HEADINGS, iter(lines), markdown)
    if bad:
        cells = (
            (one.group, one.strategy, f"{one.measured_s:.3f} s", f"{one.predicted_s:.3f} s", percent(one.error))
            for one in bad
        )
        show(("model", "strategy", "measured", "predicted", "error"), cells, markdown)


if __name__ == "__main__":
    main()
