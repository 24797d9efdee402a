"""Interleaved and zero-bubble pipelines train as one device does, on a model with everything that crosses stages.

float64, 2 and 4 ranks; also clipping, checkpoints from one schedule into another, and the same dropout as without stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.equality import largest_error
from planner.parallel import Parallel
from runtime.launch import LocalRanks
from tests.models import seeded

pytestmark = pytest.mark.gloo

ROWS, LENGTH, WIDTH, WORDS, BLOCKS = 8, 5, 8, 12, 8
CLIP = 0.5
CLUSTER = "dgx-a100-80gb"


class Knots(nn.Module):
    """Eight residual blocks over token embeddings.

    One table serves as embedding, in the middle and twice at the end, so stages of one rank share it and of several; a sum
    of two weights is made in one stage and sent to later ones, a boolean tensor and an early activation too; a weight is
    added whole; a scalar scales.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(BLOCKS))
        self.one, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def block(self, i: int, x: Tensor) -> Tensor:
        return x + self.downs[i](F.gelu(self.ups[i](self.norms[i](x))))

    def forward(self, ids: Tensor) -> Tensor:
        table = self.embedding.weight
        x = self.block(0, self.embedding(ids))
        early = x = self.block(1, x)
        x = self.block(2, x)
        positive, made = x > 0, self.one + self.other
        x = self.block(3, x) + self.places * made
        x = self.block(4, x) + early
        x = torch.where(positive, x, 0.1 * x) + made
        x = self.block(5, x) + F.linear(x, table).softmax(-1) @ table
        x = self.block(6, x) * (1 + self.scale)
        x = self.block(7, x)
        return F.linear(x, table) + F.linear(x, table).sum(-1, keepdim=True)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def knots() -> Knots:
    with seeded(0):
        return Knots().double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    with seeded(number):
        ids, targets = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))
    targets[1, :3] = -100
    return ids, targets


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def planned(model: nn.Module, ranks: LocalRanks, strategy: str) -> Parallel:
    ids, targets = batch(0)
    made = planner.auto_parallelize(
        model,
        ranks.n,
        example_inputs=(ids,),
        example_target=targets,
        loss_fn=loss_fn,
        strategy=strategy,
        cluster=CLUSTER,
    )
    made._start = lambda: ranks
    return made


@pytest.fixture(scope="module")
def pairs() -> Iterator[LocalRanks]:
    with LocalRanks.start(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def fours() -> Iterator[LocalRanks]:
    with LocalRanks.start(4) as ranks:
        yield ranks


def check(ranks: LocalRanks, strategy: str) -> None:
    """Loss and gradients of one pass, then losses, parameters and buffers of three clipped steps of AdamW."""
    model = knots()
    parallel = planned(copy.deepcopy(model), ranks, strategy)
    ids, targets = batch(0)
    expected = loss_fn(model(ids), targets)
    expected.backward()
    assert parallel.forward_backward(ids, target=targets) == pytest.approx(expected.item(), rel=1e-12)
    error, tensor = largest_error(parallel.gradients(), {name: p.grad for name, p in model.named_parameters()})
    assert error <= 1e-9, f"gradient of {tensor} under {parallel.plan.configuration}"
    optimizer, losses = adamw(list(model.parameters())), []
    for number in range(3):
        optimizer.zero_grad()
        ids, targets = batch(number)
        loss = loss_fn(model(ids), targets)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    found = parallel.train(map(batch, range(3)), adamw, max_norm=CLIP, progress=False)
    assert found == pytest.approx(losses, rel=1e-9)
    error, tensor = largest_error(parallel.state_dict(), model.state_dict())
    assert error <= 1e-9, f"{tensor} after training under {parallel.plan.configuration}"


@pytest.mark.parametrize(
    "strategy",
    [
        "pp2 mb=4 v=2",
        "pp2 mb=6 v=3 recompute=full",  # unequal micro-batches
        "pp2 mb=1 v=4",
        "pp2 mb=4 schedule=zero-bubble",
        "pp2 mb=6 schedule=zero-bubble v=3",
    ],
)
def test_two_ranks(pairs: LocalRanks, strategy: str) -> None:
    check(pairs, strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        "pp2.dp2 mb=2 zero=3 v=3 recompute=full",
        "pp2.tp2 mb=4 v=2",
        "pp4 mb=4 v=3",
        "pp2.dp2 mb=4 schedule=zero-bubble v=2",
        "pp2.tp2 mb=2 schedule=zero-bubble v=3",
        "pp4 mb=3 schedule=zero-bubble v=2",
    ],
)
def test_four_ranks(fours: LocalRanks, strategy: str) -> None:
    check(fours, strategy)


@pytest.mark.parametrize("strategy", ["pp2 mb=4 schedule=zero-bubble v=3", "pp2 mb=4 v=3"])
def test_frozen_first_stages(pairs: LocalRanks, strategy: str) -> None:
    """Behind them nothing that is received has a gradient."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(9))).double()
    model[:4].requires_grad_(False)
    x, y = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()
    parallel = planner.auto_parallelize(
        copy.deepcopy(model),
        2,
        example_inputs=(x,),
        example_target=y,
        loss_fn=F.mse_loss,
        strategy=strategy,
        cluster=CLUSTER,
    )
    parallel._start = lambda: pairs
    assert not any(spec.differentiable for spec in parallel.program.stages[1].receives)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    assert parallel.forward_backward(x, target=y) == pytest.approx(loss.item(), rel=1e-12)
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert largest_error(parallel.gradients(), trained)[0] <= 1e-9


def test_a_checkpoint_goes_from_one_schedule_to_another(pairs: LocalRanks, tmp_path: Path) -> None:
    """Two steps and one step elsewhere are three steps; what stages of one rank share is saved once, with its optimizer."""
    whole = planned(knots(), pairs, "pp2 mb=4")
    expected = whole.train(map(batch, range(3)), adamw, progress=False)
    state = whole.state_dict()
    first = planned(knots(), pairs, "pp2 mb=4 v=3")
    assert first.train(map(batch, range(2)), adamw, progress=False) == pytest.approx(expected[:2], rel=1e-9)
    first.save(tmp_path / "checkpoint")
    second = planned(knots(), pairs, "pp2 mb=2 schedule=zero-bubble v=2")
    second.set_optimizer(adamw)
    second.load(tmp_path / "checkpoint")
    assert second.train([batch(2)], progress=False) == pytest.approx(expected[2:], rel=1e-9)
    assert largest_error(second.state_dict(), state)[0] <= 1e-9
