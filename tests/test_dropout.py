"""What docs/randomness.md says of dropout, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner

CLUSTER = "dgx-a100-80gb"


class Noisy(nn.Module):
    """Blocks that are split over tp inside, dropout behind each, noise after the second."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            x = x + F.dropout(down(F.gelu(up(x))), self.p, self.training)
            if i == 1 and self.training and self.p:
                x = x + 0.1 * torch.randn_like(x)
        return x


def losses(strategy: str, gpus: int, seed: int = 0, p: float = 0.3, steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    model, x, y = Noisy(p), torch.randn(8, 16), torch.randn(8, 16)
    with planner.auto_parallelize(
        model, gpus, example_inputs=(x,), loss_fn=F.mse_loss, strategy=strategy, cluster=CLUSTER, seed=seed
    ) as parallel:
        return parallel.train([(x, y)], lambda params: torch.optim.SGD(params, lr=0.1), steps, progress=False)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "same",
    [
        ("pp1", "model", "pp2.tp2 mb=1 recompute=selective", "tp"),
        (
            "pp2 mb=4",
            "pp4 mb=4 recompute=full",
            "pp4 mb=4 recompute=selective",
            "pp2 mb=4 v=2",
            "pp2 mb=4 v=2 schedule=zero-bubble",
        ),
    ],
)
def test_training_depends_on_seed_and_micro_batches_but_not_on_stages(same: tuple[str, ...]) -> None:
    found = [losses(s, 1 if s == "pp1" else 2 if s.startswith("pp2 ") else 4) for s in same]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
    assert len(set(found[0])) == 3


@pytest.mark.gloo
def test_another_seed_and_another_dealing_of_rows_draw_other_masks() -> None:
    first = losses("ddp", 2)
    assert losses("ddp", 2) == first
    assert losses("ddp", 2, seed=1) != pytest.approx(first, rel=1e-3)
    assert losses("pp1", 1) != pytest.approx(first, rel=1e-3)


@pytest.mark.gloo
def test_dropout_of_nothing_is_equal_under_every_plan() -> None:
    expected = losses("pp1", 1, p=0.0)
    for strategy in ("ddp", "tp", "pp2 mb=4"):
        assert losses(strategy, 2, p=0.0) == pytest.approx(expected, rel=1e-5)


def test_shards_of_noise_draw_their_own_numbers_and_copies_the_same() -> None:
    def source(strategy: str) -> str:
        return planner.auto_parallelize(
            Noisy(), 2, example_inputs=(torch.randn(8, 16),), loss_fn=F.mse_loss, strategy=strategy, cluster=CLUSTER
        ).source()

    cut, copied = source("ddp"), source("tp")
    assert "seeded(aten.randn_like.default, rng, site + 1, (dp,))" in cut and ", 0.3, rng, site, axes=(dp,))" in cut
    assert "seeded(aten.randn_like.default, rng, site + 1)" in copied and ", 0.3, rng, site)" in copied
