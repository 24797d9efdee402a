"""The models that benchmarks plan, in plain PyTorch: transformers of every published kind, a residual CNN, an MLP.

    Transformer     tokens [batch, length] and targets [batch, length] to the mean cross-entropy; GPT, Llama, Nemotron, BERT
    VisionTransformer    images [batch, 3, side, side] and classes [batch] to the same; some blocks may hold soft experts
    ResNet          the same, of bottleneck blocks
    MLP             vectors [batch, inner] and targets like them to the mean squared error

Each takes its loss inside, so a batch is a tuple of tensors. Built under ``torch.device("meta")`` they take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """A transformer. ``inner``: width of the MLP. ``feed_forward``: gelu, squared-relu or swiglu; swiglu comes with RMSNorm.

    ``rotary``: positions by rotation, and no biases; otherwise a table of ``length`` learned positions. ``experts``: in
    every second block the MLP is so many, each of one slot. ``fused``: attention in one kernel; else products, a softmax that
    masks as it goes, and a dropout, as Megatron-LM has it. ``dropout``: of attention and of what is added to the residual.
    ``biases``: of linear layers and norms; None: where there is no rotation. ``float_loss``: of logits cast to float32.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    length: int
    key_value_heads: int = 0
    feed_forward: str = "gelu"
    rotary: bool = False
    causal: bool = True
    tied: bool = True
    experts: int = 0
    fused: bool = True
    dropout: float = 0.0
    biases: bool | None = None
    float_loss: bool = False

    @property
    def biased(self) -> bool:
        return not self.rotary if self.biases is None else self.biases


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, length, head] by tables [length, head]."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head, self.causal, bias = sizes.width // sizes.heads, sizes.causal, sizes.biased
        self.fused, self.dropout = sizes.fused, sizes.dropout
        shared = (sizes.key_value_heads or sizes.heads) * self.head
        self.group = sizes.width // shared
        self.query = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.key = nn.Linear(sizes.width, shared, bias=bias)
        self.value = nn.Linear(sizes.width, shared, bias=bias)
        self.out = nn.Linear(sizes.width, sizes.width, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.group > 1)
        else:
            y = F.dropout(torch.matmul(q, k.transpose(-1, -2)).softmax(-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.kind, bias = sizes.feed_forward, sizes.biased
        self.up = nn.Linear(sizes.width, sizes.inner, bias=bias)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(sizes.width, sizes.inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "squared-relu":
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SoftExperts(nn.Module):
    """Each expert gets one mix of an example's tokens, and each token one mix of the results (Puigcerver and others 2023)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.up = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.inner))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.inner, sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        slots = torch.einsum("bte,btd->ebd", logits.softmax(1), x)
        y = torch.bmm(F.gelu(torch.bmm(slots, self.up)), self.down)
        return torch.einsum("bte,ebd->btd", logits.softmax(2), y)


class Block(nn.Module):
    """Norm before attention and before the MLP."""

    def __init__(self, sizes: Sizes, experts: bool = False) -> None:
        super().__init__()
        self.dropout = sizes.dropout
        self.attention_norm, self.attention = norm(sizes), Attention(sizes)
        self.mlp_norm, self.mlp = norm(sizes), SoftExperts(sizes) if experts else FeedForward(sizes)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x), rotary))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


def norm(sizes: Sizes) -> nn.Module:
    if sizes.feed_forward == "swiglu":
        return nn.RMSNorm(sizes.width)
    return nn.LayerNorm(sizes.width, bias=sizes.biases is not False)


def blocks(sizes: Sizes) -> nn.ModuleList:
    return nn.ModuleList(Block(sizes, sizes.experts > 0 and i % 2 == 1) for i in range(sizes.layers))


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.token_embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position_embedding = None if sizes.rotary else nn.Embedding(sizes.length, sizes.width)
        self.blocks, self.norm = blocks(sizes), norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, rotary = self.token_embedding(tokens), None
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        else:
            rotary = self._rotary(positions, x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(self.norm(x))
        if self.sizes.float_loss:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        head = self.sizes.width // self.sizes.heads
        exponents = torch.arange(0, head, 2, device=positions.device) / head
        angles = positions[:, None] * 10000.0**-exponents
        angles = torch.cat((angles, angles), dim=1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class VisionTransformer(nn.Module):
    """``sizes.vocabulary``: the classes; ``sizes.length``: the patches, in a square."""

    def __init__(self, sizes: Sizes, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, patch, patch)
        self.position_embedding = nn.Parameter(torch.empty(sizes.length, sizes.width))
        self.blocks, self.norm = blocks(sizes), norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), classes)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * inner:
            convolution = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """``counts``: the blocks at each of the four resolutions. ``width``: channels of the first blocks."""

    def __init__(self, counts: tuple[int, ...], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages: list[nn.Module] = []
        channels = width
        for number, count in enumerate(counts):
            inner = width * 2**number
            for i in range(count):
                stages.append(Bottleneck(channels, inner, 2 if number and i == 0 else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


class MLP(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, target)
