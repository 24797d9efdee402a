"""Predicted memory beside what torch allocates: every model, run by this project's runtime, the allocator watched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.ir.graph import Graph
from planner.ir.plan import MemoryEstimate
from planner.live import temporary_bytes
from planner.lower import lower
from planner.saved import saved_tensors
from planner.segments import segment_nodes
from planner.solve.configuration import Evaluator
from planner.strategies import parse_strategy, plan_by_hand
from planner.trace import Batch, tensors_by_target, trace
from runtime.worker import Rank
from tests.live_ranks import allocated_bytes, step_memory
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.reference import input_tensors, traced
from tests.search_cases import cluster, problem


def measured_and_predicted(name: str, strategy: str) -> tuple[int, int, MemoryEstimate]:
    """(peak, left at the end, prediction) of the first step of one device."""
    case = MODELS[name](torch.float32)
    found = traced(case)
    plan = plan_by_hand(Evaluator(problem(found.graph, cluster(1, kind="cpu"))), strategy)
    targets = [leaf.target for leaf in found.graph.leaves if leaf.kind in ("parameter", "buffer")]
    rank = Rank()
    rank.load(
        lower(found.graph, plan), {k: x.detach().clone() for k, x in tensors_by_target(case.model, targets).items()}
    )
    inputs = input_tensors(case, found)
    most, left = allocated_bytes(lambda: rank.forward_backward(inputs))
    return most, left, plan.estimate.stages[0].memory


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit"])
def test_the_peak_of_a_step_of_two_micro_batches(name: str, recompute: str) -> None:
    """In the second one there are gradients to add to, so all that is counted is there."""
    most, left, memory = measured_and_predicted(name, f"pp1 mb=2 recompute={recompute}")
    predicted = memory.gradients_bytes + memory.activations_bytes + memory.temporary_bytes
    assert predicted == pytest.approx(most, rel=0.06)
    assert memory.gradients_bytes <= left <= memory.gradients_bytes + 0.05 * most


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_peak_of_a_step_of_one_micro_batch_is_no_more_than_predicted(name: str) -> None:
    most, _, memory = measured_and_predicted(name, "pp1 mb=1")
    predicted = memory.gradients_bytes + memory.activations_bytes + memory.temporary_bytes
    assert 0.97 * most <= predicted <= most + memory.gradients_bytes + 0.15 * most


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2 mb=2", "dp2 mb=2 zero=3", "tp2 mb=2", "pp2.tp2 mb=4", "pp2 mb=4 schedule=interleaved v=2",
        "pp2 mb=4 schedule=zero-bubble v=2",
    ],
)  # fmt: skip
def test_the_peak_of_every_rank(strategy: str, tmp_path: Path) -> None:
    """With what stages exchange, gathered weights, and gradients of weights that are put off."""
    found = traced(MODELS["gpt_tied"](torch.float32))
    mesh = parse_strategy(strategy, 4 if "." in strategy else 2).mesh
    plan = plan_by_hand(Evaluator(problem(found.graph, cluster(mesh.size, kind="cpu"))), strategy)
    run_ranks(step_memory, mesh.size, "gpt_tied", lower(found.graph, plan), str(tmp_path))
    for rank in range(mesh.size):
        most = int((tmp_path / str(rank)).read_text().split()[0])
        memory = plan.estimate.devices[rank // mesh.stride("pp") % mesh.pp]
        predicted = memory.gradients_bytes + memory.activations_bytes + memory.temporary_bytes
        assert 0.8 * most <= predicted <= 1.15 * most  # gloo lets go of its tensors when it comes to it


ROWS, WIDTH, CLASSES = 64, 8, 1000


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x).float(), targets)


def head() -> Graph:
    with torch.device("meta"):
        batch = (torch.empty(ROWS, WIDTH, dtype=torch.bfloat16), torch.empty(ROWS, dtype=torch.int64))
        return trace(Head().to(torch.bfloat16), Batch(batch, {})).graph


@pytest.mark.parametrize(
    ("options", "a_logit"),
    [
        # float32 gradients of the log-probabilities and of the logits, beside the log-probabilities
        ({}, 8),
        # the logits in bfloat16, or their gradient, beside the float32 ones
        ({"loss_in_place": True, "accumulates": False}, 2),
    ],
)
def test_what_is_alive_around_a_loss(options: dict[str, bool], a_logit: int) -> None:
    graph = head()
    nodes = [node for segment in segment_nodes(graph) for node in segment]
    saved = saved_tensors(graph, nodes, "gpu")
    assert saved.own_bytes == pytest.approx(4 * ROWS * CLASSES, rel=0.03)
    found = temporary_bytes(graph, nodes, saved, "gpu", **options)
    assert found == pytest.approx(a_logit * ROWS * CLASSES, rel=0.03)
