"""Operators that communicate or draw random numbers, against torch's own on the whole tensors in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from planner.ir.layout import S
from runtime.collectives import Axis, part
from runtime.normalization import batch_norm
from runtime.operators import (
    cross_entropy_count,
    dropout,
    random_seed,
    seeded,
    vocab_parallel_cross_entropy_sum,
    vocab_parallel_embedding,
)
from tests.ranks import run_ranks

SINGLE = Axis("tp")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_cross_entropy(axis: Axis) -> None:
    n, c, size, rank = 6, 12, axis.size, axis.index
    class_weight = randn(c, seed=3).abs()
    index = torch.tensor([0, 11, 5, -100, 7, 3])
    probabilities = randn(n, c, seed=4).softmax(-1)
    spatial = torch.arange(n * 4).remainder(c).reshape(n, 4)
    for weight, smoothing in itertools.product((None, class_weight), (0.0, 0.1)):
        for shape, target in (((n, c), index), ((n, c), probabilities), ((n, c, 4), spatial), ((c,), torch.tensor(4))):
            whole = (3 * randn(*shape)).requires_grad_()
            expected = F.cross_entropy(whole, target, weight, reduction="sum", label_smoothing=smoothing)
            (0.7 * expected).backward()
            class_dim = min(1, len(shape) - 1)
            local = part(whole.detach(), S(class_dim), size, rank).clone().requires_grad_()
            loss = vocab_parallel_cross_entropy_sum(local, target, axis, weight, label_smoothing=smoothing)
            (0.7 * loss).backward()
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(local.grad, part(whole.grad, S(class_dim), size, rank), rtol=1e-12, atol=1e-13)
            if target is not probabilities or weight is None:
                mean = F.cross_entropy(whole, target, weight, label_smoothing=smoothing)
                count = cross_entropy_count(target, c, weight, dtype=torch.float64)
                torch.testing.assert_close(loss / count, mean, rtol=1e-13, atol=1e-13)
    local = part(randn(n, c), S(1), size, rank).clone().requires_grad_()
    ignored = vocab_parallel_cross_entropy_sum(local, torch.full((n,), 5), axis, ignore_index=5)
    ignored.backward()
    assert ignored.item() == 0 and not local.grad.any()
    assert cross_entropy_count(torch.full((n,), 5), c, ignore_index=5).item() == 0


def check_embedding(axis: Axis) -> None:
    table, ids = randn(12, 5), torch.tensor([[0, 3, 11], [6, 5, 3]])
    for padding in (-1, 3):
        whole = table.clone().requires_grad_()
        expected = F.embedding(ids, whole, padding_idx=padding if padding >= 0 else None)
        gradient = randn(2, 3, 5, seed=1)
        expected.backward(gradient)
        local = part(table, S(0), axis.size, axis.index).clone().requires_grad_()
        partial = vocab_parallel_embedding(ids, local, axis, padding)
        partial.backward(gradient)
        total = partial.detach().clone()
        if axis.group is not None:
            dist.all_reduce(total)
        assert torch.equal(total, expected.detach())
        assert torch.equal(local.grad, part(whole.grad, S(0), axis.size, axis.index))


def reference_batch_norm(x, weight, bias, mean, var, gradient):  # type: ignore[no-untyped-def]
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-5)
    y.backward(gradient)
    return y.detach(), mean, var, x.grad, weight.grad, bias.grad


def check_batch_norm(axes: tuple[Axis, ...], cuts: tuple[S, ...]) -> None:
    """``cuts[i]`` is how axis i holds the input; axes in nesting order."""
    x, gradient = 2 + 3 * randn(8, 3, 4, 4), randn(8, 3, 4, 4, seed=1)
    state = (randn(3, seed=2), randn(3, seed=3), randn(3, seed=4), randn(3, seed=5).abs())

    def local(t: torch.Tensor) -> torch.Tensor:
        for axis, cut in zip(axes, cuts, strict=True):
            t = part(t, cut, axis.size, axis.index)
        return t.clone()

    weight, bias, mean, var = state
    y, new_mean, new_var, dx, dweight, dbias = reference_batch_norm(x, *state, gradient)
    mine, w, b = (t.clone().requires_grad_() for t in (local(x), weight, bias))
    out, out_mean, out_var = batch_norm(mine, w, b, mean, var, True, 0.3, 1e-5, axes)
    out.backward(local(gradient))
    for axis in axes:
        if axis.group is not None:
            dist.all_reduce(w.grad, group=axis.group)
            dist.all_reduce(b.grad, group=axis.group)
    found = (out.detach(), out_mean, out_var, mine.grad, w.grad, b.grad)
    for actual, expected in zip(found, (local(y), new_mean, new_var, local(dx), dweight, dbias), strict=True):
        assert not actual.requires_grad
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def on_two_ranks(rank: int, size: int) -> None:
    axis = Axis("tp", size, rank, dist.group.WORLD)
    check_cross_entropy(axis)
    check_embedding(axis)
    check_batch_norm((axis,), (S(0),))
    check_batch_norm((axis,), (S(3),))


def on_a_two_by_two_mesh(rank: int, size: int) -> None:
    axes = []
    for name, groups in (("dp", [[0, 2], [1, 3]]), ("tp", [[0, 1], [2, 3]])):
        handles = [dist.new_group(g) for g in groups]
        for ranks, handle in zip(groups, handles, strict=True):
            if rank in ranks:
                axes.append(Axis(name, 2, ranks.index(rank), handle))
    check_batch_norm(tuple(axes), (S(0), S(2)))
    rng = torch.tensor([1, 2, 3])
    ones = torch.ones(64)
    masks = torch.empty(4, 64)
    for sharded, distinct in (((), 1), ((axes[0],), 2), (tuple(axes), 4)):
        dist.all_gather_into_tensor(masks.view(-1), dropout(ones, 0.5, rng, 7, sharded))
        assert len({tuple(m.tolist()) for m in masks}) == distinct


@pytest.mark.gloo
def test_operators_over_two_ranks_equal_the_whole() -> None:
    run_ranks(on_two_ranks, 2)


@pytest.mark.gloo
def test_batch_norm_and_dropout_on_two_axes() -> None:
    run_ranks(on_a_two_by_two_mesh, 4)


def test_on_one_device_the_operators_are_torchs() -> None:
    check_cross_entropy(SINGLE)
    check_embedding(SINGLE)
    check_batch_norm((), ())


def test_batch_norm_passes_gradcheck() -> None:
    def y(x, weight, bias):  # type: ignore[no-untyped-def]
        return batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)[0]

    assert torch.autograd.gradcheck(y, [t.requires_grad_() for t in (randn(4, 2, 3), randn(2), randn(2, seed=1))])


def test_batch_norm_outside_training_uses_the_running_statistics() -> None:
    x, mean, var = randn(4, 3), randn(3), randn(3).abs()
    y, same_mean, same_var = batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)
    torch.testing.assert_close(y, (x - mean) / (var + 1e-5).sqrt())
    assert same_mean is mean and same_var is var
    with pytest.raises(ValueError, match="more than one value"):
        batch_norm(x[:1], None, None, mean, var, True, 0.1, 1e-5)


def test_dropout_is_a_function_of_its_place_only() -> None:
    x = torch.ones(20000, dtype=torch.float64, requires_grad=True)
    rng, other = torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])
    y = dropout(x, 0.25, rng, 3)
    torch.manual_seed(5)
    assert torch.equal(y, dropout(x, 0.25, rng, 3))
    assert not torch.equal(y, dropout(x, 0.25, other, 3)) and not torch.equal(y, dropout(x, 0.25, rng, 4))
    assert abs((y == 0).float().mean().item() - 0.25) < 0.02 and set(y.tolist()) == {0.0, 1 / 0.75}
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert dropout(x, 0.0, rng, 3) is x and not dropout(x, 1.0, rng, 3).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(x, 1.5, rng, 3)


def test_seeds_differ_with_every_part_of_the_place() -> None:
    seeds = {
        random_seed(torch.tensor([s, t, m]), site, (Axis("dp", 4, d), Axis("tp", 4, i)))
        for s, t, m, site, d, i in itertools.product(range(3), repeat=6)
    }
    assert len(seeds) == 3**6 and all(0 <= seed < 2**63 for seed in seeds)


def test_seeded_leaves_the_generators_as_they_were() -> None:
    rng = torch.tensor([0, 0, 0])
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = seeded(torch.bernoulli, rng, 1)(torch.full((50,), 0.5))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, seeded(torch.bernoulli, rng, 1)(torch.full((50,), 0.5)))
    assert not torch.equal(first, seeded(torch.bernoulli, rng, 2)(torch.full((50,), 0.5)))
