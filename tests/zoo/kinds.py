"""Kinds of models that tools for parallel training get wrong: one small model for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import BATCH, IGNORED, Case, seeded
from tests.zoo.batches import cast, varied

FP32 = torch.float32
WORDS = 40


def case(
    model: nn.Module, inputs: tuple[Any, ...], target: Any, loss_fn: Any, dtype: torch.dtype, **kwargs: Any
) -> Case:
    """``model`` with varied weights, and its batch, in ``dtype``."""
    moved = varied(model).to(dtype).train()
    return Case(moved, cast(inputs, dtype), cast(kwargs, dtype), cast(target, dtype), loss_fn)


def words(length: int, count: int = WORDS) -> Tensor:
    return torch.randint(0, count, (BATCH, length))


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


# --- weights used more than once --------------------------------------------------------------------------------------


class TiedWords(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_embedding(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(TiedWords(), (words(6),), words(6), of_tokens, dtype)


class Rotary(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(_turned(q, *angles), _turned(k, *angles), v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class RotaryStack(nn.Module):
    """One table of angles, not saved with the model, is read by every layer."""

    def __init__(self, width: int = 16, heads: int = 2, depth: int = 4) -> None:
        super().__init__()
        half = width // heads // 2
        angles = torch.arange(32)[:, None] * 10000 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.layers = nn.ModuleList(Rotary(width, heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, (self.cos[: x.shape[1]], self.sin[: x.shape[1]]))
        return x


def shared_buffer(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(RotaryStack(), (torch.randn(BATCH, 10, 16),), torch.randn(BATCH, 10, 16), F.mse_loss, dtype)


# --- tensors that travel far ------------------------------------------------------------------------------------------


class SkipNet(nn.Module):
    """Strided convolutions down, transposed ones up, with a skip on each scale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.up = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.last = nn.ConvTranspose2d(4 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x).relu()
        coarse = self.down(fine).relu()
        x = self.up(self.middle(coarse).relu()).relu()
        x = self.last(torch.cat((x, coarse), 1)).relu()
        return self.out(torch.cat((x, fine), 1))


def skips(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        images, masks = torch.randn(BATCH, 3, 16, 16), torch.randn(BATCH, 1, 16, 16)
        return case(SkipNet(), (images,), masks, F.mse_loss, dtype)


class Reading(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.memory, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.memory(memory).chunk(2, -1)
        return x + self.out(F.scaled_dot_product_attention(self.query(x), key, value))


class Narrator(nn.Module):
    """Every decoder layer reads the encoder's result; the last line alone reads the style."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.style = nn.Linear(width, width)
        self.layers = nn.ModuleList(Reading(width) for _ in range(4))
        self.out = nn.Linear(2 * width, width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        style = self.style(source.mean(1, keepdim=True))
        for layer in self.layers:
            target = layer(target, memory)
        return self.out(torch.cat((target, style.expand_as(target)), -1))


def passed_along(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        source, target, y = torch.randn(BATCH, 7, 16), torch.randn(BATCH, 5, 16), torch.randn(BATCH, 5, 16)
        return case(Narrator(), (source, target), y, F.mse_loss, dtype)


# --- forms of inputs, outputs and losses ------------------------------------------------------------------------------


class OwnLoss(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 30)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        logits = self.head(self.body(self.words(input_ids)))
        if labels is None:
            return {"loss": None, "logits": logits}
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": F.cross_entropy(*shifted, ignore_index=IGNORED), "logits": logits}


def loss_in_forward(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        tokens = words(6, 30)
        labels = tokens.clone()
        labels[0, 2:], labels[1:3, 4:] = IGNORED, IGNORED
        return case(OwnLoss(), (), None, None, dtype, input_ids=tokens, labels=labels)


class Spectral(nn.Module):
    """A filter with complex weights over the frequencies of each channel."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        count = length // 2 + 1
        self.weight = nn.Parameter(torch.randn(count, width, dtype=torch.complex64) * 0.3)
        self.linear = nn.Linear(width, width)
        self.register_buffer("phase", torch.polar(torch.ones(count), torch.linspace(0, 1, count))[:, None])

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x, dim=1) * self.phase
        return torch.tanh(torch.fft.irfft(frequencies * self.weight, n=x.shape[1], dim=1) + self.linear(x))


def complex_weights(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model: nn.Module = nn.Sequential(*(Spectral(8, 12) for _ in range(3)))
        x, y = torch.randn(BATCH, 12, 8), torch.randn(BATCH, 12, 8)
    if dtype == torch.float64:
        model = model._apply(lambda t: t.to(torch.complex128 if t.is_complex() else torch.float64))
    return Case(model, (x.to(dtype),), {}, y.to(dtype), F.mse_loss)


class MaskedMean(nn.Module):
    """A dict of tensors, a mask, an argument left out and a number."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.text, self.image, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(
        self, batch: dict[str, Tensor], *, mask: Tensor, bias: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        x = torch.tanh(self.text(batch["text"])) + self.image(batch["image"]).unsqueeze(1)
        if bias is not None:
            x = x + bias
        mean = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.out(mean) * scale}


def dict_arguments(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        batch = {"text": torch.randn(BATCH, 5, 12), "image": torch.randn(BATCH, 12)}
        mask = (torch.rand(BATCH, 5) > 0.3).float()
        mask[:, 0] = 1
        target = torch.arange(BATCH) % 3

        def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
            return F.cross_entropy(output["logits"], target)

        return case(MaskedMean(), (batch,), target, loss_fn, dtype, mask=mask, bias=None, scale=0.5)


class TokenNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(20, width), nn.Linear(width, width), nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(tokens))))


def _uneven_labels() -> Tensor:
    """Labels of 8 rows of which 6, 6, 5, 1, 2, 1, 0 and 0 count."""
    kept = torch.tensor([6, 6, 5, 1, 2, 1, 0, 0])
    return words(6, 20).masked_fill(torch.arange(6) >= kept[:, None], IGNORED)


def ignored_tokens(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):

        def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

        return case(TokenNet(), (words(6, 20),), _uneven_labels(), loss_fn, dtype)


def summed_loss(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A weighted sum of squares, not a mean."""
    weights = torch.tensor([1.0, 3.0], dtype=dtype)
    with seeded(seed):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return ((output - target).square() * weights).sum()

        return case(model, (torch.randn(BATCH, 8),), torch.randn(BATCH, 2), loss_fn, dtype)


# --- state ------------------------------------------------------------------------------------------------------------


class ConvBN(nn.Module):
    """No layer before a norm has a bias: its gradient would be mere rounding, which Adam makes large."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, momentum=0.3)
        self.head, self.norm3 = nn.Linear(width, 4, bias=False), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        x = (x + self.norm2(self.second(x))).relu()
        return self.norm3(self.head(x.mean((2, 3))))


def batch_norm(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(ConvBN(), (torch.randn(BATCH, 3, 8, 8),), torch.arange(BATCH) % 4, F.cross_entropy, dtype)


# --- sizes that do not divide -----------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self, width: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (
            f(x).view(n, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.narrow(F.gelu(self.widen(x)))


def six_heads(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = nn.Sequential(Heads(), Heads())
        return case(model, (torch.randn(BATCH, 5, 24),), torch.randn(BATCH, 5, 24), F.mse_loss, dtype)


class Fused(nn.Module):
    """Queries, keys and values in one weight, gate and value in another, with large biases."""

    def __init__(self, width: int = 16, heads: int = 4, inner: int = 10) -> None:
        super().__init__()
        self.heads, self.inner = heads, inner
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_and_value, self.narrow = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        for layer in (self.qkv, self.out, self.gate_and_value, self.narrow):
            nn.init.uniform_(layer.bias, 1.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, value = self.gate_and_value(x).split(self.inner, -1)
        return x + self.narrow(F.silu(gate) * value)


def fused_weights(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = nn.Sequential(Fused(), Fused())
        return case(model, (torch.randn(BATCH, 6, 16),), torch.randn(BATCH, 6, 16), F.mse_loss, dtype)


# --- what is trained, and what is not ---------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.2)
        self.up = nn.Parameter(torch.randn(width, rank) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class AdaptedNet(nn.Module):
    """Frozen but for low-rank additions; its first part has nothing to train."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width).requires_grad_(False)
        self.frozen = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).requires_grad_(False)
        self.first, self.second = Adapted(width), Adapted(width)
        self.head = nn.Linear(width, 5).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.words(tokens))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).mean(1))


def lora(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        return case(AdaptedNet(), (words(6, 30),), torch.arange(BATCH) % 5, F.cross_entropy, dtype)


def norms_and_head(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Norms, biases and a head, which users train with rates and decays of their own; large gradients."""
    layers: list[nn.Module] = []
    with seeded(seed):
        for _ in range(4):
            layers += [nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()]
        model = nn.Sequential(*layers, nn.Linear(16, 3))
        return case(model, (torch.randn(BATCH, 16),), torch.randn(BATCH, 3) * 5, F.mse_loss, dtype)


KINDS_OF_FORM = {
    model.__name__: model
    for model in (
        tied_embedding, shared_buffer, skips, passed_along, loss_in_forward, complex_weights, dict_arguments,
        ignored_tokens, summed_loss, batch_norm, six_heads, fused_weights, lora, norms_and_head,
    )
}  # fmt: skip
