"""Strategies on the tp axis against every combination of them, priced by building the sharded graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from costmodels.hardware import Cluster
from planner.batch import split_batch
from planner.costing import Pricing, graph_cost_s, node_cost, sum_of
from planner.ir.graph import Graph, Leaf, Node, Ref, Value
from planner.ir.layout import REPLICATED, WHOLE, Pair, conversion
from planner.ir.mesh import Mesh
from planner.segments import cut_into_segments, node_classes, segment_kinds
from planner.shard import shard
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.solve.letter_prices import gathering_s, parameter_step_s
from planner.solve.letters import Letters, whole_letters
from planner.solve.letters_program import LettersProgram, solve_letters
from tests.models import gpt_tied, hf_llama, mlp
from tests.search_cases import cluster, graph_of, traced

FAST_LINKS = cluster(2, flops_per_s=1e9, memory_bytes_per_s=1e9, link_bytes_per_s=1e9, launch_s=0.0)
SLOW_LINKS = cluster(2, flops_per_s=1e10, memory_bytes_per_s=1e9, link_bytes_per_s=1e8, latency_s=1e-5, kind="cpu")
CHEAP_LAUNCH = cluster(2, flops_per_s=1e9, memory_bytes_per_s=1e9, link_bytes_per_s=3e8, latency_s=0.0, launch_s=0.0)
CLUSTERS = (FAST_LINKS, SLOW_LINKS, CHEAP_LAUNCH)


# --- small graphs -----------------------------------------------------------------------------------------------------


class Builder:
    """A graph, node by node; every tensor is float32."""

    def __init__(self, *shape: int) -> None:
        self.leaves: list[Leaf] = []
        self.nodes: list[Node] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.grad: set[str] = set()
        self.leaf("input", "x", shape)

    def leaf(self, kind: str, name: str, shape: Sequence[int]) -> str:
        trains = kind == "parameter"
        value = Value(name, tuple(shape), "float32", trains)
        self.leaves.append(Leaf(kind, name, value, trains, batched=kind == "input"))
        return self.known(value)

    def weight(self, *shape: int) -> str:
        return self.leaf("parameter", f"w{len(self.leaves)}", shape)

    def known(self, value: Value) -> str:
        self.shapes[value.name] = value.shape
        if value.differentiable:
            self.grad.add(value.name)
        return value.name

    def call(
        self, op: str, shape: Sequence[int], *operands: str, rest: tuple[object, ...] = (), segment: int = 0
    ) -> str:
        differentiable = any(name in self.grad for name in operands)
        value = Value(f"v{len(self.nodes)}", tuple(shape), "float32", differentiable)
        args = (*map(Ref, operands), *rest)
        self.nodes.append(Node(f"aten.{op}", args, (value,), (), "", segment))
        return self.known(value)

    def same(self, op: str, *operands: str, segment: int = 0) -> str:
        return self.call(op, self.shapes[operands[0]], *operands, segment=segment)

    def linear(self, x: str, weight: str, bias: str | None = None, segment: int = 0) -> str:
        shape = (*self.shapes[x][:-1], self.shapes[weight][0])
        operands = (x, weight) if bias is None else (x, weight, bias)
        return self.call("linear.default", shape, *operands, segment=segment)

    def finish(self, last: str, segment: int = 0) -> Graph:
        loss = self.call("sum.default", (), last, segment=segment)
        return Graph(tuple(self.leaves), tuple(self.nodes), loss, (), self.shapes["x"][0])


def linear_relu_linear() -> Graph:
    b = Builder(4, 8)
    hidden = b.same("relu.default", b.linear("x", b.weight(16, 8), b.weight(16)))
    return b.finish(b.linear(hidden, b.weight(6, 16), b.weight(6)))


def shared_value() -> Graph:
    """One value with three readers that may each want another pair."""
    b = Builder(4, 8)
    hidden = b.same("mul.Tensor", "x", b.weight(4, 8))
    one, two = b.same("relu.default", hidden), b.linear(hidden, b.weight(8, 8))
    return b.finish(b.same("addcmul.default", hidden, one, two))


def weight_used_twice() -> Graph:
    b = Builder(4, 8)
    weight = b.weight(8, 8)
    return b.finish(b.linear(b.same("relu.default", b.linear("x", weight)), weight))


def same_value_twice_in_one_operator() -> Graph:
    """attention(x w, linear(x w), x w)."""
    b = Builder(2, 2, 4, 4)
    scaled = b.same("mul.Tensor", "x", b.weight(2, 2, 4, 4))
    keys = b.linear(scaled, b.weight(4, 4))
    attended = b.call("scaled_dot_product_attention.default", (2, 2, 4, 4), scaled, keys, scaled)
    return b.finish(attended)


def merged_dim() -> Graph:
    """A view that merges (rows, heads): cut inside the merged dim it passes on a cut of heads."""
    b = Builder(2, 4, 4)
    scaled = b.same("mul.Tensor", "x", b.weight(2, 4, 4))
    merged = b.call("view.default", (8, 4), scaled, rest=((8, 4),))
    return b.finish(b.linear(merged, b.weight(4, 4)))


def equal_segments() -> Graph:
    """Three equal links of a chain: their operators share a strategy."""
    b = Builder(4, 8)
    x = b.same("mul.Tensor", "x", b.weight(4, 8), segment=0)
    for segment in (1, 2, 3):
        x = b.same("relu.default", b.linear(x, b.weight(8, 8), segment=segment), segment=segment)
    return b.finish(x, segment=4)


GRAPHS: dict[str, Callable[[], Graph]] = {
    g.__name__: g
    for g in (
        linear_relu_linear,
        shared_value,
        weight_used_twice,
        same_value_twice_in_one_operator,
        merged_dim,
        equal_segments,
    )
}


# --- all combinations -------------------------------------------------------------------------------------------------


class Enumeration:
    """The least cost of all combinations, in seconds of one micro-batch.

    Operators and the conversions between them are priced in the graph that ``shard`` builds. Given the operators'
    strategies, leaves (stored pairs) do not act on each other, so the best pair of each is found alone.
    """

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self.graph, self.pricing, self.k = graph, pricing, pricing.mesh.tp
        cuts = find_cuts(graph)
        self.classes = node_classes(graph)
        self.options: dict[object, tuple[Strategy, ...]] = {}
        for node in graph.nodes:
            found = strategies(rule_of(node, graph.values), node, graph.values, self.k, cuts[node.name])
            self.options.setdefault(self.classes[node.name], found)
        self.whole = {leaf.name: stored(leaf, WHOLE) for leaf in graph.leaves}
        self.pairs = {leaf.name: self.leaf_pairs(leaf) for leaf in graph.leaves}
        self.known: dict[object, float] = {}

    def leaf_pairs(self, leaf: Leaf) -> list[Pair]:
        pairs = {self.whole[leaf.name]}
        if leaf.kind == "parameter":
            for node in self.graph.consumers[leaf.name]:
                for strategy in self.options[self.classes[node.name]]:
                    for name, pair in zip(node.operands, strategy.operands, strict=True):
                        if name == leaf.name and (pair.value.kind == "S" or pair == REPLICATED):
                            pairs.add(pair)
        return sorted(pairs, key=str)

    def combinations(self) -> int:
        return math.prod(len(options) for options in self.options.values())

    def least_s(self) -> float:
        keys = list(self.options)
        best = math.inf
        for chosen in itertools.product(*self.options.values()):
            by_class = dict(zip(keys, chosen, strict=True))
            best = min(best, self.cost_s({n.name: by_class[self.classes[n.name]] for n in self.graph.nodes}, best))
        return best

    def cost_s(self, chosen: Mapping[str, Strategy], best: float) -> float:
        sharded = shard(self.graph, "tp", self.k, chosen, self.whole).graph
        total = 0.0
        for node in sharded.nodes:
            if node.op != "convert" or node.operands[0] not in self.whole:
                total += self.node_s(node, sharded.values)
        if total >= best:
            return math.inf
        # Leaves of one class are stored alike; here every leaf has a class of its own or equal readers.
        return total + sum(self.leaf_s(leaf, chosen) for leaf in self.graph.leaves)

    def node_s(self, node: Node, values: Mapping[str, Value]) -> float:
        tensors = tuple((values[name].shape, values[name].differentiable) for name in node.operands)
        results = tuple(value.shape for value in node.outputs)
        key = (node.op, repr(node.args[1:]) if node.op == "convert" else "", repr(node.kwargs), tensors, results)
        if key not in self.known:
            self.known[key] = node_cost(node, values, self.pricing).total_s
        return self.known[key]

    def leaf_s(self, leaf: Leaf, chosen: Mapping[str, Strategy]) -> float:
        readers = self.graph.consumers[leaf.name]
        wanted = tuple(
            (node.segment if leaf.kind == "parameter" else -1, pair)
            for node in readers
            for name, pair in zip(node.operands, chosen[node.name].operands, strict=True)
            if name == leaf.name
        )
        key = (leaf.name, wanted)
        if key not in self.known:
            self.known[key] = min(self.stored_s(leaf, pair, chosen) for pair in self.pairs[leaf.name])
        return self.known[key]

    def stored_s(self, leaf: Leaf, pair: Pair, chosen: Mapping[str, Strategy]) -> float:
        """Conversions of the leaf to its readers and, once a step, its update."""
        sharded = shard(self.graph, "tp", self.k, chosen, {**self.whole, leaf.name: pair}).graph
        own = [node for node in sharded.nodes if node.op == "convert" and node.operands[0] == leaf.name]
        total = sum(node_cost(node, sharded.values, self.pricing).total_s for node in own)
        return total + leaf_step_s(sharded.leaf_by_name[leaf.name], leaf, pair, self.pricing)


def stored(leaf: Leaf, pair: Pair) -> Pair:
    return pair if leaf.value.differentiable else pair.without_gradient()


def leaf_step_s(local: Leaf, leaf: Leaf, pair: Pair, pricing: Pricing) -> float:
    if leaf.kind != "parameter":
        return 0.0
    return parameter_step_s(local.value, leaf, pair, pricing) / pricing.micro_batches


def lowered_cost_s(graph: Graph, found: Letters, pricing: Pricing) -> float:
    """The solution priced as the finished program."""
    sharded = shard(graph, "tp", pricing.mesh.tp, found.strategies, found.leaves).graph
    leaves = sum(
        leaf_step_s(sharded.leaf_by_name[leaf.name], leaf, found.leaves[leaf.name], pricing) for leaf in graph.leaves
    )
    return graph_cost_s(sharded, pricing) + leaves


@pytest.mark.parametrize("on", CLUSTERS, ids=["fast", "slow", "no-launch"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_least_of_all_combinations(name: str, on: Cluster) -> None:
    graph, pricing = GRAPHS[name](), Pricing(on, Mesh(tp=2))
    every = Enumeration(graph, pricing)
    assert 50 < every.combinations() < 5000
    found = solve_letters(graph, pricing)
    assert found.objective_s == pytest.approx(every.least_s(), rel=1e-6)
    assert found.bound_s == pytest.approx(found.objective_s, rel=1e-6)
    assert lowered_cost_s(graph, found, pricing) == pytest.approx(found.objective_s, rel=1e-6)


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Two or three operators on random earlier values and weights, some of them used again."""
    b = Builder(4, 4)
    values, weights = ["x"], [b.weight(4, 4)]
    values.append(b.linear("x", weights[0]))
    for _ in range(draw(st.integers(1, 2))):
        op = draw(st.sampled_from(["linear", "add", "mul", "relu", "mean"]))
        one = draw(st.sampled_from(values))
        if op == "linear":
            if draw(st.booleans()):
                weights.append(b.weight(4, 4))
            values.append(b.linear(one, draw(st.sampled_from(weights))))
        elif op == "relu":
            values.append(b.same("relu.default", one))
        elif op == "mean":
            values.append(b.call("mean.dim", (4, 1), one, rest=((1,), True)))
            values[-1] = b.same("mul.Tensor", values[1], values[-1])
        else:
            values.append(b.same(f"{op}.Tensor", one, draw(st.sampled_from(values))))
    return b.finish(values[-1])


@given(random_graphs(), st.sampled_from(CLUSTERS), st.sampled_from([1, 4]))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_the_least_of_all_combinations_of_random_graphs(graph: Graph, on: Cluster, micro_batches: int) -> None:
    pricing = Pricing(on, Mesh(tp=2), micro_batches=micro_batches)
    every = Enumeration(graph, pricing)
    if every.combinations() > 3000 or graph.loss not in graph.values or not graph.values[graph.loss].differentiable:
        return
    assert solve_letters(graph, pricing).objective_s == pytest.approx(every.least_s(), rel=1e-6)


@pytest.mark.parametrize("make", [mlp, gpt_tied, hf_llama])
@pytest.mark.parametrize(("mesh", "micro_batches"), [(Mesh(tp=2), 1), (Mesh(dp=2, tp=4), 2)], ids=["tp2", "dp2.tp4"])
def test_the_objective_is_the_price_of_the_program(make: Callable[..., object], mesh: Mesh, micro_batches: int) -> None:
    graph = split_batch(cut_into_segments(graph_of(make)), mesh.dp, micro_batches).graph
    for on in (cluster(mesh.size, kind="cpu"), cluster(mesh.size, latency_s=1e-8, launch_s=1e-8)):
        pricing = Pricing(on, mesh, micro_batches=micro_batches)
        found = solve_letters(graph, pricing)
        # Where a GPU waits for its host, the program counts it for equal segments together, the price for each.
        waits = 1e-6 if on.device.kind == "cpu" else 1e-3
        price_s = lowered_cost_s(graph, found, pricing)
        assert found.objective_s * (1 - 1e-6) <= price_s <= found.objective_s * (1 + waits)
        whole = whole_letters(graph)
        assert found.objective_s <= lowered_cost_s(graph, whole, pricing) * (1 + 1e-6)


@pytest.mark.parametrize("launch_s", [1e-3, 1e-5])
def test_a_gpu_waits_for_its_host(launch_s: float) -> None:
    """With slow launches the fewest are best: nothing is cut, and each way takes as long as launching it."""
    graph, on = graph_of(mlp), cluster(2, flops_per_s=1e12, launch_s=launch_s)
    found = solve_letters(cut_into_segments(graph), Pricing(on, Mesh(tp=2)))
    assert {strategy.name for strategy in found.strategies.values()} == {"R"} or launch_s < 1e-3
    launches = sum_of(node_cost(node, graph.values, Pricing(on, Mesh())) for node in graph.nodes)
    least_s = launch_s * (launches.forward_launches + launches.backward_launches)
    assert least_s <= found.objective_s
    assert found.objective_s == pytest.approx(least_s, rel=1e-3) or launch_s < 1e-3


@pytest.mark.parametrize("launch_s", [1e-6, 1e-5, 1e-4])
def test_a_gpu_and_its_host_take_a_share_of_both(launch_s: float) -> None:
    """The program of one segment counts what its price counts, wherever the device, the host or both together decide."""
    graph, on = graph_of(mlp), cluster(2, launch_s=launch_s, serial_share=0.7)
    pricing = Pricing(on, Mesh(tp=2))
    found = solve_letters(graph, pricing)
    assert found.objective_s == pytest.approx(lowered_cost_s(graph, found, pricing), rel=1e-6)
    alone = Pricing(replace(on, device=replace(on.device, serial_share=0.5)), Mesh(tp=2))
    assert found.objective_s >= solve_letters(graph, alone).objective_s * (1 - 1e-9)


def with_moves_s(graph: Graph, found: Letters, pricing: Pricing) -> float:
    """The solution under ZeRO-3 priced as the finished program: of equal segments their work, or what moves if that is more."""
    sharded = shard(graph, "tp", pricing.mesh.tp, found.strategies, found.leaves).graph
    kinds = segment_kinds(graph)
    work, moves, step_s = [0.0] * len(kinds), [0.0] * len(kinds), 0.0
    for node in sharded.nodes:
        work[kinds[max(node.segment, 0)]] += node_cost(node, sharded.values, pricing).total_s
    for leaf in graph.leaves:
        local = sharded.leaf_by_name[leaf.name]
        readers = {max(node.segment, 0) for node in graph.consumers[leaf.name]}
        step_s += leaf_step_s(local, leaf, found.leaves[leaf.name], pricing)
        if leaf.kind == "parameter" and len(readers) == 1:
            moves[kinds[min(readers)]] += gathering_s(local.value, leaf, pricing)
    assert any(a < b for a, b in zip(work, moves, strict=True)), "nothing is exposed"
    return sum(map(max, work, moves)) + step_s


@pytest.mark.parametrize("make", [mlp, gpt_tied, hf_llama])
def test_what_moving_weights_exposes_under_zero_3_is_counted(make: Callable[..., object]) -> None:
    mesh = Mesh(dp=2, tp=2)
    graph = split_batch(cut_into_segments(graph_of(make)), mesh.dp, 1).graph
    on = cluster(4, latency_s=1e-8, launch_s=1e-8, link_bytes_per_s=1e9)
    pricing = Pricing(on, mesh, zero=3)
    found = solve_letters(graph, pricing)
    assert with_moves_s(graph, found, pricing) == pytest.approx(found.objective_s, rel=1e-4)
    unaware = solve_letters(graph, replace(pricing, zero=1))
    assert found.objective_s <= with_moves_s(graph, unaware, pricing) * (1 + 1e-4)
    least_s, _ = LettersProgram(graph, pricing).relax(pricing)
    assert 0 < least_s <= found.least_s * (1 + 1e-4)


# --- known answers ----------------------------------------------------------------------------------------------------

BIG_WORK = cluster(2, flops_per_s=1e9, memory_bytes_per_s=1e12, link_bytes_per_s=1e10, latency_s=1e-7, launch_s=1e-7)


def test_column_then_row() -> None:
    """Two large products: Megatron's pattern; the sum passes the partial result on, so nothing is exchanged."""
    b = Builder(4, 64)
    hidden = b.same("relu.default", b.linear("x", b.weight(256, 64)))
    graph = b.finish(b.linear(hidden, b.weight(64, 256)))
    found = solve_letters(graph, Pricing(BIG_WORK, Mesh(tp=2)), keep=lambda node, s: not s.letter.startswith("b"))
    linear, _, second = (found.strategies[node.name] for node in graph.nodes[:3])
    assert (linear.name, second.name) == ("o", "i")
    assert found.strategies["v1"].outputs[0].value == linear.outputs[0].value
    assert str(found.leaves["w1"]) == "S(0):S(0)" and str(found.leaves["w2"]) == "S(1):S(1)"
    sharded = shard(graph, "tp", 2, found.strategies, found.leaves).graph
    assert communication(sharded) == []


def communication(graph: Graph) -> list[tuple[str, str]]:
    """Moves of all conversions, without those that stay on a device."""
    found = []
    for node in graph.nodes:
        if node.op == "convert":
            source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
            moves = conversion(source, target)
            if any(move in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for move in moves):
                found.append(moves)
    return found


def test_two_products_behind_a_norm_need_one_exchange_each_way() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    graph = cut_into_segments(traced(model, torch.empty(4, 64), target=torch.empty(4, 64), loss_fn=F.mse_loss))
    rows = ("b1", "d2", "d0")  # of the batch
    found = solve_letters(graph, Pricing(BIG_WORK, Mesh(tp=2)), keep=lambda node, s: s.name not in rows)
    assert [found.strategies[n.name].name for n in graph.nodes if n.op == "aten.linear.default"] == ["o", "i"]
    sharded = shard(graph, "tp", 2, found.strategies, found.leaves).graph
    exchanges = communication(sharded)
    assert sum(forward == "all_reduce" for forward, _ in exchanges) == 1


def test_a_chain_of_elementwise_operators_stays_without_communication() -> None:
    b = Builder(8, 64)
    x = b.same("mul.Tensor", "x", b.weight(8, 64))
    for op in ("relu.default", "tanh.default", "exp.default"):
        x = b.same(op, x)
    graph = b.finish(x)
    on = cluster(2, flops_per_s=1e9, memory_bytes_per_s=1e8, link_bytes_per_s=1e9, latency_s=1e-6, launch_s=0.0)
    found = solve_letters(graph, Pricing(on, Mesh(tp=2)))
    used = [found.strategies[node.name] for node in graph.nodes]
    assert all(strategy.letter for strategy in used)
    assert communication(shard(graph, "tp", 2, found.strategies, found.leaves).graph) == []


def test_links_too_slow_to_use_leave_everything_whole_or_cut_but_never_exchange() -> None:
    on = cluster(2, flops_per_s=1e12, link_bytes_per_s=1e3, latency_s=1.0)
    graph = cut_into_segments(graph_of(mlp))
    found = solve_letters(graph, Pricing(on, Mesh(tp=2)))
    assert communication(shard(graph, "tp", 2, found.strategies, found.leaves).graph) == []


def test_keep_restricts_and_memory_has_a_price() -> None:
    graph = linear_relu_linear()
    pricing = Pricing(SLOW_LINKS, Mesh(tp=2))
    only = solve_letters(graph, pricing, keep=lambda node, s: "linear" not in node.op or s.name == "o")
    assert [only.strategies[n.name].name for n in graph.nodes if "linear" in n.op] == ["o", "o"]
    assert only.objective_s >= solve_letters(graph, pricing).objective_s * (1 - 1e-9)
    none = solve_letters(graph, pricing, keep=lambda node, s: False)
    assert none.objective_s == pytest.approx(solve_letters(graph, pricing).objective_s, rel=1e-9)
    lean = solve_letters(graph, pricing, us_per_byte=1e3)
    weights = [leaf for leaf in graph.leaves if leaf.kind == "parameter"]
    assert all(lean.leaves[leaf.name].value.kind == "S" for leaf in weights)


def test_a_conversion_that_one_reader_needs_for_certain_is_paid() -> None:
    """A value read by an operator with a choice and, behind it, by one without."""
    b = Builder(4, 4)
    scaled = b.same("mul.Tensor", "x", b.weight(4, 4))
    first, second = b.same("relu.default", scaled), b.same("tanh.default", scaled)
    graph = b.finish(b.same("add.Tensor", first, second))
    pricing = Pricing(SLOW_LINKS, Mesh(tp=2))
    forced = {"v0": {"d1"}, "v2": {"R"}, "v1": {"R", "RP", "d1"}}
    found = solve_letters(graph, pricing, keep=lambda node, s: s.name in forced.get(node.name, {s.name}))
    assert found.strategies["v0"].name == "d1" and found.strategies["v2"].name == "R"
    assert lowered_cost_s(graph, found, pricing) == pytest.approx(found.objective_s, rel=1e-6)


def test_whole_letters_add_nothing() -> None:
    graph = cut_into_segments(graph_of(mlp))
    whole = whole_letters(graph)
    sharded = shard(graph, "tp", 1, whole.strategies, whole.leaves).graph
    assert [node.op for node in sharded.nodes] == [node.op for node in graph.nodes]
    assert graph_cost_s(sharded, Pricing(FAST_LINKS, Mesh())) == graph_cost_s(graph, Pricing(FAST_LINKS, Mesh()))


def test_the_same_again() -> None:
    graph = cut_into_segments(graph_of(gpt_tied))
    pricing = Pricing(cluster(2), Mesh(tp=2))
    assert solve_letters(graph, pricing) == solve_letters(graph, pricing)
