"""Every conversion between pairs, values and gradients, against the whole tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from planner.ir.layout import PARTIAL, REPLICATED, WHOLE, Pair, Placement, S, shard
from runtime.collectives import Axis, convert, move, parse_conversion, part
from tests.ranks import run_ranks


def local_of(whole: torch.Tensor, placement: Placement, rank: int, size: int, seed: int) -> torch.Tensor:
    """What ``rank`` holds of ``whole``; a partial placement becomes random summands."""
    if placement.kind == "R":
        return whole.clone()
    if placement.kind == "S":
        return part(whole, placement, size, rank).clone()
    generator = torch.Generator().manual_seed(seed)
    summands = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(size - 1)]
    return [*summands, whole - sum(summands)][rank]


def whole_of(local: torch.Tensor, placement: Placement, size: int) -> torch.Tensor:
    """Gather every rank's local tensor and combine by plain slicing, independent of the code under test."""
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.contiguous())
    if placement.kind == "P":
        return torch.stack(parts).sum(0)
    if placement.kind == "R":
        for other in parts[1:]:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0)
        return parts[0]
    chunks = [p.chunk(placement.outer, placement.dim) for p in parts]
    return torch.cat([chunks[j][o] for o in range(placement.outer) for j in range(size)], placement.dim)


def all_conversions(rank: int, size: int) -> None:
    axis = Axis("tp", size, rank, dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    shape = (size * 6, size * 6, 3)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    tried = 0
    for o, p in itertools.product((1, 2, 3), repeat=2):
        families = [WHOLE, PARTIAL, REPLICATED]
        targets = [shard(0, p), shard(1, p)]
        for f, t in itertools.chain(
            itertools.product(families, families) if o == p == 1 else (),
            itertools.product([shard(0, o), shard(1, o)], targets),
            itertools.product(families, targets) if o == 1 else (),
            itertools.product([shard(0, o), shard(1, o)], families) if p == 1 else (),
        ):
            x = local_of(value, f.value, rank, size, 1).requires_grad_()
            before = x.detach().clone()
            y = convert(x, axis, f"{f} -> {t}")
            assert y.is_contiguous()
            torch.testing.assert_close(
                whole_of(y.detach(), t.value, size), value, msg=lambda m, f=f, t=t: f"{f} -> {t}: {m}"
            )
            y.backward(local_of(gradient, t.gradient, rank, size, 2))
            torch.testing.assert_close(
                whole_of(x.grad, f.gradient, size), gradient, msg=lambda m, f=f, t=t: f"back {f} -> {t}: {m}"
            )
            assert torch.equal(x.detach(), before)
            tried += 1
    assert tried == 9 + 9 * 4 + 3 * 3 * 2 + 3 * 2 * 3
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        whole = torch.arange(size * 6).reshape(size * 6, 1).remainder(3).to(dtype)
        sliced = convert(whole, axis, "R:- -> S(0,2):-")
        assert torch.equal(sliced, part(whole, S(0, 2), size, rank))
        assert torch.equal(convert(sliced, axis, "S(0,2):- -> R:-"), whole)
    frozen = convert(torch.ones(2, requires_grad=True), axis, "P:- -> R:-")
    assert not frozen.requires_grad and frozen.tolist() == [size, size]


SHARES = {2: (4, 3), 3: (2, 2, 1)}


def dealt(whole: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """What ``rank`` holds where shares differ, by plain slicing."""
    if placement.kind != "S":
        return local_of(whole, placement, rank, size, 1)
    shares, found = SHARES[size], []
    for chunk in whole.chunk(placement.outer, placement.dim):
        unit = chunk.shape[placement.dim] // sum(shares)
        found.append(chunk.narrow(placement.dim, unit * sum(shares[:rank]), unit * shares[rank]))
    return torch.cat(found, placement.dim)


def unequal_conversions(rank: int, size: int) -> None:
    axis = Axis("dp", size, rank, dist.group.WORLD, SHARES[size])
    length = sum(SHARES[size]) * 2
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(length, length, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    pairs = [WHOLE, PARTIAL, REPLICATED, shard(0), shard(1), shard(0, 2), shard(1, 2)]

    def check(found: torch.Tensor, placement: Placement, whole: torch.Tensor, what: str) -> None:
        if placement.kind == "P":
            found, placement = whole_of(found, placement, size), WHOLE.value
        torch.testing.assert_close(found, dealt(whole, placement, rank, size), msg=lambda text: f"{what}: {text}")

    for f, t in itertools.product(pairs, pairs):
        x = dealt(value, f.value, rank, size).clone().requires_grad_()
        y = convert(x, axis, f"{f} -> {t}")
        assert y.is_contiguous()
        check(y.detach(), t.value, value, f"{f} -> {t}")
        y.backward(dealt(gradient, t.gradient, rank, size))
        assert x.grad is not None
        check(x.grad, f.gradient, gradient, f"back {f} -> {t}")


@pytest.mark.gloo
@pytest.mark.parametrize("size", SHARES)
def test_every_conversion_between_unequal_shares(size: int) -> None:
    run_ranks(unequal_conversions, size)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_every_conversion_equals_the_whole_tensor(size: int) -> None:
    run_ranks(all_conversions, size)


def test_one_device_converts_nothing() -> None:
    x = torch.randn(3, requires_grad=True)
    assert convert(x, Axis("tp"), "P:R -> R:R") is x
    assert move(x, Axis("tp"), S(0), Placement("R")) is x


def test_a_conversion_text_is_read_once_and_checked() -> None:
    assert parse_conversion("P:R -> S(1,3):S(1,3)") == (PARTIAL, Pair(S(1, 3), S(1, 3)))
    with pytest.raises(ValueError, match="not a conversion"):
        parse_conversion("P:R")
    with pytest.raises(ValueError, match="cannot be cut"):
        part(torch.zeros(5), S(0), 2, 0)
