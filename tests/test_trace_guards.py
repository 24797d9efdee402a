"""What torch.export drops without a word is kept, told, or refused with its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import planner
from planner.errors import BadInput, TraceError
from planner.trace import Batch, Traced, trace


class Model(nn.Module):
    """Two layers with ``between`` in the middle."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        self.count, self.kept = 0, None
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).sum()


def traced(between: Callable[[Any, Tensor], Tensor]) -> Traced:
    return trace(Model(between), Batch((torch.randn(8, 4),), {}))


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


def with_hook(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def in_inference_mode(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def detached_in_place(model: Any, x: Tensor) -> Tensor:
    return (2 * x).detach_()


def by_checkpoint(model: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=True)


def clamped_unseen(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x


def clamped_weight(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.last.weight.clamp_(-1, 1)
    return x


def shorter_buffer(model: Any, x: Tensor) -> Tensor:
    model.average = torch.zeros(3)
    return x


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda model, x: Triple.apply(x), "autograd.Function Triple is code that a plan cannot hold"),
        (detached_in_place, r"detach_\(\) in place is not kept"),
        (by_checkpoint, "pass use_reentrant=False"),
        (clamped_unseen, "written in place under no_grad"),
    ],
)
def test_kept_in_one_operator_with_the_reason(between: Callable[[Any, Tensor], Tensor], words: str) -> None:
    apply = torch.autograd.Function.apply
    graph = traced(between).graph
    assert [node.op for node in graph.nodes] == ["module"]
    (note,) = graph.notes
    assert re.search(words, note) and f"{Path(__file__).name}:" in note and "the whole model" in note
    assert torch.autograd.Function.apply == apply
    assert Triple.apply(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (with_hook, "a tensor gets a hook"),
        (in_inference_mode, "inference_mode is not kept"),
        (clamped_weight, r"writes into its parameter 'last.weight'"),
    ],
)
def test_refused_where_it_cannot_be_right(between: Callable[[Any, Tensor], Tensor], words: str) -> None:
    model = Model(between)
    before = model.last.weight.detach().clone()
    with pytest.raises(TraceError, match=words):
        trace(model, Batch((torch.randn(8, 4),), {}))
    assert torch.equal(model.last.weight, before)


def test_a_buffer_that_changes_its_shape() -> None:
    with pytest.raises(TraceError, match=r"turns buffer 'average' from torch.float32 \[4\] into torch.float32 \[3\]"):
        traced(shorter_buffer)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter(kind: str) -> None:
    model = Model(lambda model, x: x)
    getattr(model.first.weight, kind)(lambda _: None)
    with pytest.raises(TraceError, match="parameter 'first.weight' has a hook"):
        trace(model, Batch((torch.randn(8, 4),), {}))


def assigned(model: Any, x: Tensor) -> Tensor:
    model.average = 0.9 * model.average + 0.1 * x.mean(0)
    return x - model.average


def updated(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.average.mul_(0.9).add_(0.1 * x.mean(0))
    return x - model.average


@pytest.mark.parametrize("between", [assigned, updated])
def test_a_buffer_made_anew_is_written_and_keeps_no_gradient(between: Callable[[Any, Tensor], Tensor]) -> None:
    graph = traced(between).graph
    ((buffer, value),) = graph.writes
    assert graph.leaf_by_name[buffer].target == "average"
    assert not graph.values[value].differentiable


def test_what_forward_counts_or_keeps_is_told_and_put_back() -> None:
    def counting(model: Any, x: Tensor) -> Tensor:
        model.count += 1
        model.kept = x
        model.more = x
        return x * model.count

    model = Model(counting)
    found = trace(model, Batch((torch.randn(8, 4),), {}))
    assert found.graph.notes == (
        "the model changes its attribute 'count' in forward; the plan keeps what the first call made of it",
    )
    assert (model.count, model.kept, hasattr(model, "more")) == (0, None, False)
    assert traced(lambda model, x: x).graph.notes == ()


class Recording(nn.Module):
    """Registers, at its first call, a hook that doubles what a layer gives, as libraries that record layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_recording", False):
            self.first.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.is_recording = True
        return self.first(x).mean()


def test_a_hook_registered_in_forward_is_there_once() -> None:
    model, x = Recording(), torch.randn(2, 4)
    trace(model, Batch((x,), {}))
    assert not model.first._forward_hooks and not hasattr(model, "is_recording")
    assert torch.equal(model(x), 2 * nn.functional.linear(x, model.first.weight, model.first.bias).mean())


def test_a_batch_norm_over_all_steps_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    graph = trace(model, Batch((torch.randn(8, 4),), {}), lambda y: y.sum()).graph
    assert {graph.leaf_by_name[buffer].target for buffer, _ in graph.writes} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert "1 runs as one operator" in graph.notes[0] and "averages its statistics over all steps" in graph.notes[0]
    assert not trace(model.eval(), Batch((torch.randn(8, 4),), {}), lambda y: y.sum()).graph.notes


def test_a_trainable_tensor_of_the_loss_is_refused() -> None:
    scale = torch.nn.Parameter(torch.ones(4))
    batch = Batch((torch.randn(8, 4),), {}, torch.randn(8, 4))
    with pytest.raises(
        TraceError, match="(?s)trainable tensor that is no parameter of the model planned.*test_trace_guards"
    ):
        trace(torch.nn.Linear(4, 4), batch, lambda y, t: torch.nn.functional.mse_loss(y * scale, t))
    scale.requires_grad_(False)
    trace(torch.nn.Linear(4, 4), batch, lambda y, t: torch.nn.functional.mse_loss(y * scale, t))


def test_modes_around_a_call_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)

    def plan() -> Any:
        return planner.auto_parallelize(
            model, 2, example_inputs=(x,), loss_fn=nn.functional.mse_loss, strategy="ddp", cluster="dgx-a100-80gb"
        )

    made = plan()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadInput, match="autocast.* is on around"):
        plan()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadInput, match="autocast.* is on around"):
        made.forward_backward(x, target=x)
    with torch.no_grad(), pytest.raises(BadInput, match="no_grad"):
        made.forward_backward(x, target=x)
