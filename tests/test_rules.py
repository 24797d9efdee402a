"""Every strategy of every operator, run: 2 and 4 devices give the same value, gradients and buffers as one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner.interpreter import AxisOf, NotReplicated, run_sharded, run_whole
from planner.ir.graph import Graph, Leaf, Node, Ref, Value
from planner.ir.layout import PARTIAL, REPLICATED, WHOLE, Pair, shard
from planner.normalise import count_from_front
from planner.shard import shard as shard_graph
from planner.sharding_rules import Rule, Special, Strategy, has_rule, rule_of, strategies, unknown_rule
from planner.trace import Batch
from tests import rule_cases, rule_cases_sums
from tests.models import seeded
from tests.operator_graphs import Case, Traced, from_model, trace_cases
from tests.reference import assert_same

FAMILIES = {
    "contractions": rule_cases.contractions,
    "reductions": rule_cases.reductions,
    "losses": rule_cases.losses,
    "elementwise": rule_cases.elementwise,
    "views": rule_cases.views,
    "writes": rule_cases.writes,
    "spellings": rule_cases.spellings,
    "sums": rule_cases_sums.sums,
}
TOLERANCE = 1e-12


@cache
def cases(family: str) -> dict[str, Case]:
    with seeded(0):
        return FAMILIES[family]()


@cache
def graphs(family: str) -> dict[str, Traced]:
    return trace_cases(cases(family))


ALL = [(family, name) for family in FAMILIES for name in cases(family)]


def whole(graph: Graph) -> dict[str, Pair]:
    return {leaf.name: WHOLE if leaf.value.differentiable else WHOLE.without_gradient() for leaf in graph.leaves}


def options(graph: Graph, node: Node, k: int, rule: Rule | None = None) -> tuple[Strategy, ...]:
    """All strategies, letters cut at every divisor of their sizes too."""
    rule = rule or rule_of(node, graph.values)
    inner = {letter: frozenset(n for n in range(2, size) if size % n == 0) for letter, size in rule.sizes.items()}
    return strategies(rule, node, graph.values, k, inner)


def whole_strategies(graph: Graph) -> dict[str, Strategy]:
    return {node.name: strategies(unknown_rule(node), node, graph.values, 2)[0] for node in graph.nodes}


def check_node(traced: Traced, node: Node, k: int, rule: Rule | None = None) -> int:
    """Every strategy of one node, the others whole, against the whole run; how many there were."""
    graph = traced.graph
    reference = run_whole(graph, traced.tensors)
    found = options(graph, node, k, rule)
    made = {value.name: index for index, value in enumerate(node.outputs)}
    for strategy in found:
        stored = whole(graph)
        stored |= {buffer: strategy.outputs[made[value]] for buffer, value in graph.writes if value in made}
        if any(stored[buffer].value.kind == "P" for buffer, _ in graph.writes):
            continue
        sharded = shard_graph(graph, "tp", k, whole_strategies(graph) | {node.name: strategy}, stored)
        try:
            found_values = run_sharded(sharded.graph, [AxisOf("tp", k, stored, sharded.loss)], traced.tensors)
            assert_same(found_values, reference, TOLERANCE)
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            raise AssertionError(f"{node}\non {k} devices, strategy {strategy}: {error}") from error
    return len(found)


def check_unequal(traced: Traced, node: Node, shares: tuple[int, ...]) -> int:
    """Every strategy of one node that can be cut in proportion to ``shares``, as the batch is; how many there were."""
    graph, units, tried = traced.graph, sum(shares), 0
    reference = run_whole(graph, traced.tensors)
    for strategy in options(graph, node, units):
        if not strategy.letter or strategy.local:
            continue  # vocabularies and channels are cut in equal parts only
        chosen = whole_strategies(graph) | {node.name: strategy}
        made = [shard_graph(graph, "dp", units, chosen, whole(graph), share) for share in shares]
        axis = AxisOf("dp", len(shares), whole(graph), made[0].loss, shares)
        try:
            assert_same(run_sharded([x.graph for x in made], [axis], traced.tensors), reference, TOLERANCE)
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            raise AssertionError(f"{node}\nin shares of {shares}, strategy {strategy}: {error}") from error
        tried += 1
    return tried


def nodes_of(case: Case, graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.base == case.op]


def around(case: Case, graph: Graph) -> list[Node]:
    """The nodes a case is for: all but those that sum its results up."""
    summing = {"aten.mul.Tensor", "aten.sum.default", "aten.add.Tensor"}
    return [node for node in graph.nodes if node.op not in summing or node.base == case.op]


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{family}-{name}" for family, name in ALL])
def test_every_strategy_gives_what_one_device_gives(family: str, name: str, k: int) -> None:
    traced = graphs(family)[name]
    nodes = around(cases(family)[name], traced.graph)
    assert nodes and sum(check_node(traced, node, k) for node in nodes) >= len(nodes)


@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{family}-{name}" for family, name in ALL])
def test_unequal_shares_give_what_one_device_gives(family: str, name: str) -> None:
    traced = graphs(family)[name]
    nodes = around(cases(family)[name], traced.graph)
    tried = sum(check_unequal(traced, node, shares) for node in nodes for shares in ((1, 3), (3, 1, 4)))
    cut = any(letter for node in nodes for s in options(traced.graph, node, 4) for letter in s.letter if not s.local)
    assert tried or not cut


@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{family}-{name}" for family, name in ALL])
def test_letters_that_can_be_cut(family: str, name: str) -> None:
    case, graph = cases(family)[name], graphs(family)[name].graph
    offered = [strategies(rule_of(node, graph.values), node, graph.values, 2) for node in nodes_of(case, graph)]
    assert set(case.cut.split()) in [{s.letter for s in found if s.letter} for found in offered]


# --- operators that are no plain function -----------------------------------------------------------------------------


@cache
def batch_norm() -> Traced:
    with seeded(0):
        model = nn.BatchNorm2d(8).double()
        x, scale = torch.randn(8, 8, 4, 4).double(), torch.randn(8, 8, 4, 4).double()
        nn.init.normal_(model.weight), nn.init.normal_(model.bias), nn.init.normal_(model.running_mean)
        entry = nn.Conv2d(8, 8, 1, bias=False).double()
    return from_model(nn.Sequential(entry, model), Batch((x,), {}, scale), lambda y, scale: (y * scale).sum())


@pytest.mark.parametrize("k", [2, 4])
def test_batch_norm_in_training_and_its_buffers(k: int) -> None:
    traced = batch_norm()
    (node,) = (n for n in traced.graph.nodes if n.op == "batch_norm")
    letters = {s.letter for s in options(traced.graph, node, k)}
    assert letters == {"", "n", "c", "s0", "s1"} and len(traced.graph.writes) == 3  # mean, variance, steps
    check_node(traced, node, k)


def test_buffers_of_the_whole_run_are_those_of_torch() -> None:
    traced = batch_norm()
    reference = run_whole(traced.graph, traced.tensors)
    model = nn.BatchNorm2d(8).double()
    names = {leaf.target: leaf.name for leaf in traced.graph.leaves}
    model.running_mean.copy_(traced.tensors[names["1.running_mean"]])
    model(reference.values[next(n for n in traced.graph.nodes if n.op == "batch_norm").operands[0]].detach())
    assert torch.allclose(reference.buffers[names["1.running_mean"]], model.running_mean, 0, 1e-12)
    assert torch.allclose(reference.buffers[names["1.running_var"]], model.running_var, 0, 1e-12)


def by_hand(node: Node, leaves: tuple[Leaf, ...]) -> Traced:
    """``node`` between leaves and a weighted sum: for operators and shapes that no trace gives."""
    out = node.output
    nodes = (
        node,
        Node("aten.mul.Tensor", (Ref(out.name), Ref("scale")), (replace(out, name="scaled"),)),
        Node("aten.sum.default", (Ref("scaled"),), (replace(out, name="loss", shape=()),)),
    )
    graph = Graph((*leaves, Leaf("input", "scale", replace(out, name="scale", differentiable=False))), nodes, "loss")
    with seeded(2):
        return Traced(graph, {leaf.name: torch.randn(leaf.value.shape).double() for leaf in graph.leaves})


def weight(name: str, *shape: int) -> Leaf:
    return Leaf("parameter", name, Value(name, shape, "float64", True), trainable=True)


def result(*shape: int) -> Value:
    return Value("out", shape, "float64", True)


@pytest.mark.parametrize("k", [2, 4])
def test_dropout_of_nothing(k: int) -> None:
    traced = by_hand(Node("dropout", (Ref("x"), 0.0), (result(4, 8),)), (weight("x", 4, 8),))
    assert check_node(traced, traced.graph.nodes[0], k) == {2: 5 + 3, 4: 3 + 3}[k]  # cuts of 4 and 8; R, RP, P


def test_attention_with_dropout_of_nothing() -> None:
    names = ("q", "k", "v")
    leaves = tuple(weight(name, 4, 8, 8, 4) for name in names)
    node = Node("attention_with_dropout", (*map(Ref, names), None, 0.0), (result(4, 8, 8, 4),))
    traced = by_hand(node, leaves)
    assert {s.letter for s in options(traced.graph, node, 2)} == {"", "b1", "b2", "q"}
    check_node(traced, node, 2)


@pytest.mark.parametrize("k", [2, 4])
def test_grouped_products(k: int) -> None:
    """Rows of four groups, one of them empty, and rows that belong to none."""
    ends = Leaf("constant", "ends", Value("ends", (4,), "int32"))
    node = Node("grouped_mm", (Ref("x"), Ref("w"), Ref("ends")), (result(8, 12),))
    traced = by_hand(node, (weight("x", 8, 8), weight("w", 4, 8, 12), ends))
    traced.tensors["ends"] = torch.tensor([3, 3, 5, 7], dtype=torch.int32)
    assert {s.letter for s in strategies(rule_of(node, traced.graph.values), node, traced.graph.values, k)} == {
        "",
        "i",
        "o",
    }
    check_node(traced, node, k)


# --- shapes drawn at random -------------------------------------------------------------------------------------------


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))

    def grouped(order: list[int]) -> tuple[int, ...]:
        ends = sorted(draw(st.sets(st.integers(1, len(order)), max_size=4)) | {len(order)})
        starts = [0, *ends[:-1]]
        return tuple(math.prod(order[a:b]) for a, b in zip(starts, ends, strict=True))

    return grouped(factors), grouped(draw(st.permutations(factors)))


@settings(max_examples=60)
@given(reshapes(), st.sampled_from([2, 3, 4]))
def test_views_between_any_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]], k: int) -> None:
    source, target = shapes
    node = Node("aten.view.default", (Ref("x"), target), (result(*target),))
    check_node(by_hand(node, (weight("x", *source),)), node, k)


@settings(max_examples=40)
@given(st.integers(1, 24), st.integers(-24, 24), st.integers(1, 24), st.sampled_from([2, 4]))
def test_slices_of_any_kind(size: int, start: int, length: int, k: int) -> None:
    end = start + length
    count = len(range(size)[start:end])
    node = Node("aten.slice.Tensor", (Ref("x"), 1, start, end), (result(2, count),))
    traced = by_hand(node, (weight("x", 2, size),))
    traced = traced._replace(graph=count_from_front(traced.graph))
    assert rule_of(traced.graph.nodes[0], traced.graph.values).letters()
    check_node(traced, traced.graph.nodes[0], k)


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    full = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4)))
    found = []
    for _ in range(2):
        kept = [size if draw(st.booleans()) else 1 for size in full]
        found.append(tuple(kept[draw(st.integers(0, len(full))) :]))
    return found[0], found[1], torch.broadcast_shapes(*found)


@settings(max_examples=40)
@given(broadcasts(), st.sampled_from(["add", "mul", "div"]), st.sampled_from([2, 4]))
def test_broadcasting_of_any_kind(shapes: tuple[tuple[int, ...], ...], op: str, k: int) -> None:
    left, right, full = shapes
    node = Node(f"aten.{op}.Tensor", (Ref("x"), Ref("y")), (result(*full),))
    check_node(by_hand(node, (weight("x", *left), weight("y", *right))), node, k)


# --- conversions ------------------------------------------------------------------------------------------------------

PAIRS = (WHOLE, REPLICATED, PARTIAL, shard(0), shard(1), shard(1, 2), shard(1, 4))


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("source", PAIRS, ids=str)
@pytest.mark.parametrize("target", PAIRS, ids=str)
def test_every_conversion(source: Pair, target: Pair, k: int) -> None:
    """A value made in one pair and read in another, twice: value and gradient are those of the whole."""
    negated, doubled = Value("n", (4, 16), "float64", True), Value("out", (4, 16), "float64", True)
    traced = by_hand(Node("aten.add.Tensor", (Ref("n"), Ref("n")), (doubled,)), (weight("x", 4, 16),))
    graph = replace(traced.graph, nodes=(Node("aten.neg.default", (Ref("x"),), (negated,)), *traced.graph.nodes))
    traced = traced._replace(graph=graph)

    def linear(name: str, count: int, pair: Pair) -> dict[str, Strategy]:
        return {name: Strategy(str(pair), (pair,) * count, (pair,))}

    chosen = whole_strategies(graph) | linear("n", 1, source) | linear("out", 2, target)
    sharded = shard_graph(graph, "tp", k, chosen, whole(graph))
    converts = [node for node in sharded.graph.nodes if node.op == "convert" and node.args[0] == Ref("n")]
    assert len(converts) == (source != target)
    found = run_sharded(sharded.graph, [AxisOf("tp", k, whole(graph), sharded.loss)], traced.tensors)
    assert_same(found, run_whole(graph, traced.tensors), TOLERANCE)


STORED = (WHOLE, REPLICATED, shard(0), shard(1), shard(1, 2))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_leaves_stored_in_every_pair(stored: Pair) -> None:
    traced = by_hand(Node("aten.exp.default", (Ref("x"),), (result(4, 16),)), (weight("x", 4, 16),))
    graph = traced.graph
    for strategy in options(graph, graph.nodes[0], 2):
        pairs = whole(graph) | {"x": stored}
        sharded = shard_graph(graph, "tp", 2, whole_strategies(graph) | {"out": strategy}, pairs)
        found = run_sharded(sharded.graph, [AxisOf("tp", 2, pairs, sharded.loss)], traced.tensors)
        assert_same(found, run_whole(graph, traced.tensors), TOLERANCE)


# --- two axes ---------------------------------------------------------------------------------------------------------

NESTED = [
    ("contractions", "linear_bias"), ("contractions", "embedding"), ("contractions", "attention_grouped"),
    ("contractions", "conv2d_grouped"), ("reductions", "mean_dim"), ("reductions", "group_norm"), ("losses", "ce_mean"),
    ("losses", "ce_smooth"), ("elementwise", "add_row"), ("views", "view_split"), ("views", "slice_fused"),
    ("views", "cat_last"), ("views", "expand"),
]  # fmt: skip


def check_two_axes(traced: Traced, node: Node) -> None:
    """Every strategy of ``node`` on one axis, then on a second every strategy of what that made, conversions too."""
    graph = traced.graph
    reference = run_whole(graph, traced.tensors)
    for outer in strategies(rule_of(node, graph.values), node, graph.values, 2):
        first = shard_graph(graph, "dp", 2, whole_strategies(graph) | {node.name: outer}, whole(graph))
        axis = AxisOf("dp", 2, whole(graph), first.loss)
        names = {value.name for value in node.outputs}
        for part in first.graph.nodes:
            if part.op != "convert" and not part.name.startswith(tuple(names)):
                continue
            for inner in strategies(rule_of(part, first.graph.values), part, first.graph.values, 2):
                chosen = whole_strategies(first.graph) | {part.name: inner}
                second = shard_graph(first.graph, "tp", 2, chosen, whole(first.graph))
                axes = [axis, AxisOf("tp", 2, whole(first.graph), second.loss)]
                try:
                    assert_same(run_sharded(second.graph, axes, traced.tensors), reference, TOLERANCE)
                except AssertionError as error:
                    raise AssertionError(f"{node}: {outer} on dp, then {inner} of {part} on tp: {error}") from error


@pytest.mark.parametrize(("family", "name"), NESTED, ids=[name for _, name in NESTED])
def test_two_axes(family: str, name: str) -> None:
    traced = graphs(family)[name]
    check_two_axes(traced, nodes_of(cases(family)[name], traced.graph)[0])


def test_two_axes_of_batch_norm() -> None:
    traced = batch_norm()
    graph = replace(traced.graph, writes=())
    check_two_axes(Traced(graph, traced.tensors), next(n for n in graph.nodes if n.op == "batch_norm"))


# --- the checks themselves --------------------------------------------------------------------------------------------

WRONG = {
    "bias added on every device": ("contractions", "linear_bias", {"additive": frozenset()}),
    "mean of a part taken for the mean": ("reductions", "mean_dim", {"mean": False}),
    "softmax over a part": ("reductions", "softmax", {"whole": frozenset()}),
    "norm over a part": ("reductions", "layer_norm", {"whole": frozenset()}),
    "rows of a table by global ids": ("contractions", "embedding", {"special": {}}),
    "cross-entropy over a part of the classes": ("losses", "ce_mean", {"special": {}}),
    "causal attention of late queries": ("contractions", "attention_causal", {"whole": frozenset("sde")}),
    "a constant added on every device": ("elementwise", "add_scalar", {"linear": (frozenset({0}),)}),
    "a product of two sums": ("elementwise", "mul", {"linear": (frozenset({0, 1}),)}),
    "one half of a gate": ("elementwise", "glu", {"whole": frozenset()}),
    "neighbours across a cut": ("reductions", "max_pool2d", {"whole": frozenset()}),
    "a slice across cuts": ("views", "slice_uneven", {"whole": frozenset()}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_found(what: str) -> None:
    family, name, change = WRONG[what]
    traced = graphs(family)[name]
    node = nodes_of(cases(family)[name], traced.graph)[0]
    with pytest.raises(AssertionError, match="on 2 devices, strategy"):
        check_node(traced, node, 2, replace(rule_of(node, traced.graph.values), **change))


def test_a_wrong_batch_norm_is_found() -> None:
    """With statistics of its own part each device has right shapes and wrong gradients."""
    graph = replace(batch_norm().graph, writes=())
    (node,) = (n for n in graph.nodes if n.op == "batch_norm")
    own = {letter: Special("batch_norm", (None, WHOLE, WHOLE)) for letter in ("n", "s0")}
    with pytest.raises(AssertionError, match="on 2 devices, strategy"):
        check_node(Traced(graph, batch_norm().tensors), node, 2, replace(rule_of(node, graph.values), special=own))


def test_ranks_that_differ_are_no_replica() -> None:
    """A result that is a partial sum, called whole."""
    traced = by_hand(Node("aten.mv.default", (Ref("w"), Ref("x")), (result(4),)), (weight("w", 4, 8), weight("x", 8)))
    chosen = whole_strategies(traced.graph) | {"out": Strategy("i", (shard(1), shard(0)), (WHOLE,), "i")}
    sharded = shard_graph(traced.graph, "tp", 2, chosen, whole(traced.graph))
    with pytest.raises(NotReplicated):
        run_sharded(sharded.graph, [AxisOf("tp", 2, whole(traced.graph), sharded.loss)], traced.tensors)


def test_an_operator_without_a_rule_runs_whole() -> None:
    case, traced = cases("contractions")["bilinear"], graphs("contractions")["bilinear"]
    (node,) = nodes_of(case, traced.graph)
    assert not has_rule(node)
    assert [s.name for s in strategies(rule_of(node, traced.graph.values), node, traced.graph.values, 2)] == ["R", "RP"]
