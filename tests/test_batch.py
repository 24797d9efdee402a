"""Cutting the batch of models that couple their samples, or only seem to.

Each runs on one device, on two shards of the batch, in two micro-batches and both; equal, or refused by the operator's name.
The micro-batches of the program's text are also run one after another, as the runtime does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.hardware import load_cluster
from planner.batch import MICRO, leaf_pair, split_batch
from planner.errors import BadInput
from planner.interpreter import AxisOf, Result, run_sharded, run_whole
from planner.ir.graph import Graph
from planner.ir.layout import COMMUNICATING, PARTIAL, WHOLE
from planner.lower import lower
from planner.normalise import normalise
from planner.segments import cut_into_segments
from planner.shard import conversion_moves
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.strategies import plan_by_hand
from planner.trace import Batch
from runtime.collectives import Axis
from runtime.stage_module import build_stage
from runtime.state import fill
from tests.models import seeded
from tests.operator_graphs import Traced, from_model
from tests.reference import assert_same

BATCH, LENGTH, INSIDE, OUT = 8, 4, 6, 5


class Net(nn.Module):
    """``function(self, *inputs)`` with the modules and weights it uses."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_parameter(name, nn.Parameter(part))
            else:
                self.add_module(name, part.double())

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class Case(NamedTuple):
    model: nn.Module
    inputs: tuple[Tensor, ...]
    coupled: str = ""  # the operator that keeps micro-batches from being independent


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cases() -> dict[str, Case]:
    """By name. The loss is what the model returns."""
    x, text, y = draw(BATCH, INSIDE), draw(BATCH, LENGTH, INSIDE), torch.randint(OUT, (BATCH,))
    words = torch.randint(7, (BATCH, LENGTH))
    kept = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (BATCH, 1))

    def line(inner: int = INSIDE, outer: int = OUT) -> nn.Linear:
        return nn.Linear(inner, outer)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    def free(function: Callable[..., Tensor], *inputs: Tensor, **parts: Any) -> Case:
        return Case(Net(function, **({"l": line()} | parts)), inputs)

    def coupled(op: str, function: Callable[..., Tensor], *inputs: Tensor, **parts: Any) -> Case:
        return Case(Net(function, **({"l": line()} | parts)), inputs, op)

    def experts(m: Any, x: Tensor) -> Tensor:
        gate = m.gate(x).softmax(-1)
        out = torch.einsum("be,beo->bo", gate, torch.einsum("bi,eio->beo", x, m.w))
        return out.pow(2).mean() + 0.1 * gate.mean(0).pow(2).sum()

    def target_network(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.l(x).softmax(-1)
        return ((m.l(x) - target) ** 2).mean()

    def contrastive(m: Any, x: Tensor) -> Tensor:
        z = F.normalize(m.l(x), dim=-1)
        return F.cross_entropy(z @ z.t(), torch.arange(BATCH))

    def encoder() -> nn.Module:
        return nn.TransformerEncoderLayer(INSIDE, 2, 8, 0.0, batch_first=True)

    def center(m: Any, x: Tensor) -> Tensor:
        z = m.l(x)
        return ((z - z.mean(0)) ** 4).mean()

    def rescaled(m: Any, x: Tensor) -> Tensor:
        z = m.l(x)
        return (z / z.detach().abs().mean()).pow(2).mean()

    return {
        "mean": free(lambda m, x: m.l(x).pow(2).mean(), x),
        "sum": free(lambda m, x: m.l(x).pow(2).sum(), x),
        "token_mean": free(lambda m, x, y: loss(m.l(x).transpose(1, 2), y.masked_fill(~kept, -100)), text, words % OUT),
        "class_weights": free(
            lambda m, x, y: F.cross_entropy(m.l(x), y, torch.arange(1.0, 6.0).double(), label_smoothing=0.1), x, y
        ),
        "per_sample": free(lambda m, x, y: F.cross_entropy(m.l(x), y, reduction="none").mean(), x, y),
        "nll": free(lambda m, x, y: F.nll_loss(m.l(x).log_softmax(-1), y), x, y),
        "own_weights": free(lambda m, x, w: (m.l(x).pow(2).sum(-1) * w).sum() / w.sum(), x, draw(BATCH).abs()),
        "mask": free(lambda m, x, k: (m.l(x).sum(-1) * k).sum() / k.sum().clamp(min=1), text, kept),
        "two_losses": free(
            lambda m, x, y: loss(m.l(x), y) + 0.3 * m.l(x).pow(2).mean() + m.l(x).abs().sum() / BATCH, x, y
        ),
        "penalty": free(lambda m, x: m.l(x).pow(2).mean() + 0.1 * sum((p**2).sum() for p in m.parameters()), x),
        "one_minus": free(lambda m, x, z: 1 - F.cosine_similarity(m.l(x), z, -1).mean(), x, draw(BATCH, OUT)),
        "plus_one": free(lambda m, x: 0.5 + m.l(x).pow(2).mean() - 0.25, x),
        "frozen": free(
            lambda m, x, y: loss(m.o(m.l(x)), y), x, y, l=line(INSIDE, INSIDE).requires_grad_(False), o=line()
        ),
        "no_grad": free(target_network, x),
        "sequence_first": free(
            lambda m, x: m.a(*[x.transpose(0, 1)] * 3, need_weights=False)[0].pow(2).mean(),
            text,
            a=nn.MultiheadAttention(INSIDE, 2),
        ),
        "encoder": free(lambda m, x, k: m.e(x, src_key_padding_mask=~k).pow(2).mean(), text, kept, e=encoder()),
        "class_token": free(
            lambda m, x, y: loss(m.l(torch.cat((m.c.expand(BATCH, -1, -1), x), 1))[:, 0], y),
            text,
            y,
            c=draw(1, 1, INSIDE),
        ),
        "positions": free(
            lambda m, w, y: loss(m.l(m.e(w) + m.p(torch.arange(LENGTH)))[:, -1], y),
            words,
            y,
            e=nn.Embedding(7, INSIDE),
            p=nn.Embedding(LENGTH, INSIDE),
        ),
        "last_token": free(lambda m, x, k, y: loss(m.l(x)[torch.arange(BATCH), k.sum(-1) - 1], y), text, kept, y),
        "picked": free(lambda m, x, y: -m.l(x).log_softmax(-1)[torch.arange(BATCH), y].mean(), x, y),
        "gathered": free(lambda m, x, y: -m.l(x).log_softmax(-1).gather(-1, y[:, None]).mean(), x, y),
        "one_hot": free(lambda m, x, y: ((m.l(x) - F.one_hot(y, OUT)) ** 2).mean(), x, y),
        "lstm": free(
            lambda m, x, y: loss(m.l(m.r(x)[0][:, -1]), y), text, y, r=nn.LSTM(INSIDE, INSIDE, batch_first=True)
        ),
        "gru": free(lambda m, x, y: loss(m.l(m.r(x.transpose(0, 1))[0][-1]), y), text, y, r=nn.GRU(INSIDE, INSIDE)),
        "rows": free(lambda m, x: m.l(x.flatten(0, 1)).view(BATCH, LENGTH, OUT).mean(1).pow(2).mean(), text),
        "windows": free(
            lambda m, x: (
                m.l(x.view(BATCH, 2, 2, 2, 2, INSIDE).transpose(2, 3).reshape(-1, 4, INSIDE))
                .view(BATCH, -1)
                .pow(2)
                .mean()
            ),
            draw(BATCH, 4, 4, INSIDE),
        ),
        "unfold": free(lambda m, x: m.c(F.unfold(x, 2)).pow(2).mean(), draw(BATCH, 3, 4, 4), c=nn.Conv1d(12, 4, 1)),
        "evaluated_norm": free(lambda m, x, y: loss(m.l(m.b(x)), y), x, y, b=nn.BatchNorm1d(INSIDE).eval()),
        "temperature": free(lambda m, x: (m.l(x) * m.t.exp()).pow(2).mean(), x, t=draw()),
        "sum_of_sums": free(lambda m, x, w: (m.l(x).sum(-1) * w).sum() / (w / w.sum()).exp().sum(), x, draw(BATCH)),
        "contrastive": coupled("aten.matmul", contrastive, x),
        "experts": coupled("aten.pow", experts, x, gate=line(INSIDE, 4), w=draw(4, INSIDE, OUT)),
        "softmax": coupled("aten.softmax", lambda m, x: (m.l(x).softmax(0) * x[:, :OUT]).sum(), x),
        "center": coupled("aten.", center, x),
        "rescaled": coupled("aten.div", rescaled, x),
        "ratio": coupled("aten.div", lambda m, x: m.l(x).pow(2).mean() / m.l(x).abs().mean(), x),
        "log_of_mean": coupled("aten.log", lambda m, x: m.l(x).pow(2).mean().log(), x),
        "deviation": coupled("aten.std", lambda m, x: m.l(x).std(), x),
        "largest": coupled("aten.max", lambda m, x: m.l(x).max(0)[0].sum(), x),
        "outer": coupled("aten.pow", lambda m, x: torch.einsum("bi,bj->ij", m.l(x), x).pow(2).mean(), x),
        "some_rows": coupled("aten.", lambda m, x: m.l(x)[1:7].sum(), x),
        "batch_norm": coupled("running_mean", lambda m, x, y: loss(m.l(m.b(x)), y), x, y, b=nn.BatchNorm1d(INSIDE)),
        "plain_norm": free(
            lambda m, x, y: loss(m.l(m.b(x)), y),
            x,
            y,
            b=nn.BatchNorm1d(INSIDE, affine=False, track_running_stats=False),
        ),
        "norm_of_time": coupled(
            "running_mean", lambda m, x: m.b(m.l(x).transpose(1, 2)).pow(4).mean(), text, b=nn.BatchNorm1d(OUT)
        ),
    }


@cache
def all_cases() -> dict[str, Case]:
    with seeded(0):
        return cases()


@cache
def graph_of(name: str) -> tuple[Traced, Result]:
    case = all_cases()[name]
    traced = from_model(case.model, Batch(case.inputs, {}))
    traced = traced._replace(graph=cut_into_segments(traced.graph))
    return traced, run_whole(traced.graph, traced.tensors)


def axes_of(graph: Graph, dp: int, micro_batches: int) -> tuple[Graph, list[AxisOf]]:
    """One dp rank's micro-batch, and its axes. Micro-batches follow one another; here they lie side by side."""
    split, over_dp = split_batch(graph, dp, micro_batches), split_batch(graph, dp, 1).graph
    axes = []
    for axis, count, before, partial in (
        ("dp", dp, graph, split.loss_is_partial_on_dp),
        (MICRO, micro_batches, over_dp, split.loss_is_partial_on_micro),
    ):
        if count > 1:
            pairs = {leaf.name: leaf_pair(split.graph, leaf.name) for leaf in before.leaves}
            axes.append(AxisOf(axis, count, pairs, PARTIAL if partial else WHOLE))
    return split.graph, axes


# Coupled in an input, which is then given whole to every micro-batch.
COUPLED_INPUT = {"sum_of_sums", "plain_norm"}


@pytest.mark.parametrize("name", all_cases())
def test_the_graph_is_the_model(name: str) -> None:
    case, (traced, reference) = all_cases()[name], graph_of(name)
    buffers = {key: value.clone() for key, value in case.model.named_buffers()}
    case.model.zero_grad()
    loss = case.model(*case.inputs)
    loss.backward()
    for key, value in buffers.items():
        case.model.get_buffer(key).copy_(value)
    assert torch.allclose(loss, reference.loss, 1e-12, 1e-12)
    for leaf in traced.graph.leaves_of("parameter"):
        expected, found = case.model.get_parameter(leaf.target).grad, reference.gradients.get(leaf.name)
        assert (expected is None) == (found is None)
        assert found is None or torch.allclose(found, expected, 1e-9, 1e-11), leaf.target


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("name", all_cases())
def test_data_parallel(name: str, dp: int) -> None:
    traced, reference = graph_of(name)
    graph, axes = axes_of(traced.graph, dp, 1)
    assert_same(run_sharded(graph, axes, traced.tensors), reference, 1e-9)
    if all_cases()[name].coupled or name in COUPLED_INPUT:
        return
    for node in graph.nodes:  # independent samples need counts alone
        if node.op == "convert":
            _, forward, backward = conversion_moves(node)
            assert forward not in COMMUNICATING or (forward == "all_reduce" and not node.output.differentiable), node
            assert backward not in COMMUNICATING or not node.output.differentiable, node


@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", all_cases())
def test_micro_batches(name: str, dp: int, micro_batches: int) -> None:
    traced, reference = graph_of(name)
    if all_cases()[name].coupled:
        with pytest.raises(BadInput, match=all_cases()[name].coupled):
            split_batch(traced.graph, dp, micro_batches)
        return
    graph, axes = axes_of(traced.graph, dp, micro_batches)
    assert_same(run_sharded(graph, axes, traced.tensors), reference, 1e-9)
    for node in graph.nodes:
        if node.op == "convert" and node.args[1] == MICRO:
            _, forward, backward = conversion_moves(node)
            assert forward in ("slice", "keep", "none", "all_reduce") and (
                forward != "all_reduce" or not node.output.differentiable
            )
            assert backward not in COMMUNICATING or not node.output.differentiable


@pytest.mark.parametrize("name", [name for name, case in all_cases().items() if not case.coupled])
def test_micro_batches_one_after_another(name: str) -> None:
    """The text of the program, run twice on half the batch each: losses and gradients add up to those of the whole."""
    (traced, reference), count = graph_of(name), 2
    cluster = load_cluster("dgx-a100-80gb", 1)
    problem = Problem(name, traced.graph, cluster, "adamw", "float32", cluster.device.memory_bytes)
    program = lower(traced.graph, plan_by_hand(Evaluator(problem), f"pp1 mb={count}"))
    (text,) = program.stages
    device, axes = torch.device("cpu"), {axis: Axis(axis) for axis in ("pp", "dp", "tp")}
    stage = build_stage(text, axes, device)
    leaves = {leaf.target: traced.tensors[leaf.name] for leaf in traced.graph.leaves if leaf.kind != "input"}
    fill(stage, {state.target: leaves[state.target].clone() for state in text.states}, axes, device)
    batched = {spec.name: spec.batched for spec in program.inputs}

    def given(name: str, i: int) -> Tensor:
        if name == "rng":
            return torch.tensor([0, 0, i])
        whole = traced.tensors[name]
        return whole.chunk(count)[i] if batched[name] else whole

    sums = {}
    if text.counts:
        before = [stage.prologue(**{x: given(x, i) for x in text.prologue_inputs}) for i in range(count)]
        sums = {spec.name: sum(made[n] for made in before) for n, spec in enumerate(text.counts)}
    total = torch.zeros((), dtype=torch.float64)
    for i in range(count):
        (loss,) = stage(**{x: given(x, i) for x in text.inputs}, **sums)
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, reference.loss, 1e-12, 1e-12)
    found = {held.spec.target: held.tensor.grad for held in stage.held if held.spec.trainable}
    for leaf in traced.graph.leaves_of("parameter"):
        expected = reference.gradients.get(leaf.name)
        assert expected is None or torch.allclose(found[leaf.target], expected, 1e-9, 1e-11), leaf.target


def test_fewer_rows_than_pieces() -> None:
    graph = graph_of("mean")[0].graph
    with pytest.raises(
        BadInput,
        match=r"a batch of 8 .* 3 data-parallel shards \(dp\) of 4 .* at least 12 rows, or plan with at most 2 ",
    ):
        split_batch(graph, 3, 4)
    with pytest.raises(BadInput, match="use at least 9 rows$"):
        split_batch(graph, 9, 1)


@pytest.mark.parametrize("name", ["last_token", "one_minus", "nll", "evaluated_norm"])
def test_normalising_twice_changes_nothing(name: str) -> None:
    graph = graph_of(name)[0].graph
    again = normalise(graph)
    assert [replace(node, segment=0) for node in again.nodes] == [replace(node, segment=0) for node in graph.nodes]
