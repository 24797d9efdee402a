"""The zoo: every model's graph is the model, and a plan over all axes of a mesh is the graph.

All in this process, in float64 where the model knows it. A few telling models train on real ranks; the whole product of
models and strategies on ranks is the census (benchmarks/census.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.census import cells_of
from costmodels.hardware import load_cluster
from planner.diagnosis import layers
from planner.errors import BadInput, TraceError
from planner.interpreter import run_sharded, run_whole, widened, widened_tensor
from planner.ir.graph import Graph
from planner.ir.program import Program
from planner.lower import lower
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.strategies import plan_by_hand
from planner.trace import tensors_by_target
from tests.models import Case
from tests.reference import assert_same, input_tensors, traced
from tests.zoo import SINGLE_PRECISION, ZOO

REFUSED = {"backward_hooks": "has a hook, which would not run on the ranks"}
# In part they run as they are, as one operator: tests of modules kept whole are in test_opaque.py.
KEPT_WHOLE = {
    "bloom", "mixtral_loop", "electra", "wav2vec2_ctc", "custom_functions", "branches", "routed_experts",
    "dataclasses_in_and_out", "cumulative_batch_norm",
}  # fmt: skip
# Batches whose samples meet in forward or loss, or move statistics: one micro-batch.
COUPLED = {
    "mixtral", "mixtral_grouped", "qwen3_moe", "resnet", "segformer", "clip", "gan_generator", "graph_network",
    "batch_norm", "dense_experts", "running_mean", "norms_without_statistics", "contrastive", "decorrelated",
    "triplets", "root_of_the_mean",
}  # fmt: skip
# Bfloat16 inside: sums in another order differ.
COARSE = {"autocast": 5e-2}
LARGE = {"deep"}
TRACED = [name for name in ZOO if name not in {*REFUSED, *KEPT_WHOLE, *LARGE}]


@dataclass(frozen=True)
class Found:
    case: Case
    graph: Graph
    tensors: dict[str, Tensor]
    exact: bool


def found(name: str) -> Found:
    """The traced model, and the values of all leaves of its graph."""
    exact = name not in SINGLE_PRECISION
    case = ZOO[name](torch.float64 if exact else torch.float32)
    made = traced(case)
    states = {leaf.target: leaf.name for leaf in made.graph.leaves if leaf.kind != "input"}
    tensors = {states[t]: x.detach().clone() for t, x in tensors_by_target(case.model, states).items()}
    return Found(case, made.graph, tensors | input_tensors(case, made), exact)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_hold_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=re.escape(REFUSED[name])):
        traced(ZOO[name]())


@pytest.mark.parametrize("name", TRACED)
def test_the_graph_is_the_model_and_a_plan_is_the_graph(name: str) -> None:
    here = found(name)
    _assert_graph_is_model(here)
    micro = 1 if name in COUPLED else 2
    _assert_text_is_sound(_assert_plan_is_graph(here, name, f"dp2.tp2 mb={micro}", 4))
    evaluator = Evaluator(_problem(here.graph, name, 2))
    _assert_text_is_sound(lower(here.graph, plan_by_hand(evaluator, f"pp2 mb={micro} schedule=gpipe")))
    if name in COUPLED:
        with pytest.raises(BadInput, match="use 1 micro-batch"):
            plan_by_hand(evaluator, "dp2 mb=2")


def _problem(graph: Graph, name: str, ranks: int) -> Problem:
    cluster = load_cluster("dgx-a100-80gb", ranks)
    return Problem(name, graph, cluster, "adamw", "float32", cluster.device.memory_bytes)


def _assert_graph_is_model(here: Found) -> None:
    """Loss and gradients of the graph run whole, None for None. Casts inside keep float64 models to float32."""
    whole = run_whole(here.graph, here.tensors)
    here.case.model.zero_grad()
    loss = here.case.loss()
    loss.backward()
    torch.testing.assert_close(whole.loss, loss.detach().to(whole.loss.dtype), rtol=1e-5, atol=1e-7)
    names = {name: leaf for leaf in here.graph.leaves_of("parameter") for name in (leaf.target, *leaf.aliases)}
    gradients = {name: p.grad for name, p in here.case.model.named_parameters()}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, expected in gradients.items():
        own = whole.gradients.get(names[name].name) if name in names else None
        assert (own is None) == (expected is None), name
        if own is not None and expected is not None:
            scale = max(float(expected.abs().max()), 1e-4 * largest)
            assert float((own - expected).abs().max()) <= 1e-5 * scale, name


def _assert_plan_is_graph(here: Found, name: str, strategy: str, ranks: int) -> Program:
    """Every rank's share of the graph, run in this process, adds up to the graph run whole."""
    graph = widened(here.graph) if here.exact else here.graph
    tensors = {n: widened_tensor(x) for n, x in here.tensors.items()} if here.exact else here.tensors
    plan = plan_by_hand(Evaluator(_problem(here.graph, name, ranks)), strategy)
    cut = layers(graph, plan)
    result = run_sharded(cut.local, cut.axes, tensors)
    assert_same(result, run_whole(cut.whole, tensors), COARSE.get(name, 1e-9 if here.exact else 1e-4))
    return lower(here.graph, plan)


def _assert_text_is_sound(program: Program) -> None:
    assert Program.from_dict(program.to_dict()) == program
    for before, after in zip(program.stages, program.stages[1:], strict=False):
        assert before.sends == after.receives
    for stage in program.stages:
        compile(stage.source, "stage", "exec")


TELLING = [
    ("t5", "pp2.tp2"),  # a bias and the encoder's result travel along with the decoder
    ("mixtral", "model"),  # every layer's router reaches the loss
    ("skips", "model"),
    ("stopped_gradients", "fsdp"),  # a teacher's gradient is None
    ("gan_generator", "dp2.tp2"),  # synchronised statistics, channels of transposed convolutions
    ("complex_weights", "dp2.tp2"),
    ("mixtral_grouped", "tp"),
    ("written_in_place", "pp2 mb=2"),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "strategy"), TELLING)
def test_on_ranks(name: str, strategy: str) -> None:
    (cell,) = cells_of(name, (strategy,))
    assert cell.outcome == "equal", cell.reason
