"""Models in plain PyTorch: encoder-decoder, recurrent, convolutional, recommendation, generator, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import BATCH, LENGTH, Case, excerpts, seeded
from tests.zoo.batches import VOCABULARY, cast, lengths, varied

FP32 = torch.float32


def made(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return varied(model).to(dtype).train()


# --- text -------------------------------------------------------------------------------------------------------------


class Translator(nn.Module):
    """Tokens [n, s] and [n, t] to logits [n, t, v], through ``nn.Transformer`` in its own order of dims, [t, n, d]."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.source, self.target = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.randn(LENGTH, 32) * 0.02)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.source(source) + self.positions[: source.shape[1]]
        y = self.target(target) + self.positions[: target.shape[1]]
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=x.dtype)
        out = self.transformer(
            x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
        )
        return self.head(out if self.batch_first else out.transpose(0, 1))


def _next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


def transformer(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Encoder and decoder with a causal mask that is not batched and padding masks that are; padding is ignored."""
    with seeded(seed):
        model = made(Translator(batch_first=True), dtype)
    source, _ = excerpts(seed, VOCABULARY)
    target, following = excerpts(seed + 1, VOCABULARY)
    padding = torch.arange(LENGTH) >= lengths()[:, None]
    kept = torch.arange(12) < (lengths()[:, None] - 6)
    return Case(model, (source, target[:, :12]), {"padding": padding}, following[:, :12] * kept, _next_token)


def transformer_time_first(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """The same with the batch as second dim of every activation."""
    with seeded(seed):
        model = made(Translator(batch_first=False), dtype)
    source, _ = excerpts(seed, VOCABULARY)
    target, following = excerpts(seed + 1, VOCABULARY)
    return Case(model, (source, target[:, :12].contiguous()), {}, following[:, :12].contiguous(), _next_token)


class RecurrentLM(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = kind(16, 16, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.norm = nn.LayerNorm(32 if bidirectional else 16)
        self.head = nn.Linear(32 if bidirectional else 16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.embedding(tokens))
        return self.head(self.norm(outputs))


def _recurrent(kind: type[nn.RNNBase], bidirectional: bool, dtype: torch.dtype, seed: int) -> Case:
    with seeded(seed):
        model = made(RecurrentLM(kind, bidirectional), dtype)
    tokens, following = excerpts(seed, VOCABULARY)
    return Case(model, (tokens,), {}, following, _next_token)


def lstm(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    return _recurrent(nn.LSTM, False, dtype, seed)


def lstm_both_ways(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    return _recurrent(nn.LSTM, True, dtype, seed)


def gru(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    return _recurrent(nn.GRU, False, dtype, seed)


class CellLoop(nn.Module):
    """A recurrent cell called token by token, its state kept from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(VOCABULARY, 16), nn.LSTMCell(16, 16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state = x.new_zeros(x.shape[0], 16), x.new_zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0])


def lstm_cell(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(CellLoop(), dtype)
    tokens, _ = excerpts(seed, VOCABULARY)
    return Case(model, (tokens[:, :6].contiguous(),), {}, torch.arange(BATCH) % 3, F.cross_entropy)


# --- images -----------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Images [n, 3, 16, 16] to masks [n, 2, 16, 16]: features of each scale skip to the way back."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList((DoubleConv(3, width), DoubleConv(width, 2 * width)))
        self.middle = DoubleConv(2 * width, 4 * width)
        self.widen = nn.ModuleList(
            (nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2))
        )
        self.up = nn.ModuleList((DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, width)))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat((widen(x), kept.pop()), 1))
        return self.head(x)


def unet(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(UNet(), dtype)
        images, masks = torch.randn(BATCH, 3, 16, 16), torch.randint(0, 2, (BATCH, 16, 16))
    return Case(model, (images.to(dtype),), {}, masks, F.cross_entropy)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.along = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.second(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(16, 32) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def mlp_mixer(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(Mixer(), dtype)
        images = torch.randn(BATCH, 3, 16, 16)
    return Case(model, (images.to(dtype),), {}, torch.arange(BATCH) % 5, F.cross_entropy)


class GeneratorAndCritic(nn.Module):
    """Noise to images by transposed convolutions with BatchNorm, judged by a critic that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 8), nn.Flatten(0)
        ).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.generator(noise[:, :, None, None]))


def gan_generator(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(GeneratorAndCritic(), dtype)
        noise = torch.randn(BATCH, 16)
    return Case(model, (noise.to(dtype),), {}, torch.ones(BATCH, dtype=dtype), F.binary_cross_entropy_with_logits)


# --- recommendation ---------------------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """Numbers [n, 13] and ids [n, tables] to the logit of a click: products of all pairs of features."""

    def __init__(self, rows: tuple[int, ...], width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        features = len(rows) + 1
        self.register_buffer("pairs", torch.tril_indices(features, features, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(width + features * (features - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        features = torch.stack(found, 1)
        products = torch.bmm(features, features.transpose(1, 2))
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((dense, chosen), 1)).squeeze(1)


def dlrm(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Tables of very unequal size."""
    rows = (4096, 1000, 24, 8)
    with seeded(seed):
        model = made(Recommender(rows), dtype)
        numbers = torch.randn(BATCH, 13)
        ids = torch.stack([torch.randint(0, count, (BATCH,)) for count in rows], 1)
        clicked = torch.randint(0, 2, (BATCH,))
    return Case(model, (numbers.to(dtype), ids), {}, clicked.to(dtype), F.binary_cross_entropy_with_logits)


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, mode="mean")
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


def embedding_bag(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(BagOfWords(), dtype)
    tokens, _ = excerpts(seed, VOCABULARY)
    return Case(model, (tokens,), {}, torch.arange(BATCH) % 3, F.cross_entropy)


# --- graphs -----------------------------------------------------------------------------------------------------------


class Messages(nn.Module):
    """One round: a message along each edge, added up at its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.GRUCell(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """``x`` [nodes, d], ``edges`` [2, count]: from, to."""
        message = torch.relu(self.message(torch.cat((x[edges[0]], x[edges[1]]), 1)))
        return self.update(torch.zeros_like(x).index_add(0, edges[1], message), x)


class GraphNetwork(nn.Module):
    """All graphs of a batch as one: nodes [nodes, 6], edges [2, count] and the graph of each node; a value a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.rounds = nn.ModuleList(Messages(16) for _ in range(2))
        self.leave = nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor, graph_of: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for step in self.rounds:
            x = step(x, edges)
        pooled = x.new_zeros(BATCH, 16).scatter_add(0, graph_of[:, None].expand_as(x), x)
        return self.leave(pooled).squeeze(1)


def graph_network(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    nodes, count = 6, 10
    with seeded(seed):
        model = made(GraphNetwork(), dtype)
        x, values = torch.randn(BATCH * nodes, 6), torch.randn(BATCH)
        ends = torch.randint(0, nodes, (2, BATCH, count)) + nodes * torch.arange(BATCH)[:, None]
    inputs = (x.to(dtype), ends.flatten(1), torch.arange(BATCH).repeat_interleave(nodes))
    return Case(model, inputs, {}, values.to(dtype), F.mse_loss)


class PaddedGraphs(nn.Module):
    """Graphs of the same number of nodes, each a row of the batch: gather along edges, scatter to their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(6, 16), nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, source: Tensor, end: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for _ in range(2):
            wide = [e.unsqueeze(-1).expand(-1, -1, x.shape[-1]) for e in (source, end)]
            message = torch.relu(self.message(torch.cat([x.gather(1, w) for w in wide], -1)))
            x = x + torch.zeros_like(x).scatter_add(1, wide[1], message)
        return self.leave(x.amax(1)).squeeze(1)


def padded_graphs(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    with seeded(seed):
        model = made(PaddedGraphs(), dtype)
        x, values = torch.randn(BATCH, 6, 6), torch.randn(BATCH)
        source, end = torch.randint(0, 6, (2, BATCH, 10)).unbind()
    return Case(model, cast((x, source, end), dtype), {}, values.to(dtype), F.mse_loss)


PLAIN = {
    model.__name__: model
    for model in (
        transformer, transformer_time_first, lstm, lstm_both_ways, gru, lstm_cell, unet, mlp_mixer, gan_generator, dlrm,
        embedding_bag, graph_network, padded_graphs,
    )
}  # fmt: skip
