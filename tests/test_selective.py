"""Recomputation: what is kept, what runs again, that both are what was priced, and that the gradients stay the same."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.ir.graph import Graph, Node
from planner.ir.layout import PARTIAL
from planner.ir.mesh import Mesh
from planner.ir.plan import RECOMPUTATIONS
from planner.lower import lower
from planner.saved import FUSED, PRODUCT, REDUCTION, SHAPE, run_again, select
from planner.segments import segment_nodes
from planner.shard import shard
from planner.solve.configuration import Configuration, Evaluator
from planner.strategies import MEGATRON, megatron, plan_by_hand
from planner.trace import Traced, tensors_by_target
from runtime import stage_module
from runtime.collectives import Axis, convert
from runtime.keep import Kept
from runtime.worker import Named, Rank
from tests.models import MODELS, Case
from tests.reference import input_tensors, traced
from tests.search_cases import cluster, problem
from tests.test_equality import check, setting

NAMES = ("hf_llama", "hf_gpt2", "resnet_digits")
PRODUCTS = ("mm", "addmm", "convolution")
SDPA = "_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=4)
def model(name: str) -> tuple[Case, Traced, Evaluator]:
    case = MODELS[name](torch.float32)
    found = traced(case)
    return case, found, Evaluator(problem(found.graph, cluster(1, kind="cpu")))


def ran(name: str, recompute: str) -> tuple[Counter[str], float, Named]:
    """Operators, loss and gradients of one step of one device."""
    case, found, evaluator = model(name)
    rank = Rank()
    program = lower(found.graph, plan_by_hand(evaluator, f"pp1 recompute={recompute}"))
    targets = [leaf.target for leaf in found.graph.leaves if leaf.kind in ("parameter", "buffer")]
    rank.load(program, {key: x.detach().clone() for key, x in tensors_by_target(case.model, targets).items()})
    with Counting() as counting:
        loss = rank.forward_backward(input_tensors(case, found))
    return counting.counts, loss, rank.gradients()


def split_graph(name: str) -> Graph:
    evaluator = model(name)[2]
    return evaluator.split(1, 1).graph


def segments_of(name: str) -> list[tuple[Node, ...]]:
    """The nodes of every segment of the whole chain."""
    evaluator = model(name)[2]
    chain = segment_nodes(split_graph(name))
    return [tuple(chain[number]) for number in evaluator.folded.origin]


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_again_is_what_is_priced_and_gradients_are_the_same(name: str) -> None:
    runs = {word: ran(name, word) for word in RECOMPUTATIONS}
    counts, loss, gradients = runs["none"]
    again = [node for nodes in segments_of(name) for node in run_again(split_graph(name), nodes)]
    kept = Counter(how for nodes in segments_of(name) for how in select(split_graph(name), nodes).values())
    assert kept[PRODUCT] > 4
    for word in ("selective", "full"):
        own, own_loss, own_gradients = runs[word]
        more = own - counts
        once = 1 if word == "full" else 0
        assert sum(more[op] for op in PRODUCTS) == once * kept[PRODUCT]
        assert more[SDPA] == once * kept[FUSED]
        for op in ("silu", "relu", "tanh"):
            assert more[op] == sum(node.base == op for node in again)
        assert own_loss == loss
        for key, gradient in gradients.items():
            assert torch.equal(own_gradients[key], gradient), key  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_is_priced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kept] = []

    class Watched(Kept):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(stage_module, "Kept", Watched)
    ran(name, "selective")
    evaluator = model(name)[2]
    configuration = Configuration(Mesh(), 1, 0, "1f1b")
    costs = evaluator.costs(configuration, evaluator.letters(configuration))
    assert [kept.size_bytes for kept in made] == [
        c.recomputation("selective").kept_bytes - c.input_bytes for c in costs
    ]
    assert sum(kept.size_bytes for kept in made) > 0


@pytest.mark.parametrize("name", NAMES)
def test_more_time_for_less_memory(name: str) -> None:
    evaluator = model(name)[2]
    configuration = Configuration(Mesh(), 1, 0, "1f1b")
    costs = evaluator.costs(configuration, evaluator.letters(configuration))
    ways = [cost.recomputations for cost in costs]
    sums = {word: sum(way[word].kept_bytes for way in ways) for word in RECOMPUTATIONS}
    assert sums["none"] > sums["selective"] > sums["full"]
    for cost, way in zip(costs, ways, strict=True):
        assert 0.0 == way["none"].extra_s <= way["selective"].extra_s <= way["full"].extra_s <= cost.forward_s
        plain, selective, full = (way[word].temporary_bytes for word in RECOMPUTATIONS)
        assert plain == cost.temporary_bytes <= selective <= full <= plain + cost.activations_bytes


def test_what_a_layer_of_llama_keeps_on_two_devices() -> None:
    """q, k, v, gate and up are kept, the attention, and the sum over devices behind it; not the product that is only summed."""
    case, found, _ = model("hf_llama")
    evaluator = Evaluator(problem(found.graph, cluster(2, kind="cpu")))
    configuration = Configuration(Mesh(tp=2), 1, 0, "1f1b")
    letters = evaluator.letters(configuration, MEGATRON, megatron)
    local = shard(evaluator.split(1, 1).graph, "tp", 2, letters.strategies, letters.leaves)
    nodes = segment_nodes(local.graph)[2]
    how = select(local.graph, nodes)
    assert Counter(how.values()) == {PRODUCT: 5, FUSED: 1, REDUCTION: 1, SHAPE: 1}
    cost = evaluator.costs(configuration, letters)[2]
    selective, full = cost.recomputation("selective"), cost.recomputation("full")
    assert selective.extra_communication_s == 0.0 < full.extra_communication_s < cost.forward_communication_s


def test_results_are_handed_out_in_their_order_and_not_computed_again() -> None:
    kept = Kept()
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    first = kept.again()
    one, two = first.product(F.linear, x, w), first.shape(F.linear, x, w)
    three = first.reduction(convert, two, Axis("tp"), f"{PARTIAL} -> R:R")
    assert kept.size_bytes == 2 * one.numel() * 4
    for _ in range(2):  # a graph that is kept may run again more than once
        later = kept.again()
        with Counting() as counting:
            again = later.product(F.linear, x, w)
            summed = later.reduction(convert, later.shape(F.linear, x, w), Axis("tp"), f"{PARTIAL} -> R:R")
        assert not {"mm", "addmm"} & set(counting.counts)
        assert torch.equal(again, one) and torch.equal(summed, three)
        gradients = torch.autograd.grad((again + 2 * summed).sum(), (x, w))
        expected = torch.autograd.grad((one + 2 * three).sum(), (x, w), retain_graph=True)
        assert all(map(torch.equal, gradients, expected))


def test_attention_without_a_fused_kernel_runs_again() -> None:
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    mask = torch.zeros(8, 8, requires_grad=True)
    kept = Kept()
    expected = kept.again().attention(F.scaled_dot_product_attention, q, q, q, attn_mask=mask)
    assert kept.size_bytes == 0
    assert torch.equal(kept.again().attention(F.scaled_dot_product_attention, q, q, q, attn_mask=mask), expected)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("hf_llama", "dp2.tp2 mb=2 zero=3 recompute=selective"), ("gpt_tied", "pp2.tp2 mb=4 recompute=selective")],
)
def test_equals_single_device(name: str, strategy: str) -> None:
    check(setting(name, torch.float64), strategy, torch.float64)
