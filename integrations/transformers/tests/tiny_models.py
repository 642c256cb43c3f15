"""Tiny random models of many architectures, made from configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "gemma": {},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
    "gemma3_text": SLIDING,
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": 6},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "olmo3": SLIDING,
    "cohere": {},
    "cohere2": SLIDING,
    "glm4": {"partial_rotary_factor": 0.5},
    "stablelm": {},
    "starcoder2": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 6,
        "intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1,
    },
    "deepseek_v3": {
        **MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "smollm3": {},
    "ernie4_5": {},
    "exaone4": SLIDING,
    "nemotron": {},
    "helium": {},
}  # fmt: skip


def decoder(name: str) -> PreTrainedModel:
    """Return a decoder with random weights, large enough that tokens differ."""
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(name, **{**SIZES, **DECODERS[name]})
    config._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
            elif "sinks" in str(weight):
                weight.normal_()
    return model
