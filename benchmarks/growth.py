"""How planning grows with the depth of the model and the number of devices.

    python -m benchmarks.growth              layers 12 to 384 on 512 devices, then devices 8 to 16,384 under 48 layers
    python -m benchmarks.growth --quick      some of them
    python -m benchmarks.growth --all        every number of layers with every number of devices

The model has the blocks of GPT-3 13B (width 5120, 40 heads, 2048 tokens); a step has 2048 rows, the devices are those of a
DGX A100. Each row is a process of its own. "pricing" is the part of the search that cuts the batch and prices operators,
segments and plans; the rest solves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from benchmarks.rows import Row, TimedEvaluator, answer, made, show

LAYERS = (12, 24, 48, 96, 192, 384)
GPUS = (8, 32, 128, 512, 2048, 4096, 16384)
QUICK_LAYERS, QUICK_GPUS = (12, 96), (8, 512)
BASE, BATCH, CLUSTER = "gpt3-13b", 2048, "dgx-a100-80gb"
USUAL_LAYERS, USUAL_GPUS = 48, 512
LIMIT_S = 1200.0


def measure(row: Row) -> Row:
    """Trace and search one size, in this process."""
    from dataclasses import replace

    from benchmarks.shapes import OPTIMIZER, SHAPES, precision, sample
    from costmodels.hardware import load_cluster
    from planner.garbage import uncollected
    from planner.solve.problem import Problem
    from planner.solve.search import search
    from planner.trace import Batch, trace

    machines = load_cluster(CLUSTER, row["gpus"])
    with uncollected():
        model, inputs = sample(replace(SHAPES[BASE], layers=row["layers"]), BATCH)
        start = time.perf_counter()
        graph = trace(model, Batch(inputs, {})).graph
        traced = time.perf_counter()
        evaluator = TimedEvaluator(
            Problem(BASE, graph, machines, OPTIMIZER, precision(machines), machines.device.memory_bytes)
        )
        plan = search(evaluator.problem, evaluator=evaluator)
        done = time.perf_counter()
    return {
        "trace_s": traced - start,
        "pricing_s": evaluator.pricing_s,
        "solve_s": done - traced - evaluator.pricing_s,
        "plan": plan.configuration,
        "gap": plan.gap,
        "solved": sum(item.outcome in ("best", "solved") for item in plan.searched),
        "searched": len(plan.searched),
    }


def sizes(quick: bool, everything: bool) -> Iterator[tuple[int, int]]:
    """(layers, devices) of each row."""
    layers, gpus = (QUICK_LAYERS, QUICK_GPUS) if quick else (LAYERS, GPUS)
    if everything:
        yield from ((n, devices) for n in layers for devices in gpus)
        return
    yield from dict.fromkeys([*((n, USUAL_GPUS) for n in layers), *((USUAL_LAYERS, devices) for devices in gpus)])


HEADINGS = ("layers", "devices", "trace", "pricing", "solve", "total", "memory", "solved", "plan", "gap")


def cells(layers: int, gpus: int, found: Row) -> tuple[str, ...]:
    sizes = (str(layers), f"{gpus:,}")
    if "error" in found:
        return (*sizes, "", "", "", "", "", "", found["error"], "")
    times = [found["trace_s"], found["pricing_s"], found["solve_s"]]
    return (
        *sizes,
        *(f"{time_s:.1f} s" for time_s in (*times, sum(times))),
        f"{found['memory_bytes'] / 1e9:.2f} GB",
        f"{found['solved']} of {found['searched']}",
        found["plan"],
        f"{found['gap']:.2%}",
    )


@click.command()
@click.option("--quick", is_flag=True, help="A few rows only.")
@click.option("--all", "everything", is_flag=True, help="Every number of layers with every number of devices.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
@click.option("--row", hidden=True)
def main(quick: bool, everything: bool, markdown: bool, row: str | None) -> None:
    """Time and memory of planning over layers and devices."""
    if row is not None:
        answer(measure, row)
        return
    rows = (
        cells(layers, gpus, made("benchmarks.growth", {"layers": layers, "gpus": gpus}, LIMIT_S))
        for layers, gpus in sizes(quick, everything)
    )
    show(HEADINGS, rows, markdown)


if __name__ == "__main__":
    main()
