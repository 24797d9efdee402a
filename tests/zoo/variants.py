"""More models of the kinds of tests.zoo.kinds: the same traps in other clothes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models import BATCH, IGNORED, Case, seeded
from tests.zoo.kinds import Block, TokenNet, case, of_tokens, words

FP32 = torch.float32
VARIANTS: dict[str, Callable[..., Case]] = {}


def variant(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """Adds to VARIANTS: ``build`` gives (model, inputs, target, loss_fn) and perhaps kwargs, drawn from the seed."""

    def make(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
        with seeded(seed):
            model, inputs, target, loss_fn, *more = build()
            return case(model, inputs, target, loss_fn, dtype, **(more[0] if more else {}))

    make.__name__, make.__doc__ = build.__name__, build.__doc__
    VARIANTS[build.__name__] = make
    return build


def _rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _regression(model: nn.Module, *shape: int) -> tuple[Any, ...]:
    x = _rows(*shape)
    with torch.no_grad():
        y = model(x)
    return model, (x,), torch.randn_like(y), F.mse_loss


# --- shared weights ---------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """One block called four times between layers of their own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.block = Block(width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.own:
            x = layer(self.block(x))
        return x


@variant
def one_block_repeated() -> tuple[Any, ...]:
    return _regression(Repeated(), 5, 16)


class TiedBack(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(6, 12))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        code = F.linear(torch.tanh(F.linear(x, self.first)), self.second)
        return F.linear(torch.tanh(F.linear(code, self.second.t())), self.first.t(), self.bias)


@variant
def transposed_weights() -> tuple[Any, ...]:
    return _regression(TiedBack(), 16)


class ThreeUses(nn.Module):
    """One table for source, target and output, scaled."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width, padding_idx=0)
        self.encoder = nn.ModuleList(Block(width) for _ in range(2))
        self.decoder = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = math.sqrt(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = (self.words(tokens) * self.scale for tokens in (source, target))
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y) + x.mean(1, keepdim=True)
        return y @ self.words.weight.t()


@variant
def one_table_three_times() -> tuple[Any, ...]:
    return ThreeUses(), (words(7), words(6)), words(6), of_tokens


# --- buffers and positions --------------------------------------------------------------------------------------------


class Turning(nn.Module):
    """Rotary positions as complex numbers of one shared table."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        half = width // heads // 2
        angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(half) / half))
        self.register_buffer(
            "turns", torch.view_as_real(torch.polar(torch.ones_like(angles), angles)), persistent=False
        )
        self.layers = nn.ModuleList(nn.ModuleDict({k: nn.Linear(width, width) for k in "qkvo"}) for _ in range(3))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.view_as_complex(self.turns[: x.shape[2]])).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (layer[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
            y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
            x = x + layer["o"](y.transpose(1, 2).flatten(2))
        return x


@variant
def complex_rotary() -> tuple[Any, ...]:
    return _regression(Turning(), 10, 16)


class Distance(nn.Module):
    """A learned bias by relative distance that all layers read; attention written out, with a mask of -inf."""

    def __init__(self, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.bias = nn.Embedding(2 * length - 1, heads)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "o": nn.Linear(width, width)}) for _ in range(3)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(places[None] - places[:, None] + x.shape[1] - 1).permute(2, 0, 1)
        outside = (places >= lengths[:, None])[:, None, None]
        for layer in self.layers:
            q, k, v = layer["qkv"](x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
            weights = scores.masked_fill(outside, float("-inf")).softmax(-1)
            x = x + layer["o"]((weights @ v).transpose(1, 2).flatten(2))
        return x


@variant
def relative_bias() -> tuple[Any, ...]:
    return Distance(), (_rows(6, 16), torch.arange(BATCH) % 6 + 1), _rows(6, 16), F.mse_loss


class Counting(nn.Module):
    """Running mean of activations, a counter, and a buffer that forward replaces."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.steps += 1
        return self.second(torch.tanh(x - self.mean))


@variant
def running_mean() -> tuple[Any, ...]:
    return Counting(), (_rows(8),), _rows(8), F.mse_loss


class NormKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8, track_running_stats=False), nn.PReLU(8),
            nn.Conv1d(8, 8, 3, padding=1), nn.InstanceNorm1d(8, affine=True), nn.GELU(),
            nn.Conv1d(8, 4, 3, padding=1, padding_mode="circular"), nn.LocalResponseNorm(2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@variant
def norms_without_statistics() -> tuple[Any, ...]:
    return _regression(NormKinds(), 4, 10)


@variant
def frozen_batch_norm() -> tuple[Any, ...]:
    """BatchNorm that uses its statistics and does not move them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    inputs = _regression(model, 3, 8, 8)
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda module, inputs: module.eval() and None)
    return inputs


@variant
def cumulative_batch_norm() -> tuple[Any, ...]:
    """BatchNorm with momentum None: the mean over all steps."""
    return _regression(nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12, momentum=None), nn.Linear(12, 4)), 8)


# --- losses -----------------------------------------------------------------------------------------------------------


def _token_loss(name: str, loss_fn: Callable[..., Tensor], target: Callable[[], Any]) -> None:
    def build() -> tuple[Any, ...]:
        return TokenNet(), (words(6, 20),), target(), loss_fn

    build.__name__ = name
    variant(build)


def _labels() -> Tensor:
    kept = torch.tensor([6, 0, 5, 1, 2, 1, 0, 3])
    return words(6, 20).masked_fill(torch.arange(6) >= kept[:, None], IGNORED)


_token_loss(
    "smoothed_and_weighted",
    lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, 20, dtype=z.dtype), label_smoothing=0.1
    ),
    _labels,
)
_token_loss("loss_of_channels", lambda z, y: F.cross_entropy(z.transpose(1, 2), y, ignore_index=IGNORED), _labels)
_token_loss("negative_log_likelihood", lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()), _labels)
_token_loss(
    "masked_by_hand",
    lambda z, y: (
        (F.cross_entropy(z.flatten(0, 1), y.flatten().clamp(min=0), reduction="none") * (y.flatten() >= 0)).sum()
        / (y >= 0).sum().clamp(min=1)
    ),
    _labels,
)
_token_loss(
    "mean_of_row_means",
    lambda z, y: (
        (F.cross_entropy(z.transpose(1, 2), y.clamp(min=0), reduction="none") * (y >= 0)).sum(1)
        / (y >= 0).sum(1).clamp(min=1)
    ).mean(),
    _labels,
)
_token_loss(
    "soft_targets", lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1)), lambda: _rows(6, 20).softmax(-1)
)
_token_loss(
    "distilled",
    lambda z, y: F.kl_div(z.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True) / 6,
    lambda: _rows(6, 20),
)
_token_loss(
    "focal",
    lambda z, y: (
        -((1 - z.softmax(-1).gather(-1, y[..., None])) ** 2 * z.log_softmax(-1).gather(-1, y[..., None])).mean()
    ),
    lambda: words(6, 20),
)
_token_loss(
    "z_loss",
    lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + 1e-2 * z.logsumexp(-1).square().mean(),
    lambda: words(6, 20),
)


@variant
def contrastive() -> tuple[Any, ...]:
    """Each row against all others of the batch."""

    def loss_fn(z: Tensor) -> Tensor:
        z = F.normalize(z, dim=-1)
        left, right = z.chunk(2)
        scores = left @ right.t() / 0.1
        goal = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, goal) + F.cross_entropy(scores.t(), goal)) / 2

    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), (_rows(12),), None, loss_fn


@variant
def decorrelated() -> tuple[Any, ...]:
    """A loss on the covariance of features over the batch."""

    def loss_fn(z: Tensor) -> Tensor:
        z = (z - z.mean(0)) / z.std(0)
        covariance = z.t() @ z / (z.shape[0] - 1)
        return (covariance - torch.eye(z.shape[1], dtype=z.dtype)).square().sum()

    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8, bias=False)), (_rows(12),), None, loss_fn


@variant
def triplets() -> tuple[Any, ...]:
    def loss_fn(z: Tensor, other: Tensor) -> Tensor:
        return F.triplet_margin_loss(z, other, other.flip(0))

    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), (_rows(12),), _rows(8), loss_fn


@variant
def root_of_the_mean() -> tuple[Any, ...]:
    """A loss that is not linear in its mean."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
    return model, (_rows(12),), _rows(8), lambda z, y: F.mse_loss(z, y).sqrt()


@variant
def penalised_weights() -> tuple[Any, ...]:
    """A loss with a penalty on the weights, once a step and not once a part."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    def loss_fn(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return model, (_rows(12),), _rows(8), loss_fn


class ManyOutputs(nn.Module):
    """A namedtuple with a list and a dict in it; losses of two heads, and a third that nobody uses."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.classes, self.values, self.unused = nn.Linear(width, 3), nn.Linear(width, 1), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Heads:
        hidden = self.body(x)
        return Heads(
            self.classes(hidden), [self.values(hidden).squeeze(-1)], {"none": None, "unused": self.unused(hidden)}
        )


class Heads(NamedTuple):
    classes: Tensor
    values: list[Tensor]
    extra: dict[str, Tensor | None]


@variant
def several_outputs() -> tuple[Any, ...]:
    def loss_fn(output: Heads, target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.classes, target["class"]) + 0.5 * F.l1_loss(output.values[0], target["value"])

    target = {"class": torch.arange(BATCH) % 3, "value": torch.randn(BATCH)}
    return ManyOutputs(), (_rows(12),), target, loss_fn


# --- odd sizes, other operators ---------------------------------------------------------------------------------------


@variant
def odd_sizes() -> tuple[Any, ...]:
    """Vocabulary 97, width 15, 3 heads, inner width 31."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(97, 15)
            self.attention = nn.MultiheadAttention(15, 3, batch_first=True)
            self.inner, self.outer = nn.Linear(15, 31), nn.Linear(31, 15)
            self.head = nn.Linear(15, 97)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x + self.outer(F.gelu(self.inner(x))))

    return Odd(), (words(7, 97),), words(7, 97), of_tokens


@variant
def one_dim_convolutions() -> tuple[Any, ...]:
    """A causal convolution written by padding, a gated one, a strided one and its transpose; three dims too."""
    model = nn.Sequential(
        nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(3, 8, 3), nn.GLU(1), nn.Conv1d(4, 8, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose1d(8, 4, 4, 2, 1), nn.Unflatten(2, (2, 2, 4)), nn.Conv3d(4, 4, 3, padding=1), nn.AvgPool3d((1, 2, 2)),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return _regression(model, 3, 16)


@variant
def resized_images() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(1),
        nn.Conv2d(8, 16, 3, 2), nn.PixelShuffle(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return _regression(model, 3, 8, 8)


class Windows(nn.Module):
    """Attention in windows of an image, shifted by rolling: views whose cuts do not nest with the batch."""

    def __init__(self, width: int = 8, side: int = 2) -> None:
        super().__init__()
        self.side = side
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s = self.side
        for shift, layer in enumerate(self.layers):
            y = x.roll((-shift, -shift), (1, 2))
            y = y.view(n, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)
            y = layer(y, y, y, need_weights=False)[0]
            y = y.view(n, h // s, w // s, s, s, c).transpose(2, 3).reshape(n, h, w, c)
            x = x + y.roll((shift, shift), (1, 2))
        return x


@variant
def shifted_windows() -> tuple[Any, ...]:
    return _regression(Windows(), 4, 4, 8)


class Shuffled(nn.Module):
    """Sorting, picking the largest, cumulative sums, and rows reordered by what the model finds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.score, self.value, self.head = nn.Linear(width, 1), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1)
        order = score.argsort(-1, descending=True)
        picked = self.value(x).gather(1, order[..., None].expand_as(x))
        weights = score.gather(1, order).softmax(-1)
        top = score.topk(2, -1).values.sum(-1, keepdim=True)
        return self.head((picked.cumsum(1) * weights[..., None]).sum(1)) + top


@variant
def sorted_tokens() -> tuple[Any, ...]:
    return _regression(Shuffled(), 6, 8)


@variant
def weight_normalised() -> tuple[Any, ...]:
    """Parametrized weights: of a given norm, spectrally normalised in evaluation, and orthogonal by construction."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 12)),
        nn.Tanh(),
        nn.utils.weight_norm(nn.Linear(12, 8)),
        nn.Linear(8, 4),
    )
    return _regression(model, 8)


class Cosine(nn.Module):
    """Learned temperature, einsum of several forms, normalisation, broadcasting against parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(5, width))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.randn(2, width, width))
        self.scale = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("...d,hde->...he", x, self.mix).sum(-2) * self.scale
        x = F.normalize(x, dim=-1)
        scores = torch.einsum("btd,kd->btk", x, F.normalize(self.prototypes, dim=-1))
        return (scores * self.temperature.exp()).mean(1)


@variant
def prototypes() -> tuple[Any, ...]:
    return Cosine(), (_rows(6, 8),), torch.arange(BATCH) % 5, F.cross_entropy


class Caching(nn.Module):
    """Key-value memory written token by token into a tensor made in forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.key, self.value, self.query = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        keys, values = x.new_zeros(n, t, d), x.new_zeros(n, t, d)
        for step in range(t):
            keys[:, step], values[:, step] = self.key(x[:, step]), self.value(x[:, step])
        outputs = []
        for step in range(t):
            weights = (keys[:, : step + 1] @ self.query(x[:, step])[..., None]).softmax(1)
            outputs.append((weights * values[:, : step + 1]).sum(1))
        return torch.stack(outputs, 1)


@variant
def written_in_place() -> tuple[Any, ...]:
    return _regression(Caching(), 4, 8)


@variant
def checkpointed() -> tuple[Any, ...]:
    """Blocks that the user recomputes."""
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return _regression(Saving(), 5, 16)


@variant
def partly_frozen() -> tuple[Any, ...]:
    """Every second block frozen, biases alone trained in one, and a parameter nobody uses."""
    model = nn.Sequential(*(Block(16) for _ in range(5)))
    for place in (0, 2):
        model[place].requires_grad_(False)
    model[4].widen.weight.requires_grad_(False)
    model.register_parameter("idle", nn.Parameter(torch.zeros(3)))
    return _regression(model, 5, 16)


class Argument(nn.Module):
    """A mask [t, t] and a table [8, d] that are not batched beside inputs that are; a list of tensors."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, parts: list[Tensor], *, mask: Tensor, ids: Tensor) -> Tensor:
        x = torch.stack(parts, 1)
        for layer in self.layers:
            x = torch.tanh(layer(mask @ x))
        return x * ids[:, None, None]


@variant
def masks_without_a_batch() -> tuple[Any, ...]:
    parts = [_rows(8) for _ in range(5)]
    kwargs = {"mask": torch.rand(5, 5).tril(), "ids": torch.arange(BATCH)}
    return Argument(), (parts,), _rows(5, 8), F.mse_loss, kwargs
