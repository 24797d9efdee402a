"""Further kinds that tools get wrong: code that a trace can drop, fix or see only half of, and odd sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import BATCH, Case, seeded
from tests.zoo.kinds import Block, case, words

FP32 = torch.float32


@dataclasses.dataclass
class Sample:
    x: Tensor
    weight: Tensor | None = None


@dataclasses.dataclass
class Scores:
    logits: Tensor
    hidden: Tensor | None = None
    extra: Tensor | None = None


class DataclassNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, sample: Sample) -> Scores:
        hidden = torch.relu(self.inner(sample.x))
        return Scores(self.head(hidden), hidden)


def dataclasses_in_and_out(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        x = torch.randn(BATCH, 12).to(dtype)

        def loss_fn(scores: Scores, target: Tensor) -> Tensor:
            assert scores.hidden is not None
            return F.cross_entropy(scores.logits, target) + 0.01 * scores.hidden.mean()

        return case(DataclassNet(), (Sample(x),), torch.arange(BATCH) % 4, loss_fn, dtype)


class Noisy(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.dropout, self.p = nn.Dropout(p), p

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return F.dropout(x, self.p, self.training)


def dropout(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Dropout of nothing, by module and by function."""
    with seeded(seed):
        return case(Noisy(), (torch.randn(BATCH, 16),), torch.randn(BATCH, 16), F.mse_loss, dtype)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Adversary(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        rounded = Rounded.apply(torch.tanh(self.first(x)))
        return self.head(torch.relu(self.second(Reversed.apply(rounded, 0.7))))


def custom_functions(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A backward that is not the derivative of its forward."""
    with seeded(seed):
        return case(Adversary(), (torch.randn(BATCH, 10),), torch.arange(BATCH) % 2, F.cross_entropy, dtype)


class Hooked(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.second, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.first(x))))


def forward_hooks(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Hooks that change what goes into and comes out of modules, the whole model among them."""
    with seeded(seed):
        model = Hooked()
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.8,))
        model.first.register_forward_hook(lambda module, inputs, output: output * 1.5)
        model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.25,))
        return case(model, (torch.randn(BATCH, 10),), torch.arange(BATCH) % 3, F.cross_entropy, dtype)


def backward_hooks(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Hooks that change gradients, of a module and of a parameter."""
    made = forward_hooks(dtype, seed)
    assert isinstance(made.model, Hooked)
    made.model.second.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    made.model.head.weight.register_hook(lambda gradient: gradient * 2.0)
    return made


class Branching(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if x.abs().mean() > 0.45:
            x = x + self.second(x)
        for _ in range(int((x > 0).sum()) % 3):
            x = x * 0.9
        return self.head(x)


def branches(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """What runs depends on values."""
    with seeded(seed):
        return case(Branching(), (torch.randn(BATCH, 10),), torch.randn(BATCH, 2), F.mse_loss, dtype)


class Experts(nn.Module):
    """Two of four experts for each row, and what their loads are."""

    def __init__(self, width: int = 12, count: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.count, self.chosen = count, chosen
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count)
        )
        self.head = nn.Linear(width, 3)

    def mix(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """Each expert sees the rows that chose it: their number depends on values."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(places == number)
            y = y.index_add(0, row, expert(x[row]) * weights[row, slot].unsqueeze(-1))
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weights, places = probabilities.topk(self.chosen, -1)
        y = self.mix(x, weights, places)
        load = F.one_hot(places, self.count).to(x.dtype).sum(1).mean(0)
        return self.head(x + y), self.count * (load * probabilities.mean(0)).sum()


class DenseExperts(Experts):
    """Each expert sees all rows; those that did not choose it weigh nothing."""

    def mix(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        share = torch.zeros_like(x[:, : self.count]).scatter(1, places, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("ne,ned->nd", share, outputs)


def _with_balance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.1 * output[1]


def routed_experts(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(Experts(), (torch.randn(BATCH, 12),), torch.arange(BATCH) % 3, _with_balance, dtype)


def dense_experts(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A loss that is a product of two means over the batch."""
    with seeded(seed):
        return case(DenseExperts(), (torch.randn(BATCH, 12),), torch.arange(BATCH) % 3, _with_balance, dtype)


class Depthwise(nn.Module):
    """Strided, padded, dilated, depthwise and grouped convolutions with GroupNorm; an odd number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3)
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GroupNorm(4, 16)
        self.grouped = nn.Conv2d(16, 24, 3, padding=2, dilation=2, groups=8)
        self.pointwise = nn.Conv2d(24, 15, 1, bias=False)
        self.head = nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        x = x + F.silu(self.norm(self.depthwise(x)))
        x = self.pointwise(F.silu(self.grouped(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def convolutions(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(Depthwise(), (torch.randn(BATCH, 3, 16, 16),), torch.arange(BATCH) % 5, F.cross_entropy, dtype)


class Lookup(nn.Module):
    def __init__(self, rows: int = 5000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.middle = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.table(ids).mean(1))))


def giant_table(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(Lookup(), (words(4, 5000),), torch.arange(BATCH) % 3, F.cross_entropy, dtype)


def deep(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """64 equal blocks."""
    with seeded(seed):
        model = nn.Sequential(*(Block(16, 4) for _ in range(64)))
        return case(model, (torch.randn(BATCH, 4, 16),), torch.randn(BATCH, 4, 16), F.mse_loss, dtype)


class Mixed(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.narrow(F.gelu(self.widen(x)))
            with torch.autocast("cpu", enabled=False):
                y = self.norm(y.float())
            y = self.head(y)
        return y.float()


def autocast(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Half precision inside, single precision for the norm. Always single precision outside."""
    with seeded(seed):
        return case(Mixed(), (torch.randn(BATCH, 16),), torch.arange(BATCH) % 4, F.cross_entropy, FP32)


class Student(nn.Module):
    """Learns to predict a teacher that is not trained, under no_grad, and its own detached result."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.encoder, self.teacher = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(2)
        )
        self.predictor = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.encoder(x)
        with torch.no_grad():
            goal = self.teacher(x) + 0.1 * self.encoder(x.flip(-1))
        return self.predictor(seen) + 0.3 * seen.detach(), goal


def stopped_gradients(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(Student(), (torch.randn(BATCH, 12),), None, lambda output: F.mse_loss(*output), dtype)


KINDS_OF_CODE = {
    model.__name__: model
    for model in (
        dataclasses_in_and_out, dropout, custom_functions, forward_hooks, backward_hooks, branches, routed_experts,
        dense_experts, convolutions, giant_table, deep, autocast, stopped_gradients,
    )
}  # fmt: skip
