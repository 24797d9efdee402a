"""A backward in two parts gives what one backward gives, on graphs of every shape."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.split_backward import gradients_of_inputs

Leaves = list[Tensor]


def tangle(seed: int, size: int) -> tuple[Leaves, list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, inputs (two with gradients, one without), and outputs with gradients: matmuls, sums, views, weights made of
    weights, weights and inputs used many times or never, outputs made of weights alone, and inputs handed on."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [normal(4, 4).requires_grad_() for _ in range(5)]
    inputs = [normal(3, 4).requires_grad_() for _ in range(2)]
    acts, made = list(inputs), list(weights)
    for _ in range(size):
        x, y, w, v = choose.choice(acts), choose.choice(acts), choose.choice(made), choose.choice(made)
        left, right = x.split(2, 1)
        acts_of = (
            x @ w,
            x.tanh() + y,
            x * w.sum(0),
            torch.cat((right, left.sigmoid()), 1),
            torch.cat((x, y)).view(2, 3, 4)[0],
        )
        made_of = (w + v, w.tanh(), w @ v)
        if choose.random() < 0.7:
            acts.append(choose.choice(acts_of))
        else:
            made.append(choose.choice(made_of))
    outputs = [choose.choice(acts + made) for _ in range(3)]
    return weights, inputs, outputs, [normal(*x.shape) for x in outputs]


@given(st.integers(0, 10**6), st.integers(0, 14))
@settings(max_examples=150)
def test_two_parts_are_the_whole(seed: int, size: int) -> None:
    weights, inputs, outputs, gradients = tangle(seed, size)
    leaves = weights + inputs
    torch.autograd.backward(outputs, gradients, retain_graph=True)
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    found, later = gradients_of_inputs(outputs, gradients, [*inputs, torch.arange(3)], weights)
    assert all(weight.grad is None for weight in weights)
    assert all(x.grad is None for x in inputs) and found[2] is None
    later.run()
    for ours, theirs in zip([*(w.grad for w in weights), *found[:2]], expected, strict=True):
        if theirs is None or ours is None:
            assert (theirs is None or not theirs.any()) and (ours is None or not ours.any())
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_gradient_is_no_other_tensor() -> None:
    """That of two added weights is one tensor, and that of what was received; adding the next one must not change both."""
    received, one, other = (torch.ones(2).requires_grad_() for _ in range(3))
    for _ in range(2):
        (sent,), later = gradients_of_inputs([received + one + other], [torch.ones(2)], [received], [one, other])
        assert sent is not None
        later.run()
        assert torch.equal(sent, torch.ones(2))
    assert one.grad is not None and other.grad is not None
    assert torch.equal(one.grad, torch.full((2,), 2.0)) and torch.equal(other.grad, torch.full((2,), 2.0))


def test_a_loss_counts_with_gradient_one_and_frozen_weights_get_none() -> None:
    received, weight, frozen = torch.ones(3).requires_grad_(), torch.full((3,), 2.0).requires_grad_(), torch.ones(3)
    (sent,), later = gradients_of_inputs([(received * weight * frozen).sum()], None, [received], [weight, frozen])
    later.run()
    assert sent is not None and weight.grad is not None
    assert torch.equal(sent, weight.detach()) and torch.equal(weight.grad, torch.ones(3)) and frozen.grad is None


@pytest.mark.parametrize("needs", [False, True])
def test_nothing_received_needs_a_gradient(needs: bool) -> None:
    """Everything is left to the second part; without weights nothing is left."""
    received, weight = torch.ones(3), torch.ones(3).requires_grad_(needs)
    found, later = gradients_of_inputs([(received * weight).sum()], None, [received], [weight])
    later.run()
    assert found == (None,)
    assert (weight.grad is not None) == needs


def test_a_fork_computes_only_what_is_asked_for() -> None:
    """Of a matmul the first part makes the gradient of the input, the second that of the weight."""
    made: list[tuple[bool, bool]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            made.append(tuple(ctx.needs_input_grad))
            x, w = ctx.saved_tensors
            return gradient @ w.T, x.T @ gradient

    x, weights = torch.ones(2, 3).requires_grad_(), [torch.ones(3, 3).requires_grad_() for _ in range(3)]
    y = x
    for weight in weights:
        y = Watched.apply(y, weight)
    _, later = gradients_of_inputs([y], [torch.ones(2, 3)], [x], weights)
    assert len(made) == 3
    later.run()
    assert len(made) == 6
