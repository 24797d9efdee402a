"""Published shapes by name, as problems ready to search.

    SHAPES                  name -> Shape
    sample(shape, batch)    the model and one global batch, on the meta device
    graph_of(shape, batch)  its traced graph, kept for the next problem of this process
    problem(name, batch, cluster, gpus)
    precision(cluster)      bfloat16, or float16 where the devices are not made for it

Sources of the sizes: GPT-2, GPT-3 (Brown and others 2020, table 2.1), Megatron-LM (Narayanan and others 2021, table 1),
Llama 2 (Touvron and others 2023), Llama 3 (Dubey and others 2024), Nemotron-4 15B (Parmar and others 2024), BERT (Devlin
and others 2019), ViT (Dosovitskiy and others 2021), ResNet (He and others 2016), Soft MoE (Puigcerver and others 2023).
The vocabulary of GPT-3 and Megatron-LM's models is 51,200 (50,257 padded), as in table 1 of Narayanan and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from costmodels.hardware import Cluster, load_cluster
from planner.ir.graph import Graph
from planner.solve.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.models import Sizes

OPTIMIZER = "adamw"


@dataclass(frozen=True)
class Shape:
    """``kind``: gpt, llama, nemotron, bert, vit, resnet or mlp. ``length``: tokens or patches a row.

    ``tied``, ``rotary``, ``feed_forward``: None and '' for what the kind has (benchmarks.models.Sizes).
    A resnet has 64 ``width`` and four counts of blocks in ``layers`` (50 or 101); an mlp ``layers`` of ``width``.
    """

    kind: str
    layers: int
    width: int
    heads: int = 1
    key_value_heads: int = 0
    inner: int = 0
    vocabulary: int = 0
    length: int = 0
    experts: int = 0
    fused: bool = True
    dropout: float = 0.0
    biases: bool | None = None
    float_loss: bool = False
    tied: bool | None = None
    rotary: bool | None = None
    feed_forward: str = ""


def gpt(layers: int, width: int, heads: int, length: int = 2048, vocabulary: int = 51200) -> Shape:
    return Shape("gpt", layers, width, heads, 0, 4 * width, vocabulary, length)


def llama(layers: int, width: int, heads: int, key_value_heads: int, inner: int, vocabulary: int, length: int) -> Shape:
    return Shape("llama", layers, width, heads, key_value_heads, inner, vocabulary, length)


SHAPES: Mapping[str, Shape] = {
    "gpt2-small": gpt(12, 768, 12, 1024, 50257),
    "gpt2-medium": gpt(24, 1024, 16, 1024, 50257),
    "gpt2-xl": gpt(48, 1600, 25, 1024, 50257),
    "gpt3-1.3b": gpt(24, 2048, 16),
    "gpt3-2.7b": gpt(32, 2560, 32),
    "gpt3-6.7b": gpt(32, 4096, 32),
    "gpt3-13b": gpt(40, 5120, 40),
    "gpt3-175b": gpt(96, 12288, 96),
    "megatron-1.7b": gpt(24, 2304, 24),
    "megatron-3.6b": gpt(30, 3072, 32),
    "megatron-7.5b": gpt(36, 4096, 32),
    "megatron-18b": gpt(40, 6144, 48),
    "megatron-22b": gpt(48, 6144, 64),
    "megatron-39b": gpt(48, 8192, 64),
    "megatron-76b": gpt(60, 10240, 80),
    "megatron-145b": gpt(80, 12288, 96),
    "megatron-310b": gpt(96, 16384, 128),
    "megatron-530b": gpt(105, 20480, 128),
    "megatron-1t": gpt(128, 25600, 160),
    "zero-bubble-6.2b": gpt(30, 4096, 32, 1024),
    "zero-bubble-14.6b": gpt(46, 5120, 40, 1024),
    "zero-bubble-28.3b": gpt(62, 6144, 48, 1024),
    "llama-2-7b": llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "nemotron-4-15b": Shape("nemotron", 32, 6144, 48, 8, 24576, 256000, 4096),
    "bert-large": Shape("bert", 24, 1024, 16, 0, 4096, 30522, 512),
    "vit-l-16": Shape("vit", 24, 1024, 16, 0, 4096, 1000, 196),
    "soft-moe-l-16": Shape("vit", 24, 1024, 16, 0, 4096, 1000, 196, experts=128),
    "resnet-50": Shape("resnet", 50, 64, vocabulary=1000),
    "resnet-101-wide": Shape("resnet", 101, 256, vocabulary=1000),
    "wide-mlp": Shape("mlp", 4, 16384),
    "giant-vocabulary": Shape("gpt", 4, 1024, 16, 0, 4096, 4_000_000, 512),
}
# Blocks at each resolution: He and others 2016, table 1.
RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
IMAGE_SIDE, PATCH = 224, 16


def sizes_of(shape: Shape) -> Sizes:
    from benchmarks.models import Sizes

    return Sizes(
        shape.layers,
        shape.width,
        shape.heads,
        shape.inner,
        shape.vocabulary,
        shape.length,
        shape.key_value_heads,
        shape.feed_forward or {"llama": "swiglu", "nemotron": "squared-relu"}.get(shape.kind, "gelu"),
        rotary=shape.kind in ("llama", "nemotron") if shape.rotary is None else shape.rotary,
        causal=shape.kind not in ("bert", "vit"),
        tied=shape.kind in ("gpt", "bert") if shape.tied is None else shape.tied,
        experts=shape.experts,
        fused=shape.fused,
        dropout=shape.dropout,
        biases=shape.biases,
        float_loss=shape.float_loss,
    )


def sample(shape: Shape, batch: int, dtype: str = "bfloat16") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that returns its loss, and one global batch of ``batch`` rows. Nothing of it takes memory."""
    import torch

    from benchmarks import models

    kind = getattr(torch, dtype)
    with torch.device("meta"):
        classes = torch.empty(batch, dtype=torch.int64)
        model: nn.Module
        if shape.kind == "mlp":
            model = models.MLP(shape.layers, shape.width).to(kind)
            return model, tuple(torch.empty(batch, shape.width, dtype=kind) for _ in range(2))
        images = torch.empty(batch, 3, IMAGE_SIDE, IMAGE_SIDE, dtype=kind)
        if shape.kind == "resnet":
            model = models.ResNet(RESNET_BLOCKS[shape.layers], shape.width, shape.vocabulary)
            return model.to(kind), (images, classes)
        if shape.kind == "vit":
            return models.VisionTransformer(sizes_of(shape), PATCH).to(kind), (images, classes)
        tokens = torch.empty(batch, shape.length, dtype=torch.int64)
        return models.Transformer(sizes_of(shape)).to(kind), (tokens, tokens.clone())


def precision(cluster: Cluster) -> str:
    return "bfloat16" if "bfloat16" in cluster.device.peak_flops_per_s else "float16"


@lru_cache(maxsize=8)
def graph_of(shape: Shape, batch: int, dtype: str = "bfloat16") -> Graph:
    from planner.trace import Batch, trace

    model, inputs = sample(shape, batch, dtype)
    return trace(model, Batch(inputs, {})).graph


def problem(name: str, batch: int, cluster: str | Cluster, gpus: int, shape: Shape | None = None) -> Problem:
    """The problem of training ``name`` (``shape``: or a variant of it) with ``batch`` rows a step."""
    machines = load_cluster(cluster, gpus) if isinstance(cluster, str) else cluster.with_gpus(gpus)
    dtype = precision(machines)
    graph = graph_of(shape or SHAPES[name], batch, dtype)
    return Problem(name, graph, machines, OPTIMIZER, dtype, machines.device.memory_bytes)
