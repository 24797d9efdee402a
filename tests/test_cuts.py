"""Cut points inside dims, on graphs where they are known: fused QKV, merged batch and sequence, rotary halves, grouped heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from planner.interpreter import AxisOf, run_sharded, run_whole
from planner.ir.graph import Graph, Leaf, Node, Ref, Value
from planner.ir.layout import WHOLE, Pair, shard
from planner.shard import shard as shard_graph
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import MOST_CUTS, find_cuts
from planner.trace import Batch
from tests.models import seeded
from tests.operator_graphs import Traced, from_model
from tests.reference import assert_same

BATCH, LENGTH, HEADS, SIZE = 4, 8, 4, 4
WIDTH = HEADS * SIZE


class Fused(nn.Module):
    """One weight [3 * heads * size, width] for queries, keys and values, in GPT-2's order."""

    def __init__(self, by_view: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.by_view = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), by_view

    def forward(self, x: Tensor) -> Tensor:
        merged = self.qkv(x)
        if self.by_view:
            parts = merged.view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = tuple(p.view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2) for p in merged.split(WIDTH, -1))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


class Rotary(nn.Module):
    """Queries rotated as Llama does: the two halves of each head against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angle", torch.randn(LENGTH, SIZE // 2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        left, right = q[..., : SIZE // 2], q[..., SIZE // 2 :]
        angle = torch.cat((self.angle, self.angle), -1)
        return q * angle.cos() + torch.cat((-right, left), -1) * angle.sin()


class Rows(nn.Module):
    """Batch and sequence merged into rows and parted again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.view(BATCH * LENGTH, WIDTH)))).view(BATCH, LENGTH, WIDTH)


def graph_of(module: nn.Module) -> Traced:
    with seeded(0):
        for weight in module.parameters():
            nn.init.normal_(weight)
        x, scale = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(1)
    return from_model(module.double(), Batch((x.double(),), {}, scale.double()), lambda y, s: (y.sin() * s).sum())


def node_of(graph: Graph, op: str, index: int = 0) -> Node:
    return [node for node in graph.nodes if node.base == op][index]


def cuts_of(graph: Graph, op: str, letter: str, index: int = 0) -> set[int]:
    return set(find_cuts(graph)[node_of(graph, op, index).name].get(letter, ()))


@pytest.mark.parametrize("by_view", [True, False])
def test_a_fused_projection_is_cut_behind_its_three(by_view: bool) -> None:
    graph = graph_of(Fused(by_view)).graph
    assert cuts_of(graph, "linear", "o") == {3, 3 * HEADS}
    found = strategies(
        rule_of(node := node_of(graph, "linear"), graph.values), node, graph.values, 2, {"o": frozenset({3})}
    )
    heads = next(s for s in found if s.name == "o@3")
    assert heads.operands[1:] == (shard(0, 3), shard(0, 3)) and heads.outputs == (shard(2, 3),)


def test_the_output_projection_is_cut_by_heads() -> None:
    assert cuts_of(graph_of(Fused(True)).graph, "linear", "i", index=1) == {HEADS}


def test_rows_are_cut_behind_the_batch() -> None:
    graph = graph_of(Rows()).graph
    for op, letter, index in (("linear", "b1", 0), ("gelu", "d2", 0), ("linear", "b1", 1)):
        assert cuts_of(graph, op, letter, index) == {BATCH}
    assert cuts_of(graph, "linear", "o") == cuts_of(graph, "linear", "i", index=1) == set()


def test_rotary_halves_reach_the_projection() -> None:
    graph = graph_of(Rotary()).graph
    assert cuts_of(graph, "linear", "o") == {HEADS, 2 * HEADS}
    assert cuts_of(graph, "mul", "d1") == {2}
    assert cuts_of(graph, "slice", "r") == set()


def test_a_graph_without_merged_dims_has_no_cuts() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())).graph
    assert all(not letters for letters in find_cuts(graph).values())


@pytest.mark.parametrize(
    ("k", "expected"),
    [(2, "o o@3 o@12"), (3, "o"), (4, "o o@3 o@12"), (8, "o o@3"), (16, "o o@3"), (32, "")],
)
def test_the_rest_of_the_letter_decides(k: int, expected: str) -> None:
    """A letter of 48 cut behind 3 leaves 16 to share out, cut behind 12 it leaves 4."""
    graph = graph_of(Fused(True)).graph
    node = node_of(graph, "linear")
    found = strategies(rule_of(node, graph.values), node, graph.values, k, {"o": frozenset({3, 12})})
    assert {s.name for s in found if s.letter == "o"} == set(expected.split())


def follow(traced: Traced, start: Node, strategy: Strategy, k: int) -> dict[str, Strategy]:
    """Strategies that keep the cut of ``start`` without any conversion, as far as they go; whole elsewhere."""
    graph, cuts = traced.graph, find_cuts(traced.graph)
    chosen: dict[str, Strategy] = {}
    pairs: dict[str, Pair] = {}
    for node in graph.nodes:
        options = strategies(rule_of(node, graph.values), node, graph.values, k, cuts[node.name])
        fitting = [
            s
            for s in options
            if any(n in pairs for n in node.operands)
            and all(pairs.get(n, p) == p for n, p in zip(node.operands, s.operands, strict=True))
        ]
        whole = next(s for s in options if s.name == "R")
        chosen[node.name] = strategy if node is start else fitting[0] if fitting else whole
        if node is start or fitting:
            pairs.update((v.name, p) for v, p in zip(node.outputs, chosen[node.name].outputs, strict=True))
    return chosen


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize(
    ("module", "start", "end"),
    [
        (Fused(True), "o@3", "linear_1"),
        (Fused(False), "o@3", "linear_1"),
        (Rotary(), "o", "sin"),
        (Rows(), "o", "linear_1"),
    ],
    ids=["view", "split", "rotary", "rows"],
)
def test_a_cut_travels_without_conversions(module: nn.Module, start: str, end: str, k: int) -> None:
    """From the first projection to the next weight every operator runs on shards, and the numbers are right."""
    traced = graph_of(module)
    graph = traced.graph
    node = node_of(graph, "linear")
    options = strategies(rule_of(node, graph.values), node, graph.values, k, find_cuts(graph)[node.name])
    chosen = follow(traced, node, next(s for s in options if s.name == start), k)
    inside = [n.name for n in graph.nodes]
    inside = inside[inside.index(node.name) : inside.index(end) + 1]
    fed = [name for name in inside if graph.producers[name].operands and graph.values[name].differentiable]
    assert all(chosen[name].letter for name in fed)
    leaves = {x.name: WHOLE if x.value.differentiable else WHOLE.without_gradient() for x in graph.leaves}
    sharded = shard_graph(graph, "tp", k, chosen, leaves)
    moved = {n.operands[0] for n in sharded.graph.nodes if n.op == "convert"}
    assert not moved & set(fed[:-1])
    found = run_sharded(sharded.graph, [AxisOf("tp", k, leaves, sharded.loss)], traced.tensors)
    assert_same(found, run_whole(graph, traced.tensors), 1e-12)


# --- any chain of views -----------------------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """A tensor seen in several shapes, with a transposition now and then."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=2, max_size=6))
    shape = tuple(factors)
    leaf = Leaf("parameter", "x", Value("x", shape, "float64", True), trainable=True)
    nodes: list[Node] = []
    name = "x"
    for i in range(draw(st.integers(1, 5))):
        out = Value(f"y{i}", shape, "float64", True)
        if len(shape) > 1 and draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(shape)))))
            out = replace(out, shape=tuple(shape[d] for d in order))
            nodes.append(Node("aten.permute.default", (Ref(name), order), (out,)))
        else:
            ends = sorted(draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
            flat = [f for size in shape for f in _factors(size)]
            ends = [min(e, len(flat)) for e in ends]
            bounds = list(zip([0, *ends[:-1]], ends, strict=True))
            out = replace(out, shape=tuple(math.prod(flat[a:b]) for a, b in bounds if b > a))
            nodes.append(Node("aten.view.default", (Ref(name), out.shape), (out,)))
        name, shape = out.name, out.shape
    nodes.append(Node("aten.sum.default", (Ref(name),), (Value("loss", (), "float64", True),)))
    return Graph((leaf,), tuple(nodes), "loss")


def _factors(size: int) -> list[int]:
    found = []
    for prime in (2, 3):
        while size % prime == 0:
            found.append(prime)
            size //= prime
    return found


@given(chains())
def test_cuts_divide_their_letters_and_are_a_fixpoint(graph: Graph) -> None:
    found = find_cuts(graph)
    for node in graph.nodes:
        rule = rule_of(node, graph.values)
        for letter, cuts in found[node.name].items():
            assert len(cuts) <= MOST_CUTS
            assert all(1 < cut < rule.sizes[letter] and rule.sizes[letter] % cut == 0 for cut in cuts)
    assert found == find_cuts(graph)
    for one, other in zip(graph.nodes, graph.nodes[1:], strict=False):
        _assert_agree(graph, one, other, found)


def _assert_agree(graph: Graph, one: Node, other: Node, found: dict[str, dict[str, frozenset[int]]]) -> None:
    """Where one operator may cut a tensor, so may its reader, as far as its letters reach."""
    made, read = rule_of(one, graph.values).outputs[0], rule_of(other, graph.values).operands[0]
    sizes = rule_of(other, graph.values).sizes
    for d, dim in enumerate(made):
        outers = _outers(dim, rule_of(one, graph.values).sizes, found[one.name])
        places = _outers(read[d], sizes, found[other.name])
        starts = {math.prod(sizes[x] for x in read[d][:i]): sizes[x] for i, x in enumerate(read[d])}
        for outer in outers - places:
            assert not any(outer % p == 0 and 1 < outer // p < n and n % (outer // p) == 0 for p, n in starts.items())


def _outers(dim: tuple[str, ...], sizes: dict[str, int], cuts: dict[str, frozenset[int]]) -> set[int]:
    found, outer = set(), 1
    for letter in dim:
        found |= {outer * cut for cut in cuts.get(letter, ())} | {outer}
        outer *= sizes[letter]
    return found
