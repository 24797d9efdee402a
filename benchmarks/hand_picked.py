"""The solver's plan beside the best of twelve strategies picked by hand, under the same cost model.

    python -m benchmarks.hand_picked                  20 pairs of a model and a cluster
    python -m benchmarks.hand_picked --quick          six of them
    python -m benchmarks.hand_picked --only gpt2      those whose name holds the word
    python -m benchmarks.hand_picked --markdown       the table as in docs/search.md

The twelve follow from the number of GPUs N, those of a node L and the segments of the model, by ``hand_picked``; none looks
at the model's sizes. Each is tried with micro-batches of 1, 2, 4, 8 and all rows, and its best that fits the memory counts: what
a person finds in an afternoon of trying. One that does not fit, or cannot be run, is marked and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from benchmarks.rows import Row, answer, made, show

if TYPE_CHECKING:
    from planner.solve.configuration import Evaluator

MICRO_BATCH_ROWS = (1, 2, 4, 8, 0)  # 0: all rows at once
LIMIT_S = 600.0
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Pair:
    model: str
    cluster: str
    gpus: int
    batch: int
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.gpus} x {self.cluster}"


PAIRS = (
    Pair("gpt2-small", "dgx-a100-80gb", 8, 64, quick=True),
    Pair("gpt2-small", "rtx-3090", 8, 64),
    Pair("gpt2-xl", "a10g", 8, 64, quick=True),
    Pair("gpt2-xl", "dgx-v100-32gb", 32, 256),
    Pair("gpt3-6.7b", "dgx-a100-40gb", 32, 256),
    Pair("gpt3-13b", "dgx-v100-32gb", 64, 512),
    Pair("gpt3-175b", "dgx-a100-80gb", 1024, 1024),
    Pair("megatron-7.5b", "dgx-a100-80gb", 128, 512),
    Pair("megatron-39b", "dgx-a100-80gb", 512, 1536),
    Pair("llama-2-7b", "a100-pcie-80gb", 8, 64),
    Pair("llama-2-7b", "l40s", 16, 128),
    Pair("llama-3-8b", "dgx-h100", 64, 128, quick=True),
    Pair("llama-3-70b", "dgx-h100", 512, 512),
    Pair("llama-3-70b", "mi300x", 64, 128),
    Pair("llama-3-405b", "dgx-h200", 1024, 512),
    Pair("bert-large", "rtx-4090", 4, 128, quick=True),
    Pair("vit-l-16", "l4", 8, 512),
    Pair("soft-moe-l-16", "dgx-a100-80gb", 64, 1024),
    Pair("resnet-101-wide", "dgx-v100-32gb", 16, 512, quick=True),
    Pair("giant-vocabulary", "dgx-a100-40gb", 8, 64, quick=True),
)


def hand_picked(gpus: int, gpus_per_node: int, segments: int) -> tuple[str, ...]:
    """Twelve strategies, without their micro-batches. A degree of the rule is the largest power of two that exists.

    t: tensor parallel over a node, up to 8. h: the same, leaving at least two groups. p: as many stages of such groups as
    there are, q: as many of single GPUs, up to 8 and half the segments.
    """
    t = largest_degree(gpus, min(gpus_per_node, 8))
    h = largest_degree(gpus // 2, min(gpus_per_node, 8)) if gpus > 1 else 1
    p = largest_degree(gpus // h, min(8, max(1, segments // 2)))
    q = largest_degree(gpus, min(8, max(1, segments // 2)))
    return (
        f"dp{gpus} zero=0",
        f"dp{gpus} zero=1",
        f"dp{gpus} zero=2",
        f"dp{gpus} zero=3",
        f"dp{gpus} zero=3 recompute=full",
        _mesh(1, gpus // t, t) + " zero=1",
        _mesh(1, gpus // h, h) + " zero=3 recompute=full",
        _mesh(1, gpus // largest_degree(gpus, 2), largest_degree(gpus, 2)) + " zero=3",
        _mesh(q, gpus // q, 1) + " zero=0 schedule=1f1b",
        _mesh(q, gpus // q, 1) + " zero=0 schedule=zero-bubble",
        _mesh(p, gpus // h // p, h) + " zero=0 recompute=full schedule=1f1b",
        _mesh(p, gpus // h // p, h) + " zero=1 recompute=selective schedule=interleaved v=2",
    )


def largest_degree(gpus: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``gpus``."""
    degree = 1
    while degree * 2 <= most and gpus % (degree * 2) == 0:
        degree *= 2
    return degree


def _mesh(pp: int, dp: int, tp: int) -> str:
    return ".".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1) or "single"


def with_micro_batches(strategy: str, batch: int) -> Iterator[str]:
    """``strategy`` with every size of micro-batch that its data-parallel ranks can run."""
    from planner.ir.mesh import Mesh

    mesh = Mesh.parse(strategy.split()[0])
    words = [word for word in strategy.split() if mesh.pp > 1 or not word.startswith(("schedule=", "v="))]
    words = [word for word in words if mesh.dp > 1 or not word.startswith("zero=")]
    rows = batch // mesh.dp
    counts = {rows // (size or max(rows, 1)) for size in MICRO_BATCH_ROWS if rows and rows % (size or rows) == 0}
    for count in sorted(counts):
        yield " ".join([words[0], f"mb={count}", *words[1:]])


@dataclass(frozen=True)
class Tried:
    """The best variant of one strategy that fits; where none does, ``reason`` says why."""

    strategy: str
    variant: str = ""
    step_time_s: float | None = None
    reason: str = ""


def try_by_hand(evaluator: Evaluator, strategy: str) -> Tried:
    from planner.errors import BadInput
    from planner.sizes import format_bytes
    from planner.strategies import plan_by_hand

    limit = evaluator.problem.memory_limit_bytes
    best, reason, missing = Tried(strategy), f"no batch of {evaluator.problem.graph.batch_size} rows for it", 0
    for variant in with_micro_batches(strategy, evaluator.problem.graph.batch_size):
        try:
            plan = plan_by_hand(evaluator, variant)
        except BadInput as error:
            reason = str(error) if not missing else reason
            continue
        if not plan.estimate.fits:
            over = plan.estimate.peak_memory_bytes - limit
            missing = min(missing or over, over)
            reason = f"{format_bytes(missing)} too much"
        elif best.step_time_s is None or plan.objective_s < best.step_time_s:
            best = Tried(strategy, variant, plan.objective_s)
    return best if best.variant else Tried(strategy, reason=reason)


def compare(row: Row) -> Row:
    """One pair: the solver's plan, then the twelve."""
    import time

    from benchmarks.shapes import problem
    from planner.garbage import uncollected
    from planner.solve.configuration import Evaluator
    from planner.solve.search import search

    with uncollected():
        todo = problem(row["model"], row["batch"], row["cluster"], row["gpus"])
        since = time.perf_counter()
        plan = search(todo)
        search_s = time.perf_counter() - since
        by_hand = Evaluator(todo)
        strategies = hand_picked(row["gpus"], todo.cluster.gpus_per_node, by_hand.segments)
        tried = [try_by_hand(by_hand, strategy) for strategy in strategies]
    return {
        "plan": plan.configuration,
        "objective_s": plan.objective_s,
        "gap": plan.gap,
        "search_s": search_s,
        "tried": [asdict(each) for each in tried],
    }


@dataclass(frozen=True)
class Compared:
    """A pair's answer, read."""

    pair: Pair
    found: Row

    @property
    def best(self) -> Row | None:
        ran = [each for each in self.found.get("tried", ()) if each["step_time_s"] is not None]
        return min(ran, key=lambda each: each["step_time_s"], default=None)

    @property
    def gain(self) -> float | None:
        """The best hand-picked time over the solver's; below 1 it beat the solver."""
        return self.best["step_time_s"] / self.found["objective_s"] if self.best else None

    @property
    def worse(self) -> bool:
        return self.gain is not None and self.gain < 1 - TOLERANCE


def cells(compared: Compared) -> tuple[str, ...]:
    found, best = compared.found, compared.best
    if "error" in found:
        return (compared.pair.name, found["error"], *[""] * (len(HEADINGS) - 2))
    fitting = sum(each["step_time_s"] is not None for each in found["tried"])
    by_hand = (best["variant"], seconds(best["step_time_s"])) if best else ("none fits", "")
    gain = f"{'WORSE ' if compared.worse else ''}{compared.gain:.3f}" if compared.gain else ""
    solver = (found["plan"], seconds(found["objective_s"]), f"{found['gap']:.2%}", f"{found['search_s']:.1f} s")
    return (compared.pair.name, *solver, *by_hand, gain, f"{fitting} of {len(found['tried'])}")


HEADINGS = ("model and cluster", "plan", "step", "gap", "search", "best by hand", "step", "gain", "fit")


def seconds(time_s: float) -> str:
    return f"{time_s:.3f} s" if time_s >= 1 else f"{time_s * 1e3:.2f} ms"


def summary(all_compared: Sequence[Compared]) -> str:
    worse = sum(each.worse for each in all_compared)
    failed = sum("error" in each.found for each in all_compared)
    gains = sorted(each.gain for each in all_compared if each.gain is not None)
    words = f"never worse: {len(gains) - worse} of {len(gains)} pairs with a hand-picked strategy that fits"
    if gains:
        words += f"; gain from {gains[0]:.3f} to {gains[-1]:.3f}, median {gains[len(gains) // 2]:.3f}"
    none = len(all_compared) - len(gains) - failed
    words += f"; {none} where none of the twelve fits" if none else ""
    return words + (f"; {failed} failed" if failed else "")


@click.command()
@click.option("--quick", is_flag=True, help="A few pairs only.")
@click.option("--only", default="", help="Pairs whose name holds this.")
@click.option("--markdown", is_flag=True, help="A table for a document.")
@click.option("--details", is_flag=True, help="Every one of the twelve, below the table.")
@click.option("--row", hidden=True)
def main(quick: bool, only: str, markdown: bool, details: bool, row: str | None) -> None:
    """The solver's plan beside twelve strategies picked by hand."""
    if row is not None:
        answer(compare, row)
        return
    compared: list[Compared] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for pair in PAIRS:
            if only in pair.name and (pair.quick or not quick):
                compared.append(Compared(pair, made("benchmarks.hand_picked", asdict(pair), LIMIT_S)))
                yield cells(compared[-1])

    show(HEADINGS, rows(), markdown)
    click.echo(summary(compared))
    for each in compared if details else ():
        click.echo(f"\n{each.pair.name}")
        for tried in each.found.get("tried", ()):
            time_s = tried["step_time_s"]
            click.echo(f"  {tried['variant'] or tried['strategy']}: {tried['reason'] or seconds(time_s)}")


if __name__ == "__main__":
    main()
