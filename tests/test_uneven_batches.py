"""Batches that do not divide, batches of other sizes than the example's, and losses over unequal parts: one device's numbers.

Every run is in float64 and compared with the model itself: the loss, all gradients, and weights after training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import errors
from planner.api import auto_parallelize
from planner.ir.mesh import deal, in_lowest_terms
from planner.parallel import Parallel
from runtime.launch import LocalRanks
from tests.models import seeded

gloo = pytest.mark.gloo

LENGTH, WIDTH, WORDS = 5, 8, 12


class Tokens(nn.Module):
    """Three residual blocks over token embeddings, attention with an additive mask [t, t] if given, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        if mask is not None:
            x = x + (x @ x.transpose(1, 2) + mask).softmax(-1) @ x
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets; from the third row on, every other row has no target at all."""
    with seeded(seed):
        ids, targets = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
    targets[2::2] = -100
    targets[0, 2:] = -100
    return ids, targets


def token_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_weights(logits: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
    return F.cross_entropy(logits.transpose(1, 2), targets, weight=weight, label_smoothing=0.1)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def by_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return summed(logits, targets) / logits.shape[0]


def by_count(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets != -100
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * kept).sum() / kept.sum().clamp(min=1)


def plain_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none").mean(-1).mean()


def with_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    return token_mean(logits, targets) + 0.01 * logits.pow(2).mean() + 0.5


def balanced(logits: Tensor, targets: Tensor) -> Tensor:
    """Not a mean over samples: the square of one."""
    return token_mean(logits, targets) + logits.softmax(-1).mean((0, 1)).pow(2).sum()


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 0] @ logits[:, 1].t(), torch.arange(len(logits)))


LOSSES = (token_mean, class_weights, summed, by_rows, by_count, plain_mean, with_penalty)


def tokens() -> Tokens:
    with seeded(0):
        return Tokens().double()


@pytest.fixture(scope="module")
def pairs() -> Iterator[LocalRanks]:
    with LocalRanks.start(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def fours() -> Iterator[LocalRanks]:
    with LocalRanks.start(4) as ranks:
        yield ranks


def planned(model: nn.Module, ranks: LocalRanks, strategy: str, rows: int, loss_fn: Any, **options: Any) -> Parallel:
    """On ranks that are running; they stay when the Parallel is dropped."""
    ids, targets = batch(rows)
    inputs = {"example_inputs": (ids,), "example_target": targets, "loss_fn": loss_fn} | options
    made = auto_parallelize(model, ranks.n, cluster="dgx-a100-80gb", strategy=strategy, **inputs)
    made._start = lambda: ranks
    return made


def same(parallel: Parallel, single: nn.Module, loss: float, expected: Tensor) -> None:
    """The loss, and gradients that ``expected.backward()`` adds to those ``single`` has."""
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    expected.backward()
    found = parallel.gradients()
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=f"gradient of {name}")


# --- dealing ----------------------------------------------------------------------------------------------------------


def test_rows_are_dealt_as_evenly_as_can_be() -> None:
    assert deal(7, 3) == (3, 2, 2) and deal(8, 2) == (4, 4) and deal(2, 3) == (1, 1, 0)
    assert in_lowest_terms((4, 4)) == (1, 1) and in_lowest_terms((4, 2)) == (2, 1)
    for rows in range(1, 40):
        for dp in range(1, 6):
            for count in range(1, 6):
                if rows >= dp * count:
                    pieces = [piece for share in deal(rows, dp) for piece in deal(share, count)]
                    assert sum(pieces) == rows and max(pieces) - min(pieces) <= 1 and min(pieces) >= 1


def test_every_size_of_piece_has_a_text() -> None:
    ids, targets = batch(7)
    made = auto_parallelize(
        tokens(), 2, example_inputs=(ids,), example_target=targets, loss_fn=token_mean, cluster="dgx-a100-80gb",
        strategy="dp2 mb=2",
    )  # fmt: skip
    program = made.program
    assert [(piece.rank_rows, piece.rows) for piece in program.smaller] == [(3, 2), (3, 1)]
    assert [program.pieces_of(i) for i in range(2)] == [(4, (2, 2)), (3, (2, 1))]
    for stages in (program.stages, *(piece.stages for piece in program.smaller)):
        assert stages[0].states == program.stages[0].states
    sources = {(4, 2): made.source(), **{(p.rank_rows, p.rows): p.stages[0].source for p in program.smaller}}
    for (_, rows), source in sources.items():
        assert f"micro-batches of {rows} rows" in source and f"reshape({rows * LENGTH}, {WORDS})" in source


def test_too_few_rows_are_refused_before_anything_starts() -> None:
    ids, targets = batch(3)
    with pytest.raises(
        errors.BadInput, match=r"a batch of 3 .* 2 data-parallel shards \(dp\) of 2 micro-batches \(mb\); use at"
    ):
        auto_parallelize(
            tokens(), 2, example_inputs=(ids,), example_target=targets, loss_fn=token_mean, cluster="dgx-a100-80gb",
            strategy="dp2 mb=2",
        )  # fmt: skip


@pytest.mark.parametrize("rows", [2, 3, 7, 11, 13])
def test_the_search_finds_a_plan_for_any_batch(rows: int) -> None:
    ids, targets = batch(rows)
    made = auto_parallelize(
        tokens(), 4, example_inputs=(ids,), example_target=targets, loss_fn=token_mean, cluster="dgx-a100-80gb"
    )
    assert made.plan.global_batch == rows and made.plan.estimate.fits


# --- one batch that does not divide -----------------------------------------------------------------------------------

ON_TWO = ("ddp", "fsdp", "tp", "pp2 mb=2", "pp2 mb=3 recompute=full", "pp2 mb=4 schedule=gpipe", "dp2 mb=3 zero=3",
          "pp2 mb=3 v=2", "pp2 mb=2 schedule=zero-bubble")  # fmt: skip
ON_FOUR = ("dp4", "dp2.tp2", "pp2.dp2 mb=2", "pp2.tp2 mb=3")


@gloo
@pytest.mark.parametrize("strategy", ON_TWO)
@pytest.mark.parametrize("loss_fn", [token_mean, by_rows])
def test_seven_rows_on_two_ranks(pairs: LocalRanks, strategy: str, loss_fn: Callable[..., Tensor]) -> None:
    model = tokens()
    parallel = planned(model, pairs, strategy, 7, loss_fn)
    ids, targets = batch(7)
    same(parallel, model, parallel.forward_backward(ids, target=targets), loss_fn(model(ids), targets))


@gloo
@pytest.mark.parametrize("strategy", ON_FOUR)
def test_seven_rows_on_four_ranks(fours: LocalRanks, strategy: str) -> None:
    model = tokens()
    parallel = planned(model, fours, strategy, 7, token_mean)
    ids, targets = batch(7)
    same(parallel, model, parallel.forward_backward(ids, target=targets), token_mean(model(ids), targets))


@gloo
@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp2 mb=3"])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses(pairs: LocalRanks, loss_fn: Callable[..., Tensor], strategy: str, rows: int) -> None:
    """Two calls: gradients accumulate."""
    model = tokens()
    parallel = planned(model, pairs, strategy, rows, loss_fn)
    for seed in (1, 2):
        ids, targets = batch(rows, seed)
        same(parallel, model, parallel.forward_backward(ids, target=targets), loss_fn(model(ids), targets))


@gloo
def test_a_loss_the_model_returns(pairs: LocalRanks) -> None:
    model, (ids, labels) = tokens(), batch(7)
    parallel = planned(
        model, pairs, "pp2 mb=3", 7, None, example_inputs=(ids,), example_kwargs={"labels": labels}, example_target=None
    )
    same(parallel, model, parallel.forward_backward(ids, labels=labels), model(ids, labels=labels)["loss"])


@gloo
@pytest.mark.parametrize("loss_fn", [balanced, contrastive])
def test_losses_that_couple_the_samples(pairs: LocalRanks, loss_fn: Callable[..., Tensor]) -> None:
    """Right over shards of the batch, which exchange what they need; refused over micro-batches, which cannot."""
    model, (ids, targets) = tokens(), batch(7)
    parallel = planned(model, pairs, "ddp", 7, loss_fn)
    same(parallel, model, parallel.forward_backward(ids, target=targets), loss_fn(model(ids), targets))
    with pytest.raises(errors.BadInput, match=r"operator aten\.\w+.* couples the samples of a batch.* \(mb=1\)"):
        planned(model, pairs, "pp2 mb=2", 7, loss_fn)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().flatten(1))


@gloo
@pytest.mark.parametrize("strategy", ["dp4", "dp2.tp2"])
def test_statistics_over_unequal_shards(fours: LocalRanks, strategy: str) -> None:
    with seeded(0):
        model, x, y = Normed().double(), torch.randn(7, 1, 4, 4, dtype=torch.float64), torch.randint(3, (7,))
    single = copy.deepcopy(model)
    parallel = planned(model, fours, strategy, 7, F.cross_entropy, example_inputs=(x,), example_target=y)
    same(parallel, single, parallel.forward_backward(x, target=y), F.cross_entropy(single(x), y))
    for name, buffer in parallel.buffers().items():
        torch.testing.assert_close(buffer, single.get_buffer(name), rtol=1e-12, atol=1e-12, msg=name)


# --- arguments that are not batched -----------------------------------------------------------------------------------


@gloo
@pytest.mark.parametrize("named", [(), ("mask",)])
@pytest.mark.parametrize("strategy", ["ddp", "pp2 mb=2"])
def test_a_mask_as_long_as_the_batch(pairs: LocalRanks, strategy: str, named: tuple[str, ...]) -> None:
    model, (ids, targets) = tokens(), batch(LENGTH)
    with seeded(3):
        mask = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    parallel = planned(model, pairs, strategy, LENGTH, token_mean, example_kwargs={"mask": mask}, not_batched=named)
    loss = parallel.forward_backward(ids, mask=mask, target=targets)
    same(parallel, model, loss, token_mean(model(ids, mask), targets))
    ids, targets = batch(3)
    if not named:
        with pytest.raises(errors.BadInput, match=r"input 0 has 3 rows, input 'mask' 5; .* not_batched="):
            parallel.forward_backward(ids, mask=mask, target=targets)
        return
    loss = parallel.forward_backward(ids, mask=mask, target=targets)
    same(parallel, model, loss, token_mean(model(ids, mask), targets))


def test_not_batched_names_an_argument_there_is() -> None:
    ids, targets = batch(4)
    with pytest.raises(
        errors.BadInput, match="not_batched names 'masks', which the example does not hold; it holds ids, target"
    ):
        auto_parallelize(
            tokens(), 2, example_inputs=(ids,), example_target=targets, loss_fn=token_mean, cluster="dgx-a100-80gb",
            not_batched=("masks",),
        )  # fmt: skip


# --- batches of other sizes -------------------------------------------------------------------------------------------


@gloo
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "tp", "pp2 mb=2", "dp2 mb=2 zero=3 recompute=full", "pp2 mb=2 schedule=zero-bubble v=2"]
)
def test_other_sizes_one_after_another(pairs: LocalRanks, strategy: str) -> None:
    model = tokens()
    parallel = planned(model, pairs, strategy, 8, token_mean)
    least = parallel.plan.mesh.dp * parallel.plan.micro_batches
    for number, rows in enumerate((8, 7, 1, 9, 7, 8)):
        ids, targets = batch(rows, number)
        if rows < least:
            with pytest.raises(errors.BadInput, match=f"a batch of {rows} cannot be cut .* use at least {least} rows"):
                parallel.forward_backward(ids, target=targets)
            continue
        same(parallel, model, parallel.forward_backward(ids, target=targets), token_mean(model(ids), targets))


@gloo
@pytest.mark.parametrize("strategy", ["fsdp", "pp2 mb=3"])
def test_an_epoch_with_a_shorter_last_batch(pairs: LocalRanks, strategy: str) -> None:
    single, epoch = tokens(), [batch(8, 1), batch(8, 2), batch(5, 3)]
    parallel = planned(tokens(), pairs, strategy, 8, token_mean)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    losses = parallel.train(epoch, optimizer, steps=6, max_norm=0.5, progress=False)
    update, expected = optimizer(single.parameters()), []
    for ids, targets in epoch * 2:
        update.zero_grad()
        loss = token_mean(single(ids), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        update.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-10)
    found = parallel.state_dict()
    for name, tensor in single.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


class Squeezed(nn.Module):
    """Takes another way for a short batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).relu() if x.shape[0] > 4 else self.line(x).tanh()


@gloo
def test_a_model_that_runs_otherwise_with_fewer_rows(pairs: LocalRanks) -> None:
    with seeded(0):
        model, x = Squeezed().double(), torch.randn(8, 4, dtype=torch.float64)
    parallel = planned(model, pairs, "ddp", 8, F.mse_loss, example_inputs=(x,), example_target=x)
    before = parallel.forward_backward(x, target=x)
    with pytest.raises(
        errors.BadInput, match=r"with 4 rows the model runs aten\.tanh.* where it runs aten\.relu.* with 8"
    ):
        parallel.forward_backward(x[:4], target=x[:4])
    assert parallel.forward_backward(x, target=x) == before
