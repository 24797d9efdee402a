"""Predicted peak memory beside what others measured.

    python -m benchmarks.memory                            every source of data/measured that has memory
    python -m benchmarks.memory --only mcore --worst 10    one source, and the rows that are predicted worst
    python -m benchmarks.memory --calibrate                what the calibrating rows say of the software's workspace_bytes

    mcore_memory       the test runs of Megatron-Core: what torch had allocated at most on the last rank
    zero_bubble        Zero Bubble Pipeline Parallelism (Qi and others, 2024, tables 4 and 6): the fullest rank, in whole GiB

What nothing else tells of the software, its ``workspace_bytes``, is the median of what is missing of every fifth row of
mcore_memory (``Predicted.calibrates``, as in benchmarks.published); errors are of the others.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import click

from benchmarks.published import CLUSTERS, EVERY, FOLDER, Row, number, percent, ranks, read
from benchmarks.rows import show
from benchmarks.shapes import Shape, graph_of
from costmodels.hardware import Cluster, load_cluster
from costmodels.software import load_software
from planner.errors import MeshwrightError
from planner.garbage import uncollected
from planner.ir.plan import MemoryEstimate, Plan
from planner.segments import segment_kinds
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.problem import Problem
from planner.strategies import plan_by_hand

GIB = 2**30
CLUSTERS_OF_MEMORY = {**CLUSTERS, "GB200": "gb200-nvl72", "A100": "dgx-a100-80gb", "not stated": "dgx-a100-80gb"}


@dataclass(frozen=True)
class Source:
    """``last``: the last rank was measured, otherwise the fullest. ``lighter_ends``: the first and the last stage have a layer
    fewer than the others."""

    name: str
    software: str
    last: bool = False
    lighter_ends: bool = False


SOURCES = (
    Source("mcore_memory", "megatron-core", last=True),
    Source("zero_bubble", "megatron-core", lighter_ends=True),
)


@dataclass(frozen=True)
class Predicted:
    """``row`` of its file, counted from 0. ``reason``: why there is no prediction."""

    source: str
    row: int
    name: str
    strategy: str
    measured_bytes: float
    memory: MemoryEstimate | None = None
    reason: str = ""

    @property
    def predicted_bytes(self) -> int:
        return self.memory.total_bytes if self.memory is not None else 0

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def calibrates(self) -> bool:
        return self.row % EVERY == 0


def flag(row: Row, name: str) -> bool:
    return bool(number(row, name, 0))


def shape_of(row: Row) -> Shape:
    """The model of a row, as Megatron builds it: the vocabulary padded to a multiple of 128 for each rank of tp."""
    layers, hidden, heads = (number(row, name) for name in ("layers", "hidden", "heads"))
    block = 128 * number(row, "tp")
    swiglu = flag(row, "swiglu")
    inner = number(row, "ffn", 4 * hidden * 2 // 3 // 64 * 64 if swiglu else 4 * hidden)
    return Shape(
        "gpt",
        layers,
        hidden,
        heads,
        number(row, "kv_heads", heads),
        inner,
        -(-number(row, "vocab", 51200) // block) * block,
        number(row, "seq_len"),
        fused=row.get("attention") == "fused",
        dropout=0.1,
        float_loss=True,
        tied=not flag(row, "untied"),
        rotary=flag(row, "rope"),
        biases=True,
        feed_forward="swiglu" if swiglu else "",
    )


def strategy_of(row: Row) -> str:
    """The row's configuration in the grammar of strategies."""
    pp, dp, tp = (number(row, name) for name in ("pp", "dp", "tp"))
    micro_batches = number(row, "global_batch") // dp // number(row, "micro_batch")
    mesh = ".".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1) or "single"
    words = [mesh, f"mb={micro_batches}", f"zero={number(row, 'zero_stage', 0) if dp > 1 else 0}"]
    words.append(f"recompute={row.get('recompute') or 'none'}")
    if pp > 1:
        words.append("split=layers")
        chunks = number(row, "vp")
        plain = "zero-bubble" if row.get("schedule") == "ZB-1p" else "1f1b" if micro_batches >= pp else "gpipe"
        words.append(f"schedule=interleaved v={chunks}" if chunks > 1 else f"schedule={plain}")
    if tp > 1 and not flag(row, "sequence_parallel"):
        words.append("sequence=whole")
    return " ".join(words)


def cluster_of(row: Row, source: Source) -> Cluster:
    cluster = load_cluster(CLUSTERS_OF_MEMORY[row["gpu_type"]], number(row, "gpus"))
    software = load_software(source.software)
    if flag(row, "loss_fusion"):  # compiled, and not in place
        software = replace(software, loss_in_place=False)
    return cluster.run_by(software)


@lru_cache(maxsize=4)
def _evaluator(shape: Shape, batch: int, cluster: Cluster, dtype: str) -> Evaluator:
    return Evaluator(Problem("measured", graph_of(shape, batch, dtype), cluster, "adamw", dtype, 2**60))


def lighter_ends(evaluator: Evaluator, plan: Plan) -> Plan:
    """``plan`` (tp = 1) with stages of equally many layers, embedding and loss counting as one each."""
    kinds = segment_kinds(evaluator.graph)
    layers = [number for number, kind in enumerate(kinds) if kinds.count(kind) > 1]
    each = (len(layers) + 2) // len(plan.stages)
    firsts = [*layers, layers[-1] + 1]
    edges = [0, *(firsts[stage * each - 1] for stage in range(1, len(plan.stages))), len(kinds)]
    configuration = Configuration(plan.mesh, plan.micro_batches, plan.zero, plan.schedule, plan.chunks)
    stages = tuple(itertools.pairwise(edges))
    return evaluator.build_plan(configuration, evaluator.letters(configuration), stages, plan.recompute, plan.strategy)


def predict(row: Row, place: int, source: Source) -> Predicted:
    shape, strategy = shape_of(row), strategy_of(row)
    dtype = "float16" if row.get("precision", "").startswith("fp16") else "bfloat16"
    one = Predicted(source.name, place, row["model"], strategy, float(row["peak_gib"]) * GIB)
    try:
        evaluator = _evaluator(shape, number(row, "global_batch"), cluster_of(row, source), dtype)
        plan = plan_by_hand(evaluator, strategy)
        plan = lighter_ends(evaluator, plan) if source.lighter_ends else plan
    except MeshwrightError as error:
        return replace(one, reason=str(error))
    devices = plan.estimate.devices
    return replace(one, memory=devices[-1] if source.last else max(devices, key=lambda memory: memory.total_bytes))


def predictions(rows: Sequence[Row], source: Source) -> Iterator[Predicted]:
    """In the order in which traced graphs are used again."""
    numbered = sorted(enumerate(rows), key=lambda item: (str(shape_of(item[1])), item[1]["global_batch"]))
    with uncollected():
        for place, row in numbered:
            yield predict(row, place, source)


HEADINGS = ("source", "rows", "judged", "MAPE", "bias", "worst", "rank")


def summary(name: str, found: Sequence[Predicted]) -> tuple[str, ...]:
    judged = [one for one in found if not one.calibrates]
    if not judged:
        return (name, str(len(found)), "0", "", "", "", "")
    errors = [one.error for one in judged]
    measured, predicted = [one.measured_bytes for one in judged], [float(one.predicted_bytes) for one in judged]
    rank = statistics.correlation(ranks(measured), ranks(predicted)) if len(set(measured)) > 1 else math.nan
    return (
        name,
        str(len(found)),
        str(len(judged)),
        percent(statistics.fmean(map(abs, errors))),
        percent(statistics.fmean(errors)),
        percent(max(errors, key=abs)),
        f"{rank:.3f}",
    )


def calibrated_bytes(found: Sequence[Predicted], source: Source) -> float:
    """The ``workspace_bytes`` with which half of the calibrating rows have more, and half less, than is predicted."""
    known = load_software(source.software).workspace_bytes
    return known + statistics.median(one.measured_bytes - one.predicted_bytes for one in found if one.calibrates)


def shown_parts(memory: MemoryEstimate) -> str:
    sizes = (
        memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes, memory.temporary_bytes
    )  # fmt: skip
    return " + ".join(f"{size / GIB:.2f}" for size in sizes)


@click.command()
@click.option("--only", default="", help="Sources whose name holds this.")
@click.option("--worst", type=int, default=0, help="Also show so many of the worst predictions.")
@click.option("--calibrate", is_flag=True, help="Show the workspace that the calibrating rows ask for, and end.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
def main(only: str, worst: int, calibrate: bool, markdown: bool) -> None:
    """Predicted peak memory beside published measurements."""
    chosen = [source for source in SOURCES if only in source.name]
    if not chosen:
        raise click.ClickException(f"no such source; the sources are {', '.join(source.name for source in SOURCES)}")
    lines, bad = [], []
    for source in chosen:
        all_found = list(predictions(read(FOLDER / f"{source.name}.csv"), source))
        found = [one for one in all_found if not one.reason]
        if calibrate:
            click.echo(f"{source.name}: workspace_bytes = {calibrated_bytes(found, source):.3g}")
            continue
        lines.append(summary(source.name, found))
        for one in all_found:
            if one.reason:
                click.echo(f"{one.name} {one.strategy}: {one.reason}", err=True)
        bad += sorted(found, key=lambda one: -abs(one.error))[:worst]
    if lines:
        show(HEADINGS, iter(lines), markdown)
    if bad:
        cells = (
            (one.name, one.strategy, f"{one.measured_bytes / GIB:.3f}", f"{one.predicted_bytes / GIB:.3f}", percent(one.error),
             shown_parts(one.memory) if one.memory else "")
            for one in bad
        )  # fmt: skip
        headings = (
            "model",
            "strategy",
            "measured",
            "predicted",
            "error",
            "weights + gradients + optimizer + kept + temporary",
        )
        show(headings, cells, markdown)


if __name__ == "__main__":
    main()
