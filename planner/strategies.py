"""Hand-picked strategies, in one compact grammar, made into Plans by the same parts as the solver's.

    ddp      dp{N} zero=0                     the batch over all devices
    fsdp     dp{N} zero=3                     the same, weights sharded
    tp       tp{N}                            every operator over all devices, weights by Megatron's pattern
    model    pp{N} mb=1                       layers over devices, one batch at a time
    gpipe    pp{N} schedule=gpipe             layers and micro-batches
    1f1b     pp{N} schedule=1f1b
    pp2.dp2.tp2 mb=8 zero=3 recompute=full schedule=1f1b        any mix; what is left out has the default below
    pp2 mb=8 schedule=interleaved v=2                           v stages on each pipeline rank (zero-bubble too)

    pp2.dp8 mb=8 groups=v100+a100               stages on unequal machines, the first on group v100
    pp4.tp2 mb=8 split=layers sequence=whole                    as Megatron-LM of 2021 does it

``mb`` is the number of micro-batches of a step. A batch that dp or mb does not divide is dealt as evenly as can be.
Defaults: mb=1 without stages, else the largest divisor of a dp rank's batch up to 4 a stage (4 a stage where it has none
as large as the number of stages), such that the schedule exists; zero=0; recompute=none; schedule=interleaved where v is
given, else 1f1b where there are enough micro-batches, else gpipe; v=2 for interleaved, else 1; split=time: stages of even
time, not of equally many layers; sequence=cut: norms on tp may cut tokens among them (sequence parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from costmodels.mixed import Machine, MixedCluster
from planner.batch import check_count
from planner.errors import BadInput
from planner.ir.graph import Node
from planner.ir.mesh import Mesh
from planner.ir.plan import RECOMPUTATIONS, SCHEDULES, Plan
from planner.schedules import IN_ROUNDS, INTERLEAVED, ZERO_BUBBLE, check, in_equal_rounds
from planner.segment_cost import RankCosts, SegmentCost, of_each_rank
from planner.segments import segment_kinds
from planner.sharding_rules import Strategy
from planner.solve.configuration import FAST, Evaluator
from planner.solve.space import Configuration, divisors

NAMED = ("ddp", "fsdp", "tp", "model", "gpipe", "1f1b")
MEGATRON = "megatron"
MEGATRON_WHOLE = "megatron, whole sequences"
MICRO_BATCHES_A_STAGE = 4
WORDS = {
    "recompute": RECOMPUTATIONS, "schedule": SCHEDULES, "split": ("time", "layers"), "sequence": ("cut", "whole"),
}  # fmt: skip
NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})
WEIGHT_LETTERS = {
    "linear": "io", "addmm": "io", "conv1d": "cog", "conv2d": "cog", "conv3d": "cog", "embedding": "vh", "mm": "io",
}  # fmt: skip


@dataclass(frozen=True)
class HandPicked:
    """A parsed strategy; None: the default."""

    text: str
    mesh: Mesh
    micro_batches: int | None = None
    zero: int = 0
    recompute: str = "none"
    schedule: str | None = None
    chunks: int | None = None
    split: str = "time"
    sequence: str = "cut"
    groups: tuple[str, ...] = ()


def parse_strategy(text: str, gpus: int) -> HandPicked:
    """Read a strategy for ``gpus`` devices. Raises BadInput naming the word that is wrong."""
    words = text.split()
    if not words:
        raise BadInput(f"the strategy is empty; write one of {', '.join(NAMED)} or for example pp2.dp2.tp2 mb=8")
    mesh, named = _mesh(words[0], gpus, text)
    options = {**named, **_options(words[1:], text)}
    if mesh.size != gpus:
        raise BadInput(
            f"strategy {text!r} is for {mesh.size} devices, but {gpus} are to be used; make the degrees multiply to {gpus}"
        )
    return HandPicked(
        text,
        mesh,
        options.get("mb"),  # type: ignore[arg-type]
        int(options.get("zero", 0)),
        str(options.get("recompute", "none")),
        options.get("schedule"),  # type: ignore[arg-type]
        options.get("v"),  # type: ignore[arg-type]
        str(options.get("split", "time")),
        str(options.get("sequence", "cut")),
        tuple(str(options["groups"]).split("+")) if "groups" in options else (),
    )


def _mesh(word: str, gpus: int, text: str) -> tuple[Mesh, dict[str, int | str]]:
    known: dict[str, tuple[Mesh, dict[str, int | str]]] = {
        "ddp": (Mesh(dp=gpus), {}),
        "fsdp": (Mesh(dp=gpus), {"zero": 3}),
        "tp": (Mesh(tp=gpus), {}),
        "model": (Mesh(pp=gpus), {"mb": 1, "schedule": "gpipe"}),
        "gpipe": (Mesh(pp=gpus), {"schedule": "gpipe"}),
        "1f1b": (Mesh(pp=gpus), {"schedule": "1f1b"}),
    }
    if word in known:
        return known[word]
    try:
        return Mesh.parse(word), {}
    except ValueError:
        raise BadInput(
            f"strategy {text!r} starts with {word!r}; write auto, {', '.join(NAMED)} or a mesh such as pp2.dp2.tp2"
        ) from None


def _options(words: Sequence[str], text: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("mb", "v") and re.fullmatch(r"[1-9]\d*", value):
            found[key] = int(value)
        elif key == "zero" and value in ("0", "1", "2", "3"):
            found[key] = int(value)
        elif value in WORDS.get(key, ()) or key == "groups" and value:
            found[key] = value
        else:
            raise BadInput(
                f"strategy {text!r}: {word!r} is not an option; the options are mb=<number>, zero=0|1|2|3, "
                + ", ".join(f"{name}={'|'.join(words)}" for name, words in WORDS.items())
                + ", v=<stages a rank>, groups=<name>+<name>"
            )
    return found


def plan_by_hand(evaluator: Evaluator, text: str) -> Plan:
    """The plan of a hand-picked strategy: stages of even time, weights cut as Megatron does on tp.

    Raises BadInput when the strategy cannot be used for this model and batch, saying why. A plan that does not fit the
    memory comes back all the same: its estimate says by how much.
    """
    problem = evaluator.problem
    picked = parse_strategy(text, problem.cluster.gpus)
    mesh, batch = picked.mesh, problem.graph.batch_size
    try:
        check_count(batch, mesh.dp, picked.micro_batches or 1)
    except BadInput as error:
        raise BadInput(f"strategy {text!r}: {error}") from None
    chunks = picked.chunks or (2 if picked.schedule == INTERLEAVED else 1)
    if mesh.pp == 1:
        chunks = 1
    if mesh.pp * chunks > evaluator.segments:
        count = evaluator.segments
        has = f"has only {count} segments to place on them" if count > 1 else "cannot be cut into any"
        most = f"pp{count}" if chunks == 1 else f"{count // chunks} ranks with v={chunks}"
        raise BadInput(f"strategy {text!r} asks for {mesh.pp * chunks} stages, but the model {has}; use at most {most}")
    wanted = INTERLEAVED if picked.schedule is None and chunks > 1 else picked.schedule
    micro_batches, notes = _micro_batches(evaluator, picked, wanted)
    schedule = wanted or ("1f1b" if micro_batches >= mesh.pp else "gpipe")
    if mesh.pp == 1:
        schedule = "1f1b"  # one stage runs each micro-batch forward and backward before the next
    if schedule == "1f1b" and micro_batches < mesh.pp:
        if picked.micro_batches is not None:
            raise BadInput(
                f"strategy {text!r}: 1f1b needs at least as many micro-batches as stages ({mesh.pp}); "
                f"use mb={mesh.pp} or more, or schedule=gpipe"
            )
        schedule = "gpipe"
        notes = (*notes, f"run as gpipe: 1f1b needs at least {mesh.pp} micro-batches")
    refusal = check(schedule, mesh.pp, micro_batches, chunks)
    if refusal:
        raise BadInput(f"strategy {text!r}: {refusal}")
    zero, groups = picked.zero if mesh.dp > 1 else 0, _groups(problem.cluster, picked)
    configuration = Configuration(mesh, micro_batches, zero, schedule, chunks, groups)
    if schedule == ZERO_BUBBLE and (configuration.zero > 1 or picked.recompute != "none"):
        raise BadInput(
            f"strategy {text!r}: zero-bubble runs with zero=0 or 1 and recompute=none only; leave them "
            "out, or use another schedule"
        )
    evaluator.split(mesh.dp, micro_batches)
    evaluator.problem.places(configuration)
    if mesh.tp == 1:
        letters = evaluator.letters(configuration, FAST)
    elif picked.sequence == "cut":
        letters = evaluator.letters(configuration, MEGATRON, megatron)
    else:
        letters = evaluator.letters(configuration, MEGATRON_WHOLE, megatron_whole)
    recompute = (picked.recompute,) * evaluator.segments
    if picked.split == "layers":
        stages = even_layers(segment_kinds(evaluator.graph), mesh.pp * chunks)
    else:
        stages = even_stages(evaluator.rank_costs(configuration, letters), recompute, mesh.pp * chunks)
    return evaluator.build_plan(configuration, letters, stages, recompute, text, notes=notes)


def _groups(cluster: Machine, picked: HandPicked) -> tuple[str, ...]:
    """The order of the groups of unequal machines; () for the cluster's own."""
    if not picked.groups:
        return ()
    names = tuple(group.name for group in cluster.groups) if isinstance(cluster, MixedCluster) else ()
    if sorted(picked.groups) != sorted(names):
        there = f"name each of {', '.join(names)} once" if names else f"{cluster.name} has no groups: leave it out"
        raise BadInput(f"strategy {picked.text!r}: groups={'+'.join(picked.groups)} does not fit the cluster; {there}")
    return () if picked.groups == names else picked.groups


def _micro_batches(evaluator: Evaluator, picked: HandPicked, schedule: str | None) -> tuple[int, tuple[str, ...]]:
    """The number of micro-batches, and a note where the model allows only one."""
    batch, mesh = evaluator.problem.graph.batch_size, picked.mesh
    if picked.micro_batches is not None:
        return picked.micro_batches, ()
    if mesh.pp == 1:
        return 1, ()
    rows, most = batch // mesh.dp, MICRO_BATCHES_A_STAGE * mesh.pp
    count = max(d for d in divisors(rows) if d <= most and (d == 1 or batch % mesh.dp == 0))
    if count < min(mesh.pp, rows):
        count = min(most, rows)
    if schedule in IN_ROUNDS:
        count = max(n for n in range(1, count + 1) if n == 1 or (count % n == 0 and in_equal_rounds(mesh.pp, n)))
    if count > 1:
        try:
            evaluator.split(mesh.dp, count)
        except BadInput as error:
            return 1, (f"one micro-batch: {error}",)
    return count, ()


def megatron(node: Node, strategy: Strategy) -> bool:
    """Operators that hold weights must cut them (column, row, heads, vocabulary, channels); the rest is free.

    Shoeybi and others, Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019.
    """
    letters = WEIGHT_LETTERS.get(node.base)
    return letters is None or (strategy.letter != "" and strategy.letter in letters)


def megatron_whole(node: Node, strategy: Strategy) -> bool:
    """The same, with norms on whole sequences, as before Korthikanti and others, 2022."""
    return megatron(node, strategy) and (node.base not in NORMS or strategy.name == "R")


def even_layers(kinds: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    """``count`` stages of equally many (one more in the first ones) of the segments that repeat; ``kinds``: of each segment.

    What stands before the first of them goes to the first stage, what comes after one to its stage.
    """
    repeated = [number for number, kind in enumerate(kinds) if kinds.count(kind) > 1]
    if len(repeated) < count:
        repeated = list(range(len(kinds)))
    each, more = divmod(len(repeated), count)
    firsts = [repeated[stage * each + min(stage, more)] for stage in range(1, count)]
    edges = [0, *firsts, len(kinds)]
    return tuple(zip(edges, edges[1:], strict=False))


def even_stages(costs: RankCosts, recompute: Sequence[str], count: int) -> tuple[tuple[int, int], ...]:
    """The split into ``count`` stages whose slowest takes least (the linear partition problem, by dynamic programming).

    ``costs``: where pipeline ranks differ, of each; stage i is on rank i modulo their number.
    """
    ranks = len(costs) if costs and not isinstance(costs[0], SegmentCost) else 1
    prefixes = []
    for chain in of_each_rank(costs, ranks):
        times = (
            c.forward_s + c.backward_s + c.recomputation(word).extra_s for c, word in zip(chain, recompute, strict=True)
        )
        prefixes.append([0.0, *accumulate(times)])
    n = len(recompute)
    best: list[list[tuple[float, int]]] = [[(prefixes[0][end], 0) for end in range(n + 1)]]
    for stages in range(2, count + 1):
        row = [(float("inf"), 0)] * (n + 1)
        prefix = prefixes[(stages - 1) % ranks]
        for end in range(stages, n + 1):
            row[end] = min(
                (max(best[-1][start][0], prefix[end] - prefix[start]), start) for start in range(stages - 1, end)
            )
        best.append(row)
    ends = [n]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    edges = [0, *reversed(ends)]
    return tuple(zip(edges, edges[1:], strict=False))
