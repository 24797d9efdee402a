"""Small models that the equality tests share: each a model, one global batch, and how its loss is taken.

Every function takes a dtype and a seed; the same seed gives the same weights and data in every dtype (drawn in float32,
then cast). Dropout is off, so that runs can be equal. Batches hold 8 examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from examples import gpt, text
from planner.trace import find_loss

BATCH = 8
LENGTH = 16
IGNORED = -100


class Case(NamedTuple):
    """``model(*inputs, **kwargs)`` holds the loss, or, where ``loss_fn`` is set, ``loss_fn(that, target)`` gives it.

    ``target`` may be any tree of tensors, or None: then ``loss_fn`` is called with the output alone.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_fn: Callable[..., Tensor] | None

    def loss(self) -> Tensor:
        output = self.model(*self.inputs, **self.kwargs)
        if self.loss_fn is None:
            return find_loss(output)
        return self.loss_fn(output) if self.target is None else self.loss_fn(output, self.target)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A fixed state of the random generator inside, the caller's again outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def excerpts(seed: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Real text as (tokens, next tokens), [8, 16] each, folded into ``vocabulary`` symbols."""
    training, _ = text.load()
    tokens, following = next(text.batches(training, BATCH, LENGTH, seed))
    return tokens % vocabulary, following % vocabulary


def digits(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Real 8 x 8 images of handwritten digits, [8, 1, 8, 8] in 0..1, and their classes [8]."""
    images, classes = load_digits(return_X_y=True)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:BATCH]
    pixels = torch.from_numpy(images)[chosen].view(BATCH, 1, 8, 8) / 16
    return pixels.to(dtype), torch.from_numpy(classes)[chosen]


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Four linear layers and a mean squared error."""
    with seeded(seed):
        sizes = (32, 64, 64, 64, 16)
        layers: list[nn.Module] = []
        for inner, outer in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(inner, outer), nn.GELU()]
        model = nn.Sequential(*layers[:-1])
        x, y = torch.randn(BATCH, 32), torch.randn(BATCH, 16)
    return Case(model.to(dtype), (x.to(dtype),), {}, y.to(dtype), F.mse_loss)


def gpt_tied(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """The demo's GPT, small: four blocks, and one weight for token embedding and output."""
    with seeded(seed):
        model = gpt.GPT(vocabulary=text.VOCABULARY, length=LENGTH, width=32, layers=4, heads=4)
    tokens, targets = excerpts(seed, text.VOCABULARY)
    return Case(model.to(dtype), (tokens,), {}, targets, gpt.loss_fn)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet(nn.Module):
    """Images [n, 1, 8, 8] to logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(
            ResidualBlock(16, 16, 1), ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 32, 1)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn(self.conv(images))))
        return self.head(torch.flatten(self.pool(x), 1))


def resnet_digits(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """A residual CNN with BatchNorm, on real images."""
    with seeded(seed):
        model = ResNet()
    images, classes = digits(seed, dtype)
    return Case(model.to(dtype), (images,), {}, classes, F.cross_entropy)


def hf_llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Llama, four layers, 4 heads over 2 key-value heads; prompts of unequal length are left out of the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with seeded(seed):
        model = LlamaForCausalLM(config)
    tokens, _ = excerpts(seed, config.vocab_size)
    prompt = torch.arange(LENGTH) < torch.arange(BATCH)[:, None]
    kwargs = {"input_ids": tokens, "labels": tokens.masked_fill(prompt, IGNORED)}
    return Case(model.to(dtype).train(), (), kwargs, None, None)


def hf_gpt2(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """GPT-2, four layers: fused QKV (Conv1D), tied output weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with seeded(seed):
        model = GPT2LMHeadModel(config)
    tokens, _ = excerpts(seed, config.vocab_size)
    return Case(model.to(dtype).train(), (), {"input_ids": tokens, "labels": tokens.clone()}, None, None)


def hf_bert(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """BERT's masked language model, four layers: rows of unequal length, and few, unevenly spread tokens to predict."""
    from transformers import BertConfig, BertForMaskedLM

    mask_token = 95
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    with seeded(seed):
        model = BertForMaskedLM(config)
        draw = torch.rand(BATCH, LENGTH)
    tokens, _ = excerpts(seed, mask_token)
    lengths = LENGTH - torch.arange(BATCH)
    attended = torch.arange(LENGTH) < lengths[:, None]
    predicted = attended & (draw < 0.3)
    predicted[:, 0] = torch.arange(BATCH) % 4 == 0
    kwargs = {
        "input_ids": tokens.masked_fill(predicted, mask_token),
        "attention_mask": attended.long(),
        "labels": tokens.masked_fill(~predicted, IGNORED),
    }
    return Case(model.to(dtype).train(), (), kwargs, None, None)


def hf_vit(dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """ViT classifying digits, four layers over 16 patches and the class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    with seeded(seed):
        model = ViTForImageClassification(config)
    images, classes = digits(seed, dtype)
    return Case(model.to(dtype).train(), (), {"pixel_values": images, "labels": classes}, None, None)


MODELS: dict[str, Callable[..., Case]] = {
    "mlp": mlp,
    "gpt_tied": gpt_tied,
    "resnet_digits": resnet_digits,
    "hf_llama": hf_llama,
    "hf_gpt2": hf_gpt2,
    "hf_bert": hf_bert,
    "hf_vit": hf_vit,
}
