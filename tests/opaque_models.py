"""Models with modules that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.models import Case, seeded

WIDTH, ROWS, CLASSES = 8, 8, 4


class Reversed(torch.autograd.Function):
    """The identity, with the gradient turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Rounded(torch.autograd.Function):
    """Rounding that lets the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantised(nn.Module):
    """A layer with both Functions; keywords, a constant and a mask among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scales: tuple[float, ...], *, options: dict[str, Any]) -> Tensor:
        x = Rounded.apply(torch.tanh(self.layer(x)))
        return options["factor"] * Reversed.apply(x, scales[0])


class Branching(nn.Module):
    """Another path, with other weights, when the batch is large; counts its batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        size = x.abs().mean()
        y = self.large(x) if size > 0.7 else torch.relu(self.small(x))
        return y, size


class Experts(nn.Module):
    """Every row goes to its best expert: as many rows each as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows].unsqueeze(-1))
        return y


class Checkpointed(nn.Module):
    """A reentrant checkpoint around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return y


class Everything(nn.Module):
    """All of them between layers that are split as usual; one weight is tied into a module that is kept whole."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.quantised, self.branching, self.experts = Quantised(), Branching(), Experts()
        self.hooked = nn.Linear(WIDTH, WIDTH)
        self.hooked.register_full_backward_hook(halved)
        self.checkpointed = Checkpointed()
        self.last = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.hooked.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = x + self.quantised(x, (0.7,), options={"factor": 2.0})
        x, size = self.branching(x)
        x = x + self.experts(x)
        x = self.checkpointed(self.hooked(x))
        return self.last(x) + 0.1 * size


def halved(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else 0.5 * gradient for gradient in inputs)


class Rowwise(nn.Module):
    """Modules that treat each row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.quantised, self.experts = nn.Linear(WIDTH, WIDTH), Quantised(), Experts()
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantised(self.first(x), (0.7,), options={"factor": 2.0})
        return self.last(self.experts(torch.relu(self.middle(x))))


class Dropping(nn.Module):
    """Dropout behind a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), Sometimes()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(x)))


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if x.abs().sum() > 0 else x


def dropping() -> Case:
    return _case(Dropping, torch.float64)


def everything(dtype: torch.dtype = torch.float64) -> Case:
    return _case(Everything, dtype)


def rowwise(dtype: torch.dtype = torch.float64) -> Case:
    return _case(Rowwise, dtype)


def _case(build: Callable[[], nn.Module], dtype: torch.dtype) -> Case:
    with seeded(0):
        model = build().to(dtype)
        x, y = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(CLASSES, (ROWS,))
    return Case(model, (x,), {}, y, F.cross_entropy)


def another_batch(case: Case) -> tuple[tuple[Tensor], Tensor]:
    """A batch for which the branch and the experts choose otherwise."""
    return (-3 * case.inputs[0],), case.target.flip(0)
