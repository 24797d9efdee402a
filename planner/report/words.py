"""Plans in words: meshes, strategies of operators, runs of modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from planner.ir.mesh import Mesh
from planner.ir.plan import Estimate, OperatorLayout, Plan
from planner.sizes import format_bytes

_WHOLE = {"R": "whole", "RP": "whole, partial gradient", "P": "partial sums"}
_FEATURES = {"o": "output features", "i": "input features, summed", "c": "input features, summed"}
_LETTERS = {
    "linear": _FEATURES,
    "addmm": _FEATURES,
    "mm": _FEATURES,
    "bmm": _FEATURES,
    "matmul": _FEATURES,
    "conv1d": _FEATURES,
    "conv2d": _FEATURES,
    "conv3d": _FEATURES,
    "embedding": {"v": "vocabulary", "h": "features"},
    "scaled_dot_product_attention": {"kv": "heads", "h": "heads", "q": "queries", "b1": "heads", "b2": "batch"},
}


def operator_name(op: str) -> str:
    """``aten.layer_norm.default`` as ``layer_norm``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "aten" else parts[0] if len(parts) == 1 else ".".join(parts[:2])


def strategy_words(op: str, strategy: str, axis: str) -> str:
    """What an operator's strategy on a mesh axis cuts: ``output features``, ``batch``, ``whole``, ``cut along d2``."""
    if strategy in _WHOLE:
        return _WHOLE[strategy]
    if axis == "dp":  # a batch axis: whatever the operator calls it, what is cut is the batch
        return "batch"
    letter, _, inner = strategy.partition("@")
    name = operator_name(op)
    word = _LETTERS.get(name, {}).get(letter)
    if word is None and letter == "v" and "cross_entropy" in name:
        word = "vocabulary"
    word = word or f"cut along {letter}"
    return f"{word}, in each of {inner} parts" if inner else word


def mesh_words(mesh: Mesh, chunks: int = 1) -> str:
    if mesh.size == 1:
        return "one device"
    parts = []
    if mesh.pp > 1:
        parts.append(f"{mesh.pp} pipeline stages" if chunks == 1 else f"{mesh.pp} pipeline ranks of {chunks} stages")
    if mesh.dp > 1:
        parts.append(f"{mesh.dp} shards of the batch")
    if mesh.tp > 1:
        parts.append(f"{mesh.tp}-way split operators")
    return f"{mesh}: {' x '.join(parts)} = {mesh.size} devices"


def schedule_words(plan: Plan) -> str:
    if plan.micro_batches == 1:
        return "one micro-batch" + (": the stages take turns" if plan.mesh.pp > 1 else "")
    if plan.mesh.pp == 1:
        return f"{plan.micro_batches} micro-batches one after the other, gradients summed"
    order = {
        "gpipe": "all forwards, then all backwards",
        "1f1b": "one forward, one backward in turn",
        "interleaved": "one forward, one backward in turn",
        "zero-bubble": "forward, gradient of the input, gradient of the weights in turn",
    }
    several = f", over {plan.chunks} stages a device" if plan.chunks > 1 else ""
    return f"{plan.schedule}: {order[plan.schedule]}{several}"


def zero_words(plan: Plan) -> str:
    if plan.mesh.dp == 1:
        return "not used (one shard of the batch)"
    if plan.zero == 0:
        return "0: every data shard holds all weights, gradients and optimizer state of its stage"
    what = {1: "optimizer state is", 2: "gradients and optimizer state are"}.get(
        plan.zero, "weights, gradients and optimizer state are"
    )
    return f"{plan.zero}: {what} cut over the {plan.mesh.dp} data shards"


def recompute_words(plan: Plan) -> str:
    words = plan.recompute
    if not any(word != "none" for word in words):
        return "none: all activations are kept"
    parts = []
    for kind in ("full", "selective"):
        count = words.count(kind)
        if count:
            labels = collapse(segment.label for segment, word in zip(plan.segments, words, strict=True) if word == kind)
            parts.append(f"{kind} in {'all' if count == len(words) else f'{count} of {len(words)}'} segments: {labels}")
    return "; ".join(parts)


def short_configuration(plan: Plan) -> str:
    """The configuration without the words that say nothing is done: ``dp4.tp2 mb=2 zero=3``."""
    return " ".join(word for word in plan.configuration.split() if word not in ("zero=0", "recompute=none"))


def rank_words(mesh: Mesh, stage: int) -> str:
    first = mesh.rank(pp=stage % mesh.pp)
    last = first + mesh.dp * mesh.tp - 1
    return str(first) if first == last else f"{first}-{last}"


def stages_words(plan: Plan, rank: int) -> str:
    """The stages of a pipeline rank: ``1``, or ``1, 3``."""
    stages = len(plan.estimate.stages)
    return ", ".join(map(str, range(rank, stages, stages // plan.estimate.chunks)))


def limit_words(estimate: Estimate) -> str:
    """``80.0 GB``, or of unequal devices ``80.0 GB or 32.0 GB``."""
    return " or ".join(map(format_bytes, dict.fromkeys(estimate.limits_bytes))) or format_bytes(
        estimate.memory_limit_bytes
    )


def placement_words(plan: Plan) -> str:
    """``stages 0 and 1 on a100, stage 2 on v100``: by pipeline ranks that lie on the same groups of machines."""
    found: list[str] = []
    for where, ranks in groupby(range(plan.mesh.pp), key=lambda rank: plan.placement[rank]):
        mine = list(ranks)
        several = f"{mine[0]} to {mine[-1]}" if len(mine) > 1 else str(mine[0])
        name = "stage" if plan.chunks == 1 else "pipeline rank"
        found.append(f"{name}{'s' if len(mine) > 1 else ''} {several} on {where}")
    return ", ".join(found)


def device_words(plan: Plan, rank: int) -> str:
    """``stage 1``, or ``the device of stages 1, 3``."""
    stages = stages_words(plan, rank)
    return f"the device of stages {stages}" if plan.estimate.chunks > 1 else f"stage {stages}"


def collapse(labels: Iterable[str]) -> str:
    """``layers.0, layers.1, layers.2, head`` as ``layers.0 … layers.2, head``: runs that count up in one number."""
    runs: list[list[str]] = []
    for label in labels:
        if runs and _follows(runs[-1], label):
            runs[-1].append(label)
        else:
            runs.append([label])
    return ", ".join(run[0] if len(run) == 1 else _ends(run) for run in runs)


def _ends(run: Sequence[str]) -> str:
    return f"{run[0]}, {run[1]}" if len(run) == 2 else f"{run[0]} … {run[-1]}"


def _follows(run: Sequence[str], label: str) -> bool:
    place = _counts_up(run[-1], label)
    return place is not None and (len(run) == 1 or place == _counts_up(run[0], run[1]))


def _counts_up(before: str, after: str) -> int | None:
    """Where ``after`` is ``before`` with one number raised by one: the index among its dotted parts."""
    one, two = before.split("."), after.split(".")
    changed = [i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
    if len(one) != len(two) or len(changed) != 1:
        return None
    a, b = one[changed[0]], two[changed[0]]
    return changed[0] if a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1 else None


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def counted(names: Sequence[str]) -> str:
    """``mul, mul, add`` as ``mul x2, add`` (in order of first appearance)."""
    return ", ".join(f"{name} x{n}" if (n := names.count(name)) > 1 else name for name in dict.fromkeys(names))


def relative_module(layout: OperatorLayout, label: str) -> str:
    """The module of an operator as seen from its segment."""
    if label and layout.module == label:
        return "."
    return layout.module.removeprefix(f"{label}.") if label else layout.module
