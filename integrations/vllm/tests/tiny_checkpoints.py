"""Tiny checkpoints with random weights, in sizes that vLLM's own kernels take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "qwen3": {},
    "mellum": {
        **SLIDING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "bloom": {"tie_word_embeddings": True},
    "hrm_text": {"num_key_value_heads": 4, "H_cycles": 1, "L_cycles": 1},
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
                # What a kernel of 16 bits can hold.
                weight.copy_(torch.randn_like(weight).bfloat16())
            elif "embeddings_layernorm" in label:  # undoes how small a tied embedding is
                weight.mul_(0.1)
            elif weight.dim() > 1:
                # A tied embedding as large as the rest says its own token again.
                small = MODELS[name].get("tie_word_embeddings") and "embed" in label
                weight.normal_(0, 0.02 if small else 0.2)
    model.save_pretrained(folder / name)
    words = models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", unk_token="w0"
    )
    tokenizer.save_pretrained(folder / name)
    return folder / name


def save_head(method: str, folder: Path) -> Path:
    """Write the checkpoint of "llama"'s EAGLE or EAGLE-3 head: a layer after what joins its inputs."""
    path, width = save("llama", folder / method, num_hidden_layers=1), SIZES["hidden_size"]
    found = load_file(path / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in found.items()}
    if method == "eagle":  # no norms before its layer and at its end, and the model's own lm_head
        for name in ("layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"):
            del weights[name]
        weights["fc.weight"] = _drawn(width, 2 * width)
    else:  # the layer's inputs are a token and the states of two of the model's layers
        for name in ("q_proj", "k_proj", "v_proj"):
            name = f"layers.0.self_attn.{name}.weight"
            weights[name] = _drawn(len(weights[name]), 2 * width)
        weights |= {
            "fc.weight": _drawn(width, 2 * width),
            "layers.0.hidden_norm.weight": torch.ones(width),
        }
        names = {"architectures": ["LlamaForCausalLMEagle3"], "num_aux_hidden_states": 2}
        _change(path, **names, eagle_aux_hidden_state_layer_ids=[0, 1])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def save_with_mtp(name: str, folder: Path) -> Path:
    """Write the checkpoint of a model of two layers and one that predicts another token (MTP)."""
    path = save(name, folder / "mtp", num_hidden_layers=3)
    width, last = SIZES["hidden_size"], "model.layers.2"
    weights = load_file(path / "model.safetensors")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{last}.{norm}.weight"] = torch.ones(width)
    weights[f"{last}.eh_proj.weight"] = _drawn(width, 2 * width)
    weights[f"{last}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{last}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    _change(path, num_hidden_layers=2, num_nextn_predict_layers=1)
    return path


def save_dflash(folder: Path) -> Path:
    """Write the checkpoint of a DFlash drafter of "qwen3": tokens that it drafts see one another."""
    path = save("qwen3", folder / "dflash", num_hidden_layers=1)
    how = {"target_layer_ids": [0, 1], "mask_token_id": 2}
    _change(path, architectures=["DFlashDraftModel"], dflash_config=how, block_size=4)
    return path


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.2


def _change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
