"""Why a run under a plan is not equal to one device: which operator first makes a tensor that is not.

Three things may be wrong, and are told apart in this process, without ranks:

    tracing     the graph run whole is not the model: tracing has changed or dropped something
    sharding    the plan's graph of one device, run shard by shard (planner.interpreter), is not the graph run whole: the
                first tensor that differs, forward and then backward, names the operator whose rule or cut is wrong
    running     both are equal; then what differs comes from the program's text, from the processes (a collective, a sum of
                gradients, the optimizer), or from rounding

The sharded graphs are replayed in float64, so that what differs there is never rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.batch import batch_strategies, leaf_pair
from planner.equality import TOLERANCES, distance, loss_error, relative_errors
from planner.interpreter import (
    AxisOf,
    NotReplicated,
    World,
    run_sharded,
    run_whole,
    widened,
    widened_tensor,
)
from planner.ir.graph import MODULE, Graph, Node
from planner.ir.layout import Pair, Placement, R
from planner.ir.mesh import MICRO
from planner.ir.plan import Plan
from planner.layouts import recall
from planner.report.verification import Cause
from planner.report.words import operator_name
from planner.segments import cut_into_segments
from planner.shard import shard
from planner.single_device import SingleDevice

MOST_OPERATORS = 4


def diagnose(
    graph: Graph,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    reference: SingleDevice,
    differing: tuple[str, str],
    tolerance: float,
    model: torch.nn.Module | None = None,
) -> Cause:
    """``graph``: as traced. ``tensors``: of its leaves, by name. ``differing``: kind and name of the first tensor off.

    ``model``: whose modules run as they are, where the graph has such; then nothing is replayed in another dtype.
    """
    try:
        traced = _against_model(graph, tensors, reference, tolerance, model)
    except Exception as error:
        return _not_replayed(graph, differing, f"the traced graph cannot be run in this process: {_first_line(error)}")
    if traced is not None:
        return traced
    try:
        with_plan = _against_whole(graph, plan, tensors, tolerance, model)
    except Exception as error:
        return _not_replayed(
            graph, differing, f"the plan's graphs cannot be replayed in this process: {_first_line(error)}"
        )
    return with_plan if with_plan is not None else _running(graph, differing)


# --- tracing ----------------------------------------------------------------------------------------------------------


def _against_model(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    reference: SingleDevice,
    tolerance: float,
    model: torch.nn.Module | None,
) -> Cause | None:
    result = run_whole(graph, tensors, model)
    names = {leaf.name: leaf.target for leaf in graph.leaves}
    error = loss_error(float(result.loss), reference.losses[0])
    if error > tolerance:
        return Cause(
            "tracing",
            f"the loss, {error:.1e} off",
            (_operator(graph.producers[graph.loss]),),
            "the graph is not the model",
        )
    gradients = {names[name]: gradient for name, gradient in result.gradients.items()}
    expected = {name: gradient for name, gradient in reference.gradients.items() if name in gradients}
    errors = relative_errors(gradients, expected)
    for name in backward_order(graph):
        if errors.get(name, 0.0) > tolerance:
            readers = graph.consumers[next(leaf.name for leaf in graph.leaves if leaf.target == name)]
            return Cause(
                "tracing",
                f"the gradient of {name}, {errors[name]:.1e} off",
                _operators(readers),
                "the graph is not the model",
            )
    return None


def backward_order(graph: Graph) -> list[str]:
    """Targets of the trainable leaves in the order in which backward completes their gradients."""
    first_read: dict[str, int] = {}
    for i, node in reversed(list(enumerate(graph.nodes))):
        for name in node.operands:
            first_read[name] = i
    trainable = [leaf for leaf in graph.leaves if leaf.trainable]
    return [leaf.target for leaf in sorted(trainable, key=lambda leaf: -first_read.get(leaf.name, -1))]


# --- sharding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """A graph and what one device runs of it. ``pairs``: of every value of ``whole``, one an axis of ``axes``."""

    whole: Graph
    local: Graph
    axes: tuple[AxisOf, ...]
    pairs: Mapping[str, tuple[Pair, ...]]


def layers(graph: Graph, plan: Plan) -> Layers:
    """``graph`` cut over dp, micro-batches and tp, as the plan's program is made (planner.lower)."""
    whole = local = cut_into_segments(graph)
    axes: list[AxisOf] = []
    pairs: dict[str, tuple[Pair, ...]] = dict.fromkeys(whole.values, ())

    def cut(name: str, k: int, choose: Callable[[Graph], tuple[Mapping[str, object], Mapping[str, Pair]]]) -> None:
        nonlocal local
        if k == 1:
            return
        strategies, leaves = choose(local)
        done = shard(local, name, k, strategies, leaves)  # type: ignore[arg-type]
        axes.append(AxisOf(name, k, leaves, done.loss))
        pairs.update({value: (*pairs[value], done.pairs[value]) for value in pairs})
        local = done.graph

    def over_batch(k: int, time: bool) -> Callable[[Graph], tuple[Mapping[str, object], Mapping[str, Pair]]]:
        return lambda g: (batch_strategies(g, k, time=time), {leaf.name: leaf_pair(g, leaf.name) for leaf in g.leaves})

    dp, micro_batches = plan.mesh.dp, plan.micro_batches
    if graph.batch_size % (dp * micro_batches):  # pieces of unequal size: each row alone, by the same rules
        dp, micro_batches = graph.batch_size, 1
    cut("dp", dp, over_batch(dp, False))
    cut(MICRO, micro_batches, over_batch(micro_batches, True))
    cut("tp", plan.mesh.tp, lambda g: recall(g, plan.layouts, plan.mesh.tp))
    return Layers(whole, local, tuple(axes), pairs)


def _against_whole(
    graph: Graph,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    tolerance: float,
    model: torch.nn.Module | None,
) -> Cause | None:
    wide = dict(tensors)
    if not any(node.op == MODULE for node in graph.nodes):
        graph, tolerance = widened(graph), TOLERANCES["float64"]
        wide = {name: widened_tensor(tensor) for name, tensor in tensors.items()}
    found = layers(graph, plan)
    if not found.axes:
        return None
    reference = run_whole(found.whole, wide, model)
    values: dict[str, list[Tensor]] = {}
    failure = ""
    try:
        run_sharded(found.local, found.axes, wide, values, model)
    except Exception as error:
        failure = _first_line(error)
    off = first_difference(found.whole, values, reference.values, found.axes, found.pairs, tolerance)
    if off is not None:
        return _sharding(found, off)
    if not failure:
        return None
    stopped = next((node for node in found.local.nodes if node.name not in values), found.local.nodes[-1])
    reader = stopped
    while reader.op == "convert" and found.local.consumers[reader.name]:
        reader = found.local.consumers[reader.name][0]
    return Cause("sharding", f"%{stopped.name} cannot be made", (_operator(reader),), failure)


def _sharding(found: Layers, off: Difference) -> Cause:
    whole = found.whole
    layout = ", ".join(f"{pair} on {axis.name}" for axis, pair in zip(found.axes, found.pairs[off.name], strict=True))
    what = f"the {'gradient' if off.is_gradient else 'value'} of %{off.name} ({layout}), {off.text}"
    if not off.is_gradient:
        made = [whole.producers[off.name]] if off.name in whole.producers else list(whole.consumers[off.name])
        return Cause("sharding", what, _operators(made), "its sharding rule, or a conversion of its operands, is wrong")
    readers = [node for node in whole.consumers[off.name] if node.output.differentiable]
    return Cause("sharding", what, _operators(readers), "its backward on shards, or a conversion there, is wrong")


# --- running ----------------------------------------------------------------------------------------------------------


RIGHT = "the traced graph is the model, and replayed shard by shard it is right"
ROUNDED = "or is rounding (precision='fp64' tells)"


def _running(graph: Graph, differing: tuple[str, str]) -> Cause:
    kind, name = differing
    if kind == "parameter" or (kind == "loss" and name != "step 1"):
        why = f"{RIGHT}, and so are all gradients of the first step; so the difference arises in the optimizer or a later step"
        return Cause("running", _spoken(differing), (), f"{why}, {ROUNDED}")
    why = f"{RIGHT}; so the difference arises in the ranks' processes"
    return Cause("running", _spoken(differing), operators_of(graph, kind, name), f"{why}, {ROUNDED}")


def _not_replayed(graph: Graph, differing: tuple[str, str], why: str) -> Cause:
    return Cause("unknown", _spoken(differing), operators_of(graph, *differing), why)


def _spoken(differing: tuple[str, str]) -> str:
    kind, name = differing
    return f"the {kind} of {name}" if kind in ("loss", "gradient") else f"{kind} {name}"


def operators_of(graph: Graph, kind: str, name: str) -> tuple[str, ...]:
    """The operators a tensor comes from: what reads a parameter (its gradient), writes a buffer, or makes the loss."""
    if kind == "loss":
        return (_operator(graph.producers[graph.loss]),)
    leaf = next((leaf for leaf in graph.leaves if name in (leaf.target, *leaf.aliases)), None)
    if leaf is None:
        return ()
    writers = [
        graph.producers[value] for buffer, value in graph.writes if buffer == leaf.name and value in graph.producers
    ]
    return _operators(writers or graph.consumers[leaf.name])


def _operators(nodes: Sequence[Node]) -> tuple[str, ...]:
    names = list(dict.fromkeys(map(_operator, nodes)))
    more = len(names) - MOST_OPERATORS
    return (*names[:MOST_OPERATORS], f"{more} more") if more > 0 else tuple(names)


def _operator(node: Node) -> str:
    return f"{operator_name(node.op)} in {node.module or 'the model'}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# --- comparison -------------------------------------------------------------------------------------------------------

# Entries of masks are no measure of a tensor's size.
MASKED = 1e30
ROUNDING = 1e-6


@dataclass(frozen=True)
class Difference:
    """``error``: of the largest entry of the whole tensor; inf where shapes differ or ranks that should agree do not."""

    name: str
    is_gradient: bool
    error: float
    text: str

    def __str__(self) -> str:
        return f"{'gradient' if self.is_gradient else 'value'} of {self.name}: {self.text}"


def first_difference(
    graph: Graph,
    found: Mapping[str, list[Tensor]],
    whole: Mapping[str, Tensor],
    axes: Sequence[AxisOf],
    pairs: Mapping[str, Sequence[Pair]],
    tolerance: float,
) -> Difference | None:
    """The first value, in the order of ``graph``, that a sharded run gets wrong; else the last gradient; else None.

    ``graph``: the whole one. ``found`` and ``whole``: ``values`` of the two runs (``found`` may end early). ``pairs``: of
    each value of ``graph``, one an axis.
    """
    world = World(tuple(axes))
    for name in graph.values:
        if name in found:
            floor = ROUNDING * max((_size(whole[x]) for x in _operands(graph, name)), default=0.0)
            placements = [pair.value for pair in pairs[name]]
            error, text = _compare(world, [x.detach() for x in found[name]], placements, whole[name].detach(), floor)
            if error > tolerance:
                return Difference(name, False, error, text)
    if any(name not in found for name in graph.values):
        return None  # the run did not come to its gradients
    gradients = {name: x.grad for name, x in whole.items() if x.requires_grad and x.grad is not None}
    floor = ROUNDING * max((_size(g) for g in gradients.values()), default=0.0)
    for name in reversed(list(graph.values)):
        if name not in gradients or name not in found or any(pair.gradient is None for pair in pairs[name]):
            continue
        parts = [x.grad if x.grad is not None else torch.zeros_like(x) for x in found[name]]
        error, text = _compare(world, parts, [pair.gradient or R for pair in pairs[name]], gradients[name], floor)
        if error > tolerance:
            return Difference(name, True, error, text)
    return None


def _operands(graph: Graph, name: str) -> Sequence[str]:
    return graph.producers[name].operands if name in graph.producers else ()


def _size(tensor: Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    entries = tensor.detach().abs()
    return float(torch.where(entries < MASKED, entries, torch.zeros_like(entries)).max())


def _compare(
    world: World, parts: list[Tensor], placements: Sequence[Placement], expected: Tensor, floor: float
) -> tuple[float, str]:
    try:
        found = world.combine(parts, placements)
    except NotReplicated as error:
        return math.inf, str(error)
    if found.shape != expected.shape:
        return math.inf, f"shape {list(found.shape)} instead of {list(expected.shape)}"
    off = distance(found, expected)
    scale = max(_size(expected), floor) if expected.is_floating_point() or expected.is_complex() else 0.0
    error_ = off / scale if scale else off
    return error_, f"off by {error_:.1e} of its largest entry"
