"""What the search must find where the answer is known beforehand, over its whole space."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.hardware import Cluster
from examples import gpt
from planner.ir.graph import Graph
from planner.ir.plan import OperatorLayout, Plan
from planner.solve.configuration import Evaluator
from planner.solve.search import search
from planner.strategies import plan_by_hand
from tests.search_cases import AMPLE, cluster, problem, traced


def solved(graph: Graph, on: Cluster, memory_limit_bytes: int = AMPLE) -> Plan:
    """The best plan, with nothing of the space left out: each part was solved, or is ruled out by its bound."""
    plan = search(problem(graph, on, memory_limit_bytes), time_limit_s=60.0)
    assert plan.estimate.fits and not [item for item in plan.searched if item.outcome == "open"]
    return plan


def degrees(plan: Plan) -> tuple[int, int, int]:
    return plan.mesh.pp, plan.mesh.dp, plan.mesh.tp


def operators(plan: Plan, op: str) -> list[OperatorLayout]:
    """The layouts of one kind of operator, in order; never none."""
    found = [row for row in plan.layouts if op in row.op]
    assert found
    return found


def square_layers(count: int, width: int, rows: int) -> Graph:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    return traced(model, torch.empty(rows, width), target=torch.empty(rows, width), loss_fn=F.mse_loss)


def small_gpt(rows: int, vocabulary: int = 96, length: int = 64, width: int = 128, layers: int = 4) -> Graph:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    model = gpt.GPT(vocabulary, length, width, layers, 4)
    return traced(model, tokens, target=tokens, loss_fn=gpt.loss_fn)


def test_ample_memory_and_fast_links_want_data_parallelism() -> None:
    on = cluster(8, flops_per_s=1e11, link_bytes_per_s=1e12, latency_s=1e-7, launch_s=1e-7)
    plan = solved(small_gpt(64), on)
    assert degrees(plan) == (1, 8, 1)
    assert plan.micro_batches == 1 and plan.configuration.count("recompute=none") == 1


@pytest.mark.parametrize(("link_bytes_per_s", "cheaper"), [(1e12, "shards"), (1e8, "stages")])
def test_tight_memory_wants_sharded_weights_where_links_are_fast_and_stages_where_they_are_slow(
    link_bytes_per_s: float, cheaper: str
) -> None:
    """8 layers of 256 x 256 with gradients and two moments; a device holds half of that."""
    graph, on = square_layers(8, 256, 256), cluster(4, link_bytes_per_s=link_bytes_per_s)
    states_bytes = 8 * 4 * 256 * 256 * 4
    limit_bytes = states_bytes // 2
    whole = plan_by_hand(Evaluator(problem(graph, on, limit_bytes)), "ddp")
    assert not whole.estimate.fits
    plan = solved(graph, on, limit_bytes)
    if cheaper == "shards":
        assert degrees(plan) == (1, 4, 1) and plan.zero == 3
    else:
        assert plan.mesh.pp == 4


def test_two_large_products_are_cut_by_columns_then_by_rows() -> None:
    """One row, so that data parallelism and stages gain nothing: Megatron-LM's MLP, with one all-reduce."""
    width = 512
    model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))
    x = torch.empty(1, 256, width)
    plan = solved(traced(model, x, target=x, loss_fn=F.mse_loss), cluster(4, link_bytes_per_s=1e11))
    assert degrees(plan) == (1, 1, 4)
    assert [row.tp for row in operators(plan, "linear")] == ["o", "i"]
    first, second = operators(plan, "linear")
    assert (first.output, second.output) == ("S(2):S(2)", "P:R")
    assert operators(plan, "gelu")[0].output == first.output


def test_a_giant_vocabulary_is_cut_in_the_embedding_and_in_the_loss() -> None:
    plan = solved(small_gpt(8, vocabulary=65536, length=16, width=64, layers=2), cluster(4))
    assert plan.mesh.tp == 4
    by_module = {row.module: row for row in operators(plan, "embedding")}
    assert by_module["token_embedding"].tp == "v"
    head = operators(plan, "linear")[-1]
    loss = operators(plan, "cross_entropy_sum")[0]
    assert (head.module, head.tp, loss.tp) == ("head", "o", "v")
    weight = next(row for row in plan.layouts if row.name == "token_embedding_weight")
    assert weight.output == "S(0):S(0)"


def test_slow_links_between_nodes_want_stages_across_them_and_cut_operators_inside() -> None:
    """Few rows and large weights: gradients are the most there is to send, the result of a layer the least."""
    graph = square_layers(8, 1024, 8)
    on = cluster(4, gpus_per_node=2, link_bytes_per_s=1e11, inter_bytes_per_s=1e8)
    plan = solved(graph, on)
    assert degrees(plan) == (2, 1, 2)
    nodes = [{rank // on.gpus_per_node for rank in group} for group in plan.mesh.groups("tp")]
    assert nodes == [{0}, {1}]
    together = replace(on, gpus_per_node=4)
    assert solved(graph, together).objective_s < plan.objective_s


class Normalised(nn.Module):
    """Layers with BatchNorm: its statistics are those of the whole batch, so no micro-batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [[nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()] for _ in range(4)]
        self.layers = nn.Sequential(*(module for layer in layers for module in layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("rows", [1, 64])
def test_one_micro_batch_wants_no_pipeline(rows: int) -> None:
    """Because there is one row, or because BatchNorm couples the rows: stages would take turns."""
    if rows == 1:
        graph = small_gpt(1)
    else:
        x = torch.empty(rows, 256)
        graph = traced(Normalised(256), x, target=x, loss_fn=F.mse_loss)
    on = cluster(4, link_bytes_per_s=1e12, latency_s=1e-8, launch_s=1e-8)
    plan = solved(graph, on)
    assert plan.mesh.pp == 1 and plan.micro_batches == 1
    piped = plan_by_hand(Evaluator(problem(graph, on)), "pp4")
    assert piped.micro_batches == 1 and piped.estimate.bubble_s > 0.5 * piped.objective_s
    assert plan.objective_s < 0.9 * piped.objective_s


class Classifier(nn.Module):
    """Two convolutions at full resolution, then linear layers of ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(F.relu(self.conv1(images)))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))))


def test_a_cnn_with_huge_early_activations_is_data_parallel_first() -> None:
    """Krizhevsky 2014, "one weird trick": the batch is cut through the convolutions, the weights of the linear layers."""
    images, classes = torch.empty(32, 3, 64, 64), torch.zeros(32, dtype=torch.int64)
    on = cluster(4, link_bytes_per_s=1e9)

    def graph(width: int) -> Graph:
        return traced(Classifier(width), images, target=classes, loss_fn=F.cross_entropy)

    plan = solved(graph(4096), on)
    assert degrees(plan) == (1, 1, 4)
    assert [row.tp for row in operators(plan, "conv2d")] == ["n", "n"]
    large = [row for row in operators(plan, "linear") if row.module in ("fc1", "fc2")]
    assert [row.tp in ("o", "i") for row in large] == [True, True]
    evaluator = Evaluator(problem(graph(4096), on))
    for strategy in ("ddp", "fsdp"):
        assert plan.objective_s < plan_by_hand(evaluator, strategy).objective_s / 2
    # With small linear layers data parallelism to the end is as good, and the convolutions know nothing else.
    plan = solved(graph(16), on)
    assert {(row.dp, row.tp) for row in operators(plan, "conv2d")} <= {("n", "n"), ("n", "R")}
    assert plan.mesh.tp == 1 or all(row.tp == "n" for row in operators(plan, "conv2d"))
    assert plan_by_hand(Evaluator(problem(graph(16), on)), "ddp").objective_s < 1.02 * plan.objective_s
