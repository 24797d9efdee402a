"""Encoders and encoder-decoders of transformers for text and speech."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import BATCH, LENGTH, Case, seeded
from tests.zoo.batches import VOCABULARY, classified_text, hugging_face, masked_text, padded_text, translated_text

FP32 = torch.float32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH + 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Masked tokens; two kinds of segments."""
    text = masked_text(seed)
    text["token_type_ids"] = (torch.arange(LENGTH) > torch.arange(BATCH)[:, None]).long()
    return hugging_face("BertConfig", "BertForMaskedLM", text, dtype, seed, **SIZES)


def roberta(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Positions counted from the tokens that are no padding; a class of each text."""
    text = classified_text(seed, 3)
    sizes = {**SIZES, "pad_token_id": 0, "num_labels": 3, "classifier_dropout": 0.0}
    return hugging_face("RobertaConfig", "RobertaForSequenceClassification", text, dtype, seed, **sizes)


def distilbert(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": LENGTH}
    return hugging_face("DistilBertConfig", "DistilBertForMaskedLM", masked_text(seed), dtype, seed, **sizes, **quiet)


def deberta_v2(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Attention disentangled into content and relative position, gathered from a table all layers share."""
    sizes = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    sizes |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
    sizes |= {"attn_implementation": "eager", "type_vocab_size": 0}
    return hugging_face("DebertaV2Config", "DebertaV2ForMaskedLM", masked_text(seed), dtype, seed, **sizes)


def albert(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """One block called four times; factored embeddings."""
    sizes = {**SIZES, "embedding_size": 16, "num_hidden_layers": 4}
    return hugging_face("AlbertConfig", "AlbertForMaskedLM", masked_text(seed), dtype, seed, **sizes)


def electra(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Which tokens were replaced: a loss over the attended positions alone, picked by a mask."""
    text = padded_text(seed)
    text["labels"] = (text["input_ids"] % 3 == 0).long()
    sizes = {**SIZES, "embedding_size": 16}
    return hugging_face("ElectraConfig", "ElectraForPreTraining", text, dtype, seed, **sizes)


def electra_classifier(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A class of each token."""
    text = padded_text(seed)
    text["labels"] = torch.where(text["labels"] < 0, text["labels"], text["labels"] % 3)
    sizes = {**SIZES, "embedding_size": 16, "num_labels": 3, "classifier_dropout": 0.0}
    return hugging_face("ElectraConfig", "ElectraForTokenClassification", text, dtype, seed, **sizes)


def t5(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Encoder and decoder with a relative bias that the first layer makes for all; one embedding for both, tied output."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    quiet = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    kwargs = translated_text(seed)
    return hugging_face("T5Config", "T5ForConditionalGeneration", kwargs, dtype, seed, **sizes, **quiet)


def bart(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Encoder and decoder with learned positions; one embedding for both and the output."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": LENGTH, "use_cache": False}
    sizes |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    quiet = {"dropout": 0.0, "decoder_start_token_id": 2, "pad_token_id": 1}
    kwargs = translated_text(seed)
    return hugging_face("BartConfig", "BartForConditionalGeneration", kwargs, dtype, seed, **sizes, **quiet)


def whisper(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Spectrograms through convolutions, and a text decoder on top."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16}
    sizes |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    sizes |= {"max_target_positions": LENGTH, "use_cache": False, "decoder_start_token_id": 2, "pad_token_id": 1}
    sizes |= {"dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    with seeded(seed):
        sound = torch.randn(BATCH, 8, 32)
    kwargs = {"input_features": sound, "labels": translated_text(seed)["labels"]}
    return hugging_face("WhisperConfig", "WhisperForConditionalGeneration", kwargs, dtype, seed, **sizes)


def _sound(seed: int) -> torch.Tensor:
    with seeded(seed):
        return torch.randn(BATCH, 400)


WAV2VEC2: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
    "conv_dim": (16, 16),
    "conv_kernel": (10, 8),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "activation_dropout": 0.0,
}


def wav2vec2(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Sound through convolutions with group norm; positions by a convolution whose weight is normalised; a class."""
    kwargs = {"input_values": _sound(seed), "labels": torch.arange(BATCH) % 4}
    sizes = {**WAV2VEC2, "num_labels": 4, "classifier_proj_size": 16}
    return hugging_face("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", kwargs, dtype, seed, **sizes)


def wav2vec2_ctc(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Transcripts of unequal length by connectionist temporal classification."""
    labels = 1 + torch.arange(BATCH * 4).view(BATCH, 4) % 20
    labels = labels.masked_fill(torch.arange(4) >= 2 + torch.arange(BATCH)[:, None] % 3, -100)
    sizes = {**WAV2VEC2, "pad_token_id": 0}
    kwargs = {"input_values": _sound(seed), "labels": labels}
    return hugging_face("Wav2Vec2Config", "Wav2Vec2ForCTC", kwargs, dtype, seed, **sizes)


ENCODERS = {
    model.__name__: model
    for model in (
        bert, roberta, distilbert, deberta_v2, albert, electra, electra_classifier, t5, bart, whisper, wav2vec2,
        wav2vec2_ctc,
    )
}  # fmt: skip
