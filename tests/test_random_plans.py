"""Whole models under random plans: loss, gradients and buffers equal those of one device.

A plan picks any strategy for any operator and any storage for any weight, equal layers alike, so rules meet in ways that no
sensible plan has: a rule that is wrong only together with its neighbours shows here. The batch axes, whose strategies are
derived and not searched, run as the planner cuts them.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from planner.batch import MICRO, leaf_pair, split_batch
from planner.diagnosis import first_difference
from planner.errors import BadInput
from planner.interpreter import AxisOf, Result, run_sharded, run_whole, widened
from planner.ir.graph import Graph, Node, Value
from planner.ir.layout import COMMUNICATING, PARTIAL, REPLICATED, WHOLE, Pair
from planner.layouts import leaf_classes
from planner.segments import cut_into_segments, node_classes
from planner.shard import SHARED, conversion_moves, shard
from planner.sharding_rules import Rule, Special, Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.trace import Batch
from tests.models import MODELS
from tests.operator_graphs import from_model
from tests.reference import assert_same

TOLERANCE = 1e-9
PLANS = 12
MORE_PLANS = 60
HUGGING_FACE = {"hf_llama", "hf_gpt2", "hf_bert", "hf_vit"}
COUPLED = {"resnet_digits"}  # BatchNorm writes its statistics in every forward pass


class Model(NamedTuple):
    graph: Graph
    tensors: dict[str, Tensor]
    reference: Result


@cache
def model(name: str) -> Model:
    case = MODELS[name](torch.float64)
    traced = from_model(case.model, Batch(case.inputs, case.kwargs, case.target), case.loss_fn)
    graph = cut_into_segments(widened(traced.graph))
    tensors = {k: x.double() if x.is_floating_point() else x for k, x in traced.tensors.items()}
    return Model(graph, tensors, run_whole(graph, tensors))


# --- plans ------------------------------------------------------------------------------------------------------------


def random_plan(graph: Graph, k: int, seed: int) -> tuple[dict[str, Strategy], dict[str, Pair]]:
    """A strategy for every node and a pair for every leaf. Odd seeds also cut what is made from inputs alone."""
    draw = random.Random(seed)
    free = seed % 2 == 1
    classes, cuts = node_classes(graph), find_cuts(graph)
    written = {value: buffer for buffer, value in graph.writes}
    options = {n.name: strategies(rule_of(n, graph.values), n, graph.values, k, cuts[n.name]) for n in graph.nodes}
    names: dict[object, str] = {}
    chosen: dict[str, Strategy] = {}
    for node in graph.nodes:
        names.setdefault(classes[node.name], _pick(draw, node, options[node.name], written, free).name)
        chosen[node.name] = next(s for s in options[node.name] if s.name == names[classes[node.name]])
    by_leaf, held = leaf_classes(graph), {}
    leaves: dict[str, Pair] = {}
    for leaf in graph.leaves:
        pairs = {WHOLE if leaf.value.differentiable else WHOLE.without_gradient()}
        if free or leaf.kind in ("parameter", "buffer"):
            for node in graph.consumers[leaf.name]:
                for s in options[node.name]:
                    pairs |= {p for name, p in zip(node.operands, s.operands, strict=True) if name == leaf.name}
        kept = sorted(
            (p for p in pairs if p.is_shard or p == REPLICATED or p in (WHOLE, Pair(WHOLE.value, None))), key=str
        )
        leaves[leaf.name] = held.setdefault(by_leaf[leaf.name], draw.choice(kept))
    for buffer, value in graph.writes:
        producer = graph.producers[value]
        leaves[buffer] = chosen[producer.name].outputs[[v.name for v in producer.outputs].index(value)]
    return chosen, leaves


def _pick(
    draw: random.Random, node: Node, options: tuple[Strategy, ...], written: Mapping[str, str], free: bool
) -> Strategy:
    """Any strategy whose written results are no partial sums: a buffer is stored whole or sharded."""
    allowed = [
        s
        for s in options
        if not any(v.name in written and p.value.kind == "P" for v, p in zip(node.outputs, s.outputs, strict=True))
    ]
    if node.segment == SHARED and not free:
        allowed = [s for s in allowed if s.name == "R"]
    return draw.choice(allowed)


def check_plan(name: str, k: int, seed: int) -> None:
    graph, tensors, reference = model(name)
    chosen, leaves = random_plan(graph, k, seed)
    sharded = shard(graph, "tp", k, chosen, leaves)
    axis = AxisOf("tp", k, leaves, sharded.loss)
    try:
        result = run_sharded(sharded.graph, [axis], tensors)
    except AssertionError as error:
        raise AssertionError(f"{name} on {k} devices, plan {seed}: {error}") from error
    try:
        assert_same(result, reference, TOLERANCE)
    except AssertionError as error:
        pairs = {name: (pair,) for name, pair in sharded.pairs.items()}
        first = first_difference(graph, result.values, reference.values, [axis], pairs, 1e-9)
        raise AssertionError(f"{name} on {k} devices, plan {seed}: {error}; {first}") from error


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_model(name: str) -> None:
    case = MODELS[name](torch.float64)
    loss = case.loss()
    loss.backward()
    reference, graph = model(name).reference, model(name).graph
    tolerance = 1e-6 if name in HUGGING_FACE else 1e-12
    parameters = dict(case.model.named_parameters())
    assert abs(loss.item() - reference.loss.item()) <= tolerance * abs(loss.item())
    for leaf in graph.leaves_of("parameter"):
        expected, found = parameters[leaf.target].grad, reference.gradients[leaf.name]
        assert torch.allclose(found, expected, 0, tolerance * max(expected.abs().max().item(), 1e-3)), leaf.target


@pytest.mark.parametrize("seed", range(PLANS))
@pytest.mark.parametrize("name", MODELS)
def test_random_plan(name: str, seed: int) -> None:
    check_plan(name, 2, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PLANS, PLANS + int(os.environ.get("RANDOM_PLANS", MORE_PLANS))))
@pytest.mark.parametrize("name", MODELS)
def test_more_random_plans(name: str, seed: int) -> None:
    check_plan(name, 2 if seed % 3 else 4, seed)


def test_random_plans_hold_every_conversion() -> None:
    """R:R, R:P, P:R and S:S into each other, S into another S: thirteen, and without a gradient R, P, S likewise."""
    seen = set()
    for name in ("gpt_tied", "resnet_digits", "hf_llama"):
        graph = model(name).graph
        for seed in range(PLANS):
            for node in shard(graph, "tp", 2, *random_plan(graph, 2, seed)).graph.nodes:
                if node.op == "convert":
                    seen.add(tuple(re.sub(r"S\(.*?\)", "S", text.strip()) for text in node.args[2].split("->")))
    pairs = ("R:R", "R:P", "P:R", "S:S")
    values = ("R:-", "P:-", "S:-")
    every = {(a, b) for kinds in (pairs, values) for a in kinds for b in kinds if a != b or a[0] == "S"}
    assert every - seen <= {("P:-", "P:-"), ("S:-", "S:-")}
    assert ("S:S", "S:S") in seen


# --- the batch axes ---------------------------------------------------------------------------------------------------


def batch_axes(graph: Graph, dp: int, micro_batches: int) -> tuple[Graph, list[AxisOf]]:
    """One dp rank's micro-batch, and its axes. Micro-batches follow one another; here they lie side by side."""
    split, over_dp = split_batch(graph, dp, micro_batches), split_batch(graph, dp, 1).graph
    axes = []
    for axis, count, before, partial in (
        ("dp", dp, graph, split.loss_is_partial_on_dp),
        (MICRO, micro_batches, over_dp, split.loss_is_partial_on_micro),
    ):
        if count > 1:
            pairs = {leaf.name: leaf_pair(before, leaf.name) for leaf in before.leaves}
            axes.append(AxisOf(axis, count, pairs, PARTIAL if partial else WHOLE))
    return split.graph, axes


def moves(graph: Graph, axis: str) -> list[tuple[str, str, Node]]:
    """(forward move, backward move, node) of the conversions on an axis; the backward is 'none' without a gradient."""
    found = [(conversion_moves(node), node) for node in graph.nodes if node.op == "convert" and node.args[1] == axis]
    return [
        (forward, backward if node.output.differentiable else "none", node) for (_, forward, backward), node in found
    ]


@pytest.mark.parametrize(("dp", "micro_batches"), [(2, 1), (8, 1), (1, 2), (1, 8), (2, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_cutting_the_batch(name: str, dp: int, micro_batches: int) -> None:
    """Data parallelism moves gradients and counts, micro-batches counts alone; the loss is a sum over both."""
    graph, tensors, reference = model(name)
    if name in COUPLED and micro_batches > 1:
        with pytest.raises(BadInput, match="running_mean"):
            split_batch(graph, dp, micro_batches)
        return
    local, axes = batch_axes(graph, dp, micro_batches)
    assert all(axis.loss == PARTIAL for axis in axes)
    assert_same(run_sharded(local, axes, tensors), reference, TOLERANCE)
    for axis in axes:
        for forward, backward, node in moves(local, axis.name):
            assert backward not in COMMUNICATING, node
            assert forward not in COMMUNICATING or (forward == "all_reduce" and "count" in node.name), node


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_random_plan_inside_a_cut_batch(name: str, seed: int) -> None:
    """dp, then micro-batches, then any plan over tp: eight local programs."""
    graph, tensors, reference = model(name)
    local, axes = batch_axes(graph, 2, 1 if name in COUPLED else 2)
    chosen, leaves = random_plan(local, 2, seed)
    sharded = shard(local, "tp", 2, chosen, leaves)
    found = run_sharded(sharded.graph, [*axes, AxisOf("tp", 2, leaves, sharded.loss)], tensors)
    assert_same(found, reference, TOLERANCE)


# --- the checks themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "op", "change"),
    [
        ("gpt_tied", "layer_norm", {"whole": frozenset()}),
        ("gpt_tied", "linear", {"additive": frozenset()}),
        (
            "resnet_digits",
            "batch_norm",
            {"special": dict.fromkeys(("s0", "s1"), Special("batch_norm", (None, WHOLE, WHOLE)))},
        ),
        ("hf_llama", "mean", {"mean": False}),
    ],
)
def test_a_wrong_rule_is_found(name: str, op: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(node: Node, values: Mapping[str, Value]) -> Rule:
        found = rule_of(node, values)
        return replace(found, **change) if node.base == op else found  # type: ignore[arg-type]

    monkeypatch.setitem(globals(), "rule_of", wrong)
    failed = 0
    for seed in range(PLANS):
        try:
            check_plan(name, 2, seed)
        except (AssertionError, RuntimeError):
            failed += 1
    assert failed > 1
