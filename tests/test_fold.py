"""Folding runs of equal segments: the folded graph prices every segment as the whole one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields

import pytest
import torch
from torch import nn

from planner.fold import Folded, fold
from planner.ir.graph import Graph
from planner.ir.mesh import Mesh
from planner.layouts import recall, record
from planner.segments import cut_into_segments, segment_count, segment_kinds
from planner.solve import configuration as configuration_module
from planner.solve.configuration import FAST, LEAN, Configuration, Evaluator
from planner.solve.letters import Letters
from planner.solve.search import search
from tests.models import gpt_tied, hf_gpt2, hf_llama, mlp, resnet_digits
from tests.search_cases import cluster, graph_of, problem, traced

MODELS = [mlp, gpt_tied, hf_llama, hf_gpt2, resnet_digits]
ON = cluster(4, latency_s=1e-8, launch_s=1e-8, flops_per_s=1e11)
CPU = cluster(4, latency_s=1e-8, launch_s=1e-8, flops_per_s=1e11, kind="cpu")


def unfolded(graph: Graph) -> Folded:
    return Folded(graph, tuple(range(segment_count(graph))))


def whole_evaluator(graph: Graph, folded: Evaluator) -> Evaluator:
    """An evaluator that works on every segment."""
    evaluator = Evaluator(folded.problem)
    evaluator.folded = unfolded(evaluator.graph)
    return evaluator


class Again(nn.Module):
    """Linear layers of one size, called in the order of ``numbers``."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in set(numbers))
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.numbers:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize("make", MODELS)
def test_a_folded_graph_is_a_graph_of_its_own(make: Callable[..., object]) -> None:
    graph = cut_into_segments(graph_of(make))
    folded = fold(graph)
    count = segment_count(graph)
    assert len(folded.origin) == sum(folded.weights) == count
    assert len(folded.weights) == segment_count(folded.graph)
    assert all(weight > 0 for weight in folded.weights)
    kinds, few = segment_kinds(graph), segment_kinds(folded.graph)
    for one in range(count):
        for other in range(one):
            same = kinds[one] == kinds[other]
            assert same == (few[folded.origin[one]] == few[folded.origin[other]])
    known = {leaf.name for leaf in folded.graph.leaves}
    for node in folded.graph.nodes:
        assert set(node.operands) <= known
        known.update(value.name for value in node.outputs)
    assert folded.graph.loss in known
    assert [node.segment for node in folded.graph.nodes] == sorted(node.segment for node in folded.graph.nodes)


def test_four_layers_become_two() -> None:
    graph = cut_into_segments(graph_of(gpt_tied))
    folded = fold(graph)
    layers = [i for i, kind in enumerate(segment_kinds(graph)) if segment_kinds(graph).count(kind) == 4]
    assert [folded.origin[i] - folded.origin[layers[0]] for i in layers] == [0, 1, 1, 1]
    assert sorted(folded.weights)[-1] == 3
    assert len(folded.weights) == segment_count(graph) - 2


def test_the_search_does_not_grow_with_depth() -> None:
    counts = set()
    for depth in (5, 7, 11):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)]
        graph = traced(nn.Sequential(*layers), torch.empty(4, 8), loss_fn=lambda y, _: y.sum(), target=torch.empty(1))
        counts.add(len(fold(cut_into_segments(graph)).graph.nodes))
    assert len(counts) == 1


def test_two_equal_segments_and_different_ones_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    graph = traced(model, torch.empty(4, 8), loss_fn=lambda y, _: y.sum(), target=torch.empty(1))
    cut = cut_into_segments(graph)
    assert fold(cut) == unfolded(cut)


@pytest.mark.parametrize("again", [(0, 1, 2, 1, 3), (0, 1, 2, 3, 1, 4), (0, 1, 2, 3, 0)])
@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=2, dp=2), Mesh(dp=2)], ids=str)
def test_blocks_called_again_among_equal_ones_cost_the_same(again: tuple[int, ...], mesh: Mesh) -> None:
    """Weights used twice are on two stages and summed over both."""
    graph = traced(Again(again), torch.empty(4, 8), loss_fn=lambda y, _: y.sum(), target=torch.empty(1))
    few = Evaluator(problem(graph, cluster(mesh.size)))
    every = whole_evaluator(graph, few)
    configuration = Configuration(mesh, 2, 0, "1f1b")
    assert few.segments == len(again)
    one, other = (e.costs(configuration, e.letters(configuration)) for e in (few, every))
    for mine, whole in zip(one, other, strict=True):
        assert mine.gradient_sync_per_step_s == pytest.approx(whole.gradient_sync_per_step_s)
        assert (mine.states_bytes, mine.activations_bytes) == (whole.states_bytes, whole.activations_bytes)


@pytest.mark.parametrize("make", [gpt_tied, hf_llama, mlp])
@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(Mesh(tp=4), 1, 0, "1f1b"),
        Configuration(Mesh(dp=2, tp=2), 2, 3, "1f1b"),
        Configuration(Mesh(pp=2, tp=2), 4, 0, "1f1b"),
        Configuration(Mesh(dp=4), 2, 0, "1f1b"),
    ],
    ids=str,
)
def test_segments_cost_the_same(make: Callable[..., object], configuration: Configuration) -> None:
    """The strategies found on the folded graph, written down as a plan does and read back for the whole one."""
    few = Evaluator(problem(graph_of(make), ON))
    every = whole_evaluator(graph_of(make), few)
    mesh = configuration.mesh
    letters = few.letters(configuration, FAST)
    split = few.split(mesh.dp, configuration.micro_batches)
    kinds = segment_kinds(split.graph)
    table = record(split.graph, split.dp, letters.strategies, letters.leaves, mesh.dp, mesh.tp, kinds)
    whole_graph = every.split(mesh.dp, configuration.micro_batches).graph
    again = Letters(*recall(whole_graph, table, mesh.tp), 0.0, 0.0)
    one, other = few.costs(configuration, letters), every.costs(configuration, again)
    assert len(one) == len(other) == few.segments
    for i, (folded, whole) in enumerate(zip(one, other, strict=True)):
        for field in fields(whole):
            value = getattr(whole, field.name)
            if isinstance(value, int | float):
                assert getattr(folded, field.name) == pytest.approx(value, rel=1e-9), (i, field.name)
        for word, way in whole.recomputations.items():
            assert astuple(folded.recomputation(word)) == pytest.approx(astuple(way), rel=1e-9), (i, word)
    assert few.work_s(mesh.dp, configuration.micro_batches) == pytest.approx(
        every.work_s(mesh.dp, configuration.micro_batches), rel=1e-9
    )


@pytest.mark.parametrize("variant", [FAST, LEAN])
@pytest.mark.parametrize("on", [ON, CPU], ids=["gpu", "cpu"])
def test_the_optimum_is_the_same(variant: str, on: object) -> None:
    """Of a GPT of four layers, of which the folded graph has two."""
    few = Evaluator(problem(graph_of(gpt_tied), on, 10**6))  # type: ignore[arg-type]
    every = whole_evaluator(graph_of(gpt_tied), few)
    for mesh, micro_batches in ((Mesh(tp=4), 1), (Mesh(dp=2, tp=2), 2)):
        configuration = Configuration(mesh, micro_batches, 0, "1f1b")
        one, other = few.letters(configuration, variant), every.letters(configuration, variant)
        assert one.objective_s == pytest.approx(other.objective_s, rel=1e-6)


def test_the_plan_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short."""
    short = problem(graph_of(gpt_tied), ON, 400_000)
    folded = search(short)
    monkeypatch.setattr(configuration_module, "fold", unfolded)
    whole = search(short)
    assert folded.objective_s == pytest.approx(whole.objective_s, rel=1e-6)
    assert folded.bound_s == pytest.approx(whole.bound_s, rel=1e-6)
