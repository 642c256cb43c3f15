"""Tiny checkpoints with random weights, in sizes that vLLM's own kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SLIDING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "gemma2": {
        **SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "topk_method": "noaux_tc",
    },
    "bert": {"num_key_value_heads": 4, "type_vocab_size": 2},
}  # fmt: skip


def save(name: str, folder: Path, **changed: Any) -> Path:
    """Write the checkpoint of a model, its weights such that tokens differ. Returns its path.

    `changed` are fields of its config that differ from `SIZES` and `MODELS`.
    """
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name], **changed})
    kind = AutoModel if name == "bert" else AutoModelForCausalLM
    model = kind.from_config(config).eval().float()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if "sinks" in label:
                weight.normal_()
            elif weight.dim() > 1:
                # A tied embedding as large as the rest says its own token again.
                weight.normal_(0, 0.02 if name == "gemma2" and "embed" in label else 0.2)
    model.save_pretrained(folder / name)
    words = models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", unk_token="w0"
    )
    tokenizer.save_pretrained(folder / name)
    return folder / name
