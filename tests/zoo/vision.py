"""Models of transformers for images."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import BATCH, Case, seeded
from tests.zoo.batches import VOCABULARY, hugging_face, padded_text, pictures

FP32 = torch.float32
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLASSES = {"num_labels": 5, "problem_type": "single_label_classification"}


def vit(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    sizes = {**LAYERS, **QUIET, **CLASSES, "image_size": 16, "patch_size": 4}
    return hugging_face("ViTConfig", "ViTForImageClassification", pictures(seed, 3, 16, 5), dtype, seed, **sizes)


def swin(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Attention in windows that are shifted by rolling, with a table of relative positions; patches merge."""
    sizes = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    sizes |= {**QUIET, **CLASSES, "drop_path_rate": 0.0}
    return hugging_face("SwinConfig", "SwinForImageClassification", pictures(seed, 3, 16, 5), dtype, seed, **sizes)


def convnext(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Depthwise convolutions, norms over channels, a learned scale of each branch."""
    sizes = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2], "patch_size": 4, "drop_path_rate": 0.0}
    kwargs = pictures(seed, 3, 32, 5)
    return hugging_face("ConvNextConfig", "ConvNextForImageClassification", kwargs, dtype, seed, **sizes, **CLASSES)


def resnet(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Bottlenecks with BatchNorm."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"}
    kwargs = pictures(seed, 3, 32, 5)
    return hugging_face("ResNetConfig", "ResNetForImageClassification", kwargs, dtype, seed, **sizes, **CLASSES)


def segformer(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A class of each pixel, some of them ignored; attention to shrunken images; features of all stages joined."""
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]}
    sizes |= {
        **QUIET,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "decoder_hidden_size": 16,
        "num_labels": 5,
    }
    with seeded(seed):
        labels = torch.randint(0, 5, (BATCH, 32, 32))
    labels[:, : 2 * BATCH] = torch.where(torch.arange(2 * BATCH)[:, None] > torch.arange(BATCH)[:, None, None], 1, 255)
    kwargs = {**pictures(seed, 3, 32, 5), "labels": labels}
    return hugging_face("SegformerConfig", "SegformerForSemanticSegmentation", kwargs, dtype, seed, **sizes)


def clip(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Images and texts told apart against all others of the batch."""
    text = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**LAYERS, "image_size": 16, "patch_size": 4}
    batch = padded_text(seed)
    batch["pixel_values"] = pictures(seed, 3, 16, 5)["pixel_values"]
    del batch["labels"]
    kwargs = {**batch, "return_loss": True}
    sizes = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    return hugging_face("CLIPConfig", "CLIPModel", kwargs, dtype, seed, **sizes)


VISION = {model.__name__: model for model in (vit, swin, convnext, resnet, segformer, clip)}
