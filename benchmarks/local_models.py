"""Six models of different character, small enough that a step on CPU processes takes a fraction of a second.

    wide-mlp            few large products: weights are most of what travels
    deep-mlp            many small ones: overheads show
    gpt                 a transformer of usual proportions
    giant-vocabulary    an embedding and a loss that dwarf the rest
    cnn                 convolutions and norms over groups of channels
    long-sequence       attention over many tokens

Each takes its loss inside, so a batch is a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import MLP, Sizes, Transformer


class ConvNet(nn.Module):
    """Images [batch, 3, side, side] and classes [batch] to the cross-entropy."""

    def __init__(self, channels: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(blocks)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


@dataclass(frozen=True)
class Case:
    """``make``: the model; ``batch``: one global batch of it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def _vectors(rows: int, width: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(rows, width), torch.randn(rows, width))


def _tokens(rows: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(vocabulary, (rows, length)), torch.randint(vocabulary, (rows, length)))


CASES: Mapping[str, Case] = {
    "wide-mlp": Case(lambda: MLP(4, 1536), _vectors(128, 1536)),
    "deep-mlp": Case(lambda: MLP(32, 256), _vectors(256, 256)),
    "gpt": Case(lambda: Transformer(Sizes(6, 256, 4, 1024, 2048, 64)), _tokens(16, 64, 2048)),
    "giant-vocabulary": Case(lambda: Transformer(Sizes(2, 128, 4, 512, 32768, 32)), _tokens(8, 32, 32768)),
    "cnn": Case(
        lambda: ConvNet(64, 6, 10), lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))
    ),
    "long-sequence": Case(lambda: Transformer(Sizes(2, 128, 4, 512, 256, 1024)), _tokens(4, 1024, 256)),
}  # fmt: skip
