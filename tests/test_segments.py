"""The chain of cuts: where models part, which parts are equal, and what hides no cut."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.chain_costs import crossing
from planner.ir.graph import Graph
from planner.segments import (
    cut_into_segments,
    main_nodes,
    node_classes,
    segment_kinds,
    segment_label,
    segment_nodes,
)
from planner.shard import SHARED
from planner.sharding_rules import rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.trace import Batch, trace
from tests.models import MODELS
from tests.reference import traced
from tests.zoo import ZOO

WIDTH, BATCH = 8, 4

CHAINS = {
    "mlp": (0, 1, 1, 2),
    "gpt_tied": (0, 1, 2, 2, 2, 2, 3, 4),
    "resnet_digits": (0, 1, 2, 2, 3, 4, 5),
    "hf_llama": (0, 1, 1, 1, 1, 2, 3),
    "hf_gpt2": (0, 1, 2, 2, 2, 2, 3, 4),
    "hf_bert": (0, 1, 2, 3, 3, 3, 3, 4, 2, 5),
    "hf_vit": (0, 1, 2, 2, 2, 2, 3, 4),
}


@cache
def graph_of(name: str) -> Graph:
    return cut_into_segments(traced(MODELS[name]()).graph)


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_links_of_the_chain(name: str) -> None:
    assert segment_kinds(graph_of(name)) == CHAINS[name]


def test_segments_are_known_by_their_modules() -> None:
    graph = graph_of("hf_llama")
    labels = [segment_label(graph, nodes) for nodes in segment_nodes(graph)]
    layers = [f"model.layers.{i}" for i in range(4)]
    assert labels == ["model.embed_tokens", *layers, "model.norm", "lm_head"]


@pytest.mark.parametrize("name", MODELS)
def test_the_cut_graph_runs_in_order_and_one_tensor_crosses_each_cut(name: str) -> None:
    graph = graph_of(name)
    made = {leaf.name for leaf in graph.leaves}
    for node in graph.nodes:
        assert made.issuperset(node.operands)
        made |= {value.name for value in node.outputs}
    assert [node.segment for node in graph.nodes] == sorted(node.segment for node in graph.nodes)
    for cut in range(len(CHAINS[name]) - 1):
        left = {v.name for node in graph.nodes if 0 <= node.segment <= cut for v in node.outputs}
        read = {x for node in graph.nodes if node.segment > cut for x in node.operands}
        assert len(left & read) == 1


@pytest.mark.parametrize("name", MODELS)
def test_every_segment_has_weights_and_what_is_shared_has_none(name: str) -> None:
    graph = graph_of(name)
    parameters = {leaf.name for leaf in graph.leaves_of("parameter")}
    for nodes in segment_nodes(graph):
        assert any(parameters & set(node.operands) for node in nodes)
    main = main_nodes(graph)
    for node in graph.nodes:
        assert (node.segment == SHARED) == (node.name not in main)
        assert node.segment != SHARED or not any(value.differentiable for value in node.outputs)


@pytest.mark.parametrize("name", MODELS)
def test_nodes_of_one_class_have_the_same_strategies(name: str) -> None:
    graph = graph_of(name)
    classes, cuts = node_classes(graph), find_cuts(graph)
    seen: dict[object, object] = {}
    for node in graph.nodes:
        found = strategies(rule_of(node, graph.values), node, graph.values, 2, cuts[node.name])
        assert seen.setdefault(classes[node.name], (node.op, found)) == (node.op, found)


# --- models that hide their cuts --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A norm that scales by 1 + weight, as in Gemma, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.project = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = F.gelu(self.project(x * (1 + self.scale)))
        return x + (y if factor is None else y * factor)


class Stack(nn.Module):
    def __init__(self, shared: bool = False, skip: bool = False, noise: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.log, self.head = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, 2)
        self.shared, self.skip, self.noise = shared, skip, noise

    def forward(self, x: Tensor) -> Tensor:
        factor = self.log.exp() if self.shared else None
        first = None
        for layer in self.layers:
            x = layer(x, factor)
            x = x + torch.rand_like(x[:1]) if self.noise else x
            first = x if first is None else first
        return self.head(x + first if self.skip and first is not None else x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def chain(model: nn.Module, loss_fn: object = loss) -> tuple[Graph, tuple[int, ...]]:
    batch = Batch((torch.randn(BATCH, WIDTH),), {}, torch.randn(BATCH, 2))
    graph = cut_into_segments(trace(model, batch, loss_fn).graph)  # type: ignore[arg-type]
    return graph, segment_kinds(graph)


def test_what_is_made_from_weights_alone_hides_no_cut() -> None:
    assert chain(Stack())[1] == (0, 1, 1, 2)  # the first reads the input, which has no gradient


def test_a_tensor_of_weights_for_all_layers_is_made_in_the_first() -> None:
    graph, kinds = chain(Stack(shared=True))
    assert kinds == (0, 1, 1, 2)
    (made,) = (node for node in graph.nodes if node.op == "aten.exp.default")
    assert made.segment == 0 and {node.segment for node in graph.consumers[made.name]} == {0, 1, 2}


def test_a_penalty_on_weights_is_part_of_the_last_segment() -> None:
    model = Stack()

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) + sum((p**2).sum() for p in model.parameters())

    graph, kinds = chain(model, penalised)
    assert kinds == (0, 1, 1, 2, 3)
    weights = {leaf.name for leaf in graph.leaves_of("parameter")}
    squares = [node for node in graph.nodes if node.op == "aten.pow.Tensor_Scalar" and node.operands[0] in weights]
    assert len(squares) == len(weights) and {node.segment for node in squares} == {4}


def test_a_skip_over_layers_travels_along() -> None:
    graph, kinds = chain(Stack(skip=True))
    assert len(kinds) == 4
    assert [len(crossing(graph, number)) for number in range(3)] == [1, 2, 1]


class TwoTowers(nn.Module):
    """Layers that read the first tower's result, and a tail that reads all layers' results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
        self.tail = nn.Linear(3 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.first:
            y = layer(y).tanh()
        kept = []
        for layer in self.second:
            x = layer(x + y).tanh()
            kept.append(x)
        return self.tail(torch.cat(kept, -1))


def test_an_encoder_and_results_of_every_layer_travel_along() -> None:
    graph, kinds = chain(TwoTowers())
    labels = [segment_label(graph, nodes) for nodes in segment_nodes(graph)]
    assert labels == [*(f"first.{i}" for i in range(3)), *(f"second.{i}" for i in range(3)), "tail"]
    assert [len(crossing(graph, number)) for number in range(6)] == [1, 1, 1, 2, 3, 1]
    assert len(kinds) == 7


def test_parts_of_one_layer_that_hide_a_cut_stay_together() -> None:
    """Query, key and value of one element of a list are never parted."""
    graph = cut_into_segments(traced(ZOO["six_heads"]()).graph)
    labels = [segment_label(graph, nodes) for nodes in segment_nodes(graph)]
    assert labels == ["0", "1"]


def test_noise_stays_with_the_layer_that_adds_it() -> None:
    graph, kinds = chain(Stack(noise=True))
    assert len(kinds) == 4
    assert [node.segment for node in graph.nodes if "rand" in node.op] == [0, 1, 2]


def test_a_model_of_one_operator_is_one_segment() -> None:
    assert chain(nn.Linear(WIDTH, 2))[1] == (0,)
