"""Random small models, clusters and batches: what the search is compared on with every plan there is (tests.oracle)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from costmodels.hardware import Cluster
from costmodels.mixed import MixedCluster
from planner.ir.graph import Graph
from tests.search_cases import cluster, mixed, traced

VOCABULARY = 6
BLOCKS = ("linear", "gelu", "norm", "scale", "residual", "attention")


@dataclass(frozen=True)
class Model:
    """``blocks``: one link of the chain each, all of them [.., width] -> [.., width]; ``again``: the first block runs once
    more at the end; ``skip``: its result is added before the last block; ``frozen``: the first block has no gradients.

    ``length``: 0 for inputs [rows, width], else for [rows, length, width], or with ``tokens`` for an embedding of
    [rows, length]. ``classes``: of a last linear layer, 0 for none; ``tied``: its weight is that of the embedding.
    """

    rows: int
    width: int
    inner: int
    blocks: tuple[str, ...]
    length: int = 0
    tokens: bool = False
    classes: int = 0
    tied: bool = False
    skip: bool = False
    again: bool = False
    frozen: bool = False
    loss: str = "mse"


class Linear(nn.Module):
    def __init__(self, model: Model, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width) if kind == "norm" else nn.Identity()
        self.linear = nn.Linear(model.width, model.width, bias=kind != "linear")
        self.after = nn.GELU() if kind == "gelu" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(self.norm(x)))


class Scale(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x - x.mean(-1, keepdim=True)


class Residual(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.into = nn.Linear(model.width, model.inner)
        self.out = nn.Linear(model.inner, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.relu(self.into(x)))


class Attention(nn.Module):
    """One head, written out as matrix products."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.query = nn.Linear(model.width, model.inner, bias=False)
        self.key = nn.Linear(model.width, model.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-2, -1))
        return torch.matmul(torch.softmax(scores, -1), x)


def block(model: Model, kind: str) -> nn.Module:
    made = {"scale": Scale, "residual": Residual, "attention": Attention}
    return made[kind](model) if kind in made else Linear(model, kind)


class Chain(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(VOCABULARY, model.width) if model.tokens else None
        self.blocks = nn.ModuleList(block(model, kind) for kind in model.blocks)
        self.head = nn.Linear(model.width, model.classes, bias=False) if model.classes else None
        if self.embedding is not None and self.head is not None and model.tied:
            self.head.weight = self.embedding.weight
        if model.frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        first: Tensor | None = None
        for number, one in enumerate(self.blocks):
            if self.model.skip and number == len(self.blocks) - 1 and first is not None:
                x = x + first
            x = one(x)
            first = x if first is None else first
        if self.model.again:
            x = self.blocks[0](x)
        return x if self.head is None else self.head(x)


def squares(output: Tensor) -> Tensor:
    return (output * output).sum()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@lru_cache(maxsize=256)
def graph_of_model(model: Model) -> Graph:
    with torch.random.fork_rng(devices=[]):
        chain = Chain(model)
    shape = (model.rows, model.length) if model.length else (model.rows,)
    x = torch.zeros(shape, dtype=torch.int64) if model.tokens else torch.empty(*shape, model.width)
    if model.loss == "squares":
        return traced(chain, x, loss_fn=squares)
    if model.loss == "cross entropy":
        return traced(chain, x, target=torch.zeros(shape, dtype=torch.int64), loss_fn=cross_entropy)
    return traced(chain, x, target=torch.empty(*shape, model.classes or model.width), loss_fn=F.mse_loss)


@st.composite
def models(draw: st.DrawFn, most_segments: int = 4) -> Model:
    blocks = tuple(draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=most_segments - 1)))
    has_room = len(blocks) + 2 <= most_segments
    tokens = has_room and draw(st.booleans())
    length = draw(st.sampled_from([2, 3, 4])) if tokens or "attention" in blocks else draw(st.sampled_from([0, 0, 2]))
    tied = tokens and draw(st.booleans())
    classes = VOCABULARY if tied else draw(st.sampled_from([0, 3, 6]))
    return Model(
        rows=draw(st.sampled_from([1, 2, 3, 4, 4, 5, 6, 8, 8])),
        width=draw(st.sampled_from([4, 6, 8, 8, 16])),
        inner=draw(st.sampled_from([4, 5, 12, 16])),
        blocks=blocks,
        length=length,
        tokens=tokens,
        classes=classes,
        tied=tied,
        skip=len(blocks) > 1 and draw(st.booleans()),
        again=len(blocks) > 1 and has_room and draw(st.booleans()),
        frozen=(len(blocks) > 1 or classes > 0) and not tokens and draw(st.integers(0, 3)) == 0,
        loss=draw(st.sampled_from(["cross entropy", "mse", "squares"] if classes else ["mse", "squares"])),
    )


@st.composite
def clusters(draw: st.DrawFn, most: int = 4) -> Cluster:
    """Devices and links of which none is always the slowest."""
    gpus = draw(st.sampled_from([n for n in (2, 3, 4, 4) if n <= most]))
    link = draw(st.sampled_from([1e7, 1e8, 1e9, 1e10]))
    return cluster(
        gpus,
        flops_per_s=draw(st.sampled_from([1e8, 1e9, 1e10])),
        memory_bytes_per_s=draw(st.sampled_from([1e8, 1e9, 1e10])),
        link_bytes_per_s=link,
        latency_s=draw(st.sampled_from([0.0, 1e-7, 1e-6, 1e-5])),
        launch_s=draw(st.sampled_from([0.0, 1e-7, 1e-6])),
        serial_share=draw(st.sampled_from([0.5, 0.65])),
        gpus_per_node=draw(st.sampled_from([1, 2, 4, 4])),
        inter_bytes_per_s=link * draw(st.sampled_from([0.1, 0.5, 1.0])),
        kind=draw(st.sampled_from(["gpu", "gpu", "cpu"])),
    )


@st.composite
def mixed_clusters(draw: st.DrawFn) -> MixedCluster:
    """Two or three groups of 1 to 3 devices that differ in speed, in memory or in nothing."""
    count = draw(st.sampled_from([2, 2, 3]))
    kind = draw(st.sampled_from(["gpu", "gpu", "cpu"]))
    link = draw(st.sampled_from([1e7, 1e8, 1e9]))
    memory_bytes_per_s = draw(st.sampled_from([1e8, 1e9, 1e10]))
    launch_s = draw(st.sampled_from([0.0, 1e-7, 1e-6]))
    groups = []
    for _ in range(count):
        group = cluster(
            draw(st.sampled_from([1, 1, 2, 3] if count == 2 else [1, 1, 2])),
            flops_per_s=draw(st.sampled_from([1e8, 1e9, 1e10])),
            memory_bytes_per_s=memory_bytes_per_s * draw(st.sampled_from([0.5, 1.0])),
            link_bytes_per_s=link * draw(st.sampled_from([0.5, 1.0])),
            latency_s=draw(st.sampled_from([0.0, 1e-6])),
            launch_s=launch_s * draw(st.sampled_from([1.0, 2.0])),
            gpus_per_node=draw(st.sampled_from([1, 2, 4])),
            inter_bytes_per_s=link * draw(st.sampled_from([0.1, 1.0])),
            kind=kind,
        )
        size = draw(st.sampled_from([10**12, 10**12, 6000, 2500]))
        groups.append(replace(group, device=replace(group.device, memory_bytes=size)))
    return mixed(*groups, inter_bytes_per_s=link * draw(st.sampled_from([0.1, 1.0])), latency_s=1e-6)
