"""Data and weights that the zoo's models share: batches of 8, drawn from a seed, the same in every dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import BATCH, IGNORED, LENGTH, Case, excerpts, seeded

VOCABULARY = 96
SPREAD = 0.1


def varied(model: nn.Module) -> nn.Module:
    """``model`` with every floating-point parameter moved at random, so that no bias is zero and no scale is one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
    return model


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of a tree of tuples, lists and dicts in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    return value


def hugging_face(
    config: str,
    architecture: str,
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> Case:
    """A model of transformers from its config, in training mode, which returns its loss."""
    import transformers

    made = getattr(transformers, config)(**options)
    with seeded(seed):
        model = varied(getattr(transformers, architecture)(made))
    return Case(model.to(dtype).train(), (), cast(dict(kwargs), dtype), None, None)


def lengths() -> Tensor:
    """Unequal lengths of the 8 rows: 16, 15, ..., 9."""
    return LENGTH - torch.arange(BATCH)


def padded_text(seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Rows of unequal length for a language model: what is padding is neither read nor predicted."""
    tokens, _ = excerpts(seed, vocabulary)
    attended = torch.arange(LENGTH) < lengths()[:, None]
    return {
        "input_ids": tokens.masked_fill(~attended, 0),
        "attention_mask": attended.long(),
        "labels": tokens.masked_fill(~attended, IGNORED),
    }


def prompted_text(seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Prompts of unequal length that are read and not predicted; the first row is prompt alone."""
    tokens, _ = excerpts(seed, vocabulary)
    prompt = torch.arange(LENGTH) < (LENGTH - 2 * torch.arange(BATCH))[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(prompt, IGNORED)}


def masked_text(seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Rows of unequal length, and few, unevenly spread tokens to predict; two rows have none."""
    mask_token = vocabulary - 1
    tokens, _ = excerpts(seed, mask_token)
    with seeded(seed):
        draw = torch.rand(BATCH, LENGTH)
    attended = torch.arange(LENGTH) < lengths()[:, None]
    predicted = attended & (draw < 0.3)
    predicted[:, 0] = torch.arange(BATCH) % 4 == 0
    predicted[2:4] = False
    return {
        "input_ids": tokens.masked_fill(predicted, mask_token),
        "attention_mask": attended.long(),
        "labels": tokens.masked_fill(~predicted, IGNORED),
    }


def classified_text(seed: int, classes: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Rows of unequal length and a class of each."""
    text = padded_text(seed, vocabulary)
    with seeded(seed):
        text["labels"] = torch.randint(0, classes, (BATCH,))
    return text


def translated_text(seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """A text of unequal lengths and its shorter translation, padded with what is ignored."""
    source, target = padded_text(seed, vocabulary), padded_text(seed + 1, vocabulary)
    return {**source, "labels": target["labels"][:, : LENGTH - 4].contiguous()}


def pictures(seed: int, channels: int, size: int, classes: int) -> dict[str, Tensor]:
    with seeded(seed):
        return {
            "pixel_values": torch.randn(BATCH, channels, size, size),
            "labels": torch.randint(0, classes, (BATCH,)),
        }
