"""Language models of transformers that predict the next token: rows of unequal length, or prompts left out of the loss."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import LENGTH, Case
from tests.zoo.batches import VOCABULARY, hugging_face, padded_text, prompted_text

FP32 = torch.float32
# As most configs call their sizes.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}


def llama(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Four layers; keys and values in fewer heads than queries; SwiGLU; rotary positions."""
    sizes = {**GROUPED, "num_hidden_layers": 4}
    return hugging_face("LlamaConfig", "LlamaForCausalLM", padded_text(seed), dtype, seed, **sizes)


def mistral(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Attention to the last 6 tokens alone."""
    kwargs = padded_text(seed)
    return hugging_face("MistralConfig", "MistralForCausalLM", kwargs, dtype, seed, **GROUPED, sliding_window=6)


def qwen2(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Biases on queries, keys and values alone; tied output."""
    sizes = {**GROUPED, "tie_word_embeddings": True}
    return hugging_face("Qwen2Config", "Qwen2ForCausalLM", prompted_text(seed), dtype, seed, **sizes)


def qwen3(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Norms of queries and keys in each head."""
    return hugging_face("Qwen3Config", "Qwen3ForCausalLM", padded_text(seed), dtype, seed, **GROUPED)


def gemma(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Norms scaled by 1 + weight, one head of keys and values, tied and scaled embeddings."""
    sizes = {**GROUPED, "num_key_value_heads": 1}
    return hugging_face("GemmaConfig", "GemmaForCausalLM", padded_text(seed), dtype, seed, **sizes)


def gpt2(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Fused queries, keys and values with weights [in, out]; learned positions; tied output."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return hugging_face("GPT2Config", "GPT2LMHeadModel", padded_text(seed), dtype, seed, **sizes, **quiet, **TOKENS)


def gpt_neox(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Attention and MLP side by side, queries, keys and values fused head by head, rotary on a part of each head."""
    sizes = {**SIZES, "intermediate_size": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return hugging_face("GPTNeoXConfig", "GPTNeoXForCausalLM", padded_text(seed), dtype, seed, **sizes)


def opt(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Learned positions counted by the attention mask; embeddings narrower than the layers, projected."""
    sizes = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0}
    return hugging_face("OPTConfig", "OPTForCausalLM", padded_text(seed), dtype, seed, **sizes)


def bloom(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Attention biased by distance, made from the attention mask; a norm behind the embedding; tied output."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return hugging_face("BloomConfig", "BloomForCausalLM", padded_text(seed), dtype, seed, **sizes, **quiet)


def falcon(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """One head of keys and values fused behind all those of queries, attention and MLP side by side."""
    sizes = {**SIZES, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return hugging_face("FalconConfig", "FalconForCausalLM", padded_text(seed), dtype, seed, **sizes, **quiet)


def phi(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """One norm for attention and MLP side by side; rotary on half of each head; biases everywhere."""
    sizes = {**SIZES, "intermediate_size": 64, "partial_rotary_factor": 0.5}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    return hugging_face("PhiConfig", "PhiForCausalLM", prompted_text(seed), dtype, seed, **sizes, **quiet)


MIXTRAL: dict[str, Any] = {
    **GROUPED,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}


def mixtral(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Four experts, two for each token, run as one product a token; and the loss that balances them."""
    sizes = {**MIXTRAL, "experts_implementation": "batched_mm"}
    return hugging_face("MixtralConfig", "MixtralForCausalLM", padded_text(seed), dtype, seed, **sizes)


def mixtral_grouped(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """The same with tokens sorted by expert, as transformers runs it unless told otherwise. Not in float64."""
    return hugging_face("MixtralConfig", "MixtralForCausalLM", padded_text(seed), dtype, seed, **MIXTRAL)


def mixtral_loop(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """The same with a loop over the experts that were chosen: its shapes depend on values."""
    sizes = {**MIXTRAL, "experts_implementation": "eager"}
    return hugging_face("MixtralConfig", "MixtralForCausalLM", padded_text(seed), dtype, seed, **sizes)


def qwen2_moe(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Small experts beside one that all tokens share."""
    sizes = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "experts_implementation": "batched_mm"}
    return hugging_face("Qwen2MoeConfig", "Qwen2MoeForCausalLM", padded_text(seed), dtype, seed, **sizes)


def qwen3_moe(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Experts alone, weights of the chosen ones normalised, with the loss that balances them; grouped, not in float64."""
    sizes = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"norm_topk_prob": True, "output_router_logits": True}
    return hugging_face("Qwen3MoeConfig", "Qwen3MoeForCausalLM", prompted_text(seed), dtype, seed, **sizes)


def mamba(dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """A state-space model: a causal depthwise convolution and a scan written as a loop over the tokens."""
    text = {name: x[:, :6].contiguous() for name, x in prompted_text(seed).items()}
    text["labels"] = text["input_ids"].masked_fill(torch.arange(6) < torch.arange(8)[:, None] - 3, -100)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
    return hugging_face("MambaConfig", "MambaForCausalLM", text, dtype, seed, **sizes, time_step_rank=2)


DECODERS = {
    model.__name__: model
    for model in (
        llama, mistral, qwen2, qwen3, gemma, gpt2, gpt_neox, opt, bloom, falcon, phi, mixtral, mixtral_grouped,
        mixtral_loop, qwen2_moe, qwen3_moe, mamba,
    )
}  # fmt: skip
