"""Tiny models of every type that transformers can build: small sizes that differ from each other."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "intermediate_size": 40, "vocab_size": 64, "sliding_window": 5,
    "attention_chunk_size": 6, "max_position_embeddings": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "decoder_layers": 2,
    "encoder_layers": 3, "decoder_attention_heads": 4, "encoder_attention_heads": 6,
    "decoder_ffn_dim": 40, "encoder_ffn_dim": 40, "d_model": 96, "d_ff": 40, "d_kv": 16,
    "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2, "ffn_dim": 40, "ffn_hidden_size": 40,
    "word_embed_proj_dim": 96, "n_positions": 64, "rotary_dim": 8, "n_inner": 40,
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "index_topk": 4, "index_n_heads": 3, "index_head_dim": 12, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "local_attention": 6, "state_size": 6, "expand": 2,
    "mamba_d_state": 6, "mamba_chunk_size": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 2, "mamba_expand": 2, "mamba_num_heads": 8, "mamba_head_dim": 24,
    "ssm_state_size": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 10, "linear_value_head_dim": 14, "block_size": 8, "lru_width": 96,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 8,
    "n_embd": 96, "n_head": 4, "n_layer": 4, "image_size": 16, "patch_size": 8, "window_size": 4,
    "num_global_key_value_heads": 2, "global_head_dim": 24, "num_mem_blocks": 1,
    "max_source_positions": 12, "max_target_positions": 64, "num_mel_bins": 8, "max_seq_len": 64,
    "projection_dim": 16, "mamba_dt_rank": 4, "time_step_rank": 4, "conv_L_cache": 3,
    "conv_kernel": 4, "add_cross_attention": False, "vision_output_dim": 16,
    "intermediate_layers_indices": [0, 1], "depth": 2, "embed_dim": 32, "out_hidden_size": 96,
    "num_global_layers": 1, "supported_aspect_ratios": [[1, 1]], "rotary_pct": 0.5,
    "num_nextn_predict_layers": 0, "moe_layer_freq": 1, "cross_attention_layers": [1],
}  # fmt: skip

MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 4, 6]}
PARTIAL_MROPE = MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
DRAFTING = {"text_config": {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": False,
}}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 24, "n_groups": 2, "chunk_size": 8},
    "bamba": {"mamba_d_head": 24, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"mamba_d_head": 24,
                         "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "zamba2": {"mamba_headdim": 24, "n_mamba_heads": 8, "mamba_ngroups": 2, "num_hidden_layers": 4,
               "chunk_size": 8,
               "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba": {"n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "n_groups": 2,
                   "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "phi3": {"original_max_position_embeddings": 32},
    "phi4_multimodal": {"original_max_position_embeddings": 32},
    "mimo_v2_flash": {"head_dim": 24},
    "mistral_large4_text": {
        "kv_source_layers": [0, 1, 0, 3], "no_rope_layers": [1, 0, 1, 1],
        "indexer_types": ["full", "full", "shared", "shared"],
    },
    "gemma4_assistant": DRAFTING, "gemma4_unified_assistant": DRAFTING,
    "moshi": {"sliding_window": 64},
    "hunyuan_v1_dense": {"rope_parameters": {
        "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "hrm_text": {"prefix_lm": False, "num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 1},
    "openai-gpt": {"n_positions": 64},
    "gemma4_text": {"global_head_dim": 24},
    "gemma4_unified_text": {"global_head_dim": 24, "attention_k_eq_v": True,
                            "num_global_key_value_heads": 1},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": None, "sliding_attention": MROPE},
        "layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 3, "rotary_dim": 16,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 12, "hc_lowrank": 8,
        "indexer_budget": 8, "indexer_compress_ratio": 4, "rope_parameters": PARTIAL_MROPE,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.5, "index_topk": 3,
        "index_head_dim": 20,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["sliding_attention", "compressed_sparse_attention",
                        "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["moe"] * 4, "o_groups": 2, "o_lora_rank": 16,
    },
    "dots3_note_text": {
        "head_dim": 24, "sliding_window": 5,
        "layer_types": [
            "indexed_attention", "full_attention", "sliding_attention", "indexed_attention",
        ],
        "per_layer_config": {2: {
            "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 16, "kv_lora_rank": 28,
            "head_dim": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 18,
        }},
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 96, "adapter_out_dim": 96,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 96, "adapter_out_dim": 96},
    "step3p5": {
        "num_sliding_attention_heads": 8, "share_expert_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "trocr": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 5},
    "qwen3_5_text": {"rope_parameters": PARTIAL_MROPE},
    "qwen3_5_moe_text": {"rope_parameters": PARTIAL_MROPE},
    "helium": {"head_dim": 24},
    "kimi_linear": {"linear_num_heads": 3, "linear_head_dim": 12},
    "glm5_next_text": {
        "index_kpool": 4, "qk_rope_head_dim": 0, "linear_num_heads": 2, "linear_head_dim": 16,
        "index_topk": 8, "layer_types": ["linear_attention"] + ["indexed_attention"] * 3,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    **{name: {"rope_parameters": MROPE | {"mrope_section": [6, 4, 2]}}
       for name in ("glm4v_text", "qwen2_5_omni_text", "qwen3_omni_moe_text")},
    **{name: {"rope_parameters": MROPE | {"mrope_section": [4, 3, 1]}, "head_dim": 16}
       for name in ("glm_ocr_text", "paddleocr_vl_text", "cosmos3_edge_text")},
    "glm4v_moe_text": {"rope_parameters": MROPE | {
        "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.5}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 4},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": {"base_channels": 32}},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen3_vl_text": {"rope_parameters": MROPE | {"mrope_section": [4, 2, 2]}},
    "qwen3_vl_moe_text": {"rope_parameters": MROPE | {"mrope_section": [4, 2, 2]}},
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 3},
    "modernbert-decoder": {"local_attention": 6},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [40] * 6,
                     "activation_sparsity_pattern": [0.0] * 6,
                     "layer_types": ["sliding_attention", "full_attention"] * 3},
}  # fmt: skip


def class_fields(cls: type) -> set[str]:
    """Return the field names of a config class and the aliases that it maps to them."""
    own = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return own | set(getattr(cls, "attribute_map", {}))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a tiny config of the type; its sub-configs are tiny as well."""
    cls = CONFIG_MAPPING[model_type]
    return (
        cls(**tiny_values(cls), **changes) if not changes else cls(**(tiny_values(cls) | changes))
    )


def tiny_values(cls: Any) -> dict[str, Any]:
    fields, aliases = class_fields(cls), getattr(cls, "attribute_map", {})
    values = {name: size for name, size in SIZES.items() if name in fields and name not in aliases}
    for alias, name in aliases.items():
        if alias in SIZES and name not in SIZES:
            values[name] = SIZES[alias]
    if "kv_lora_rank" in fields:  # each head has its own key, expanded from the latent
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name, sub in (getattr(cls, "sub_configs", None) or {}).items():
        if hasattr(sub, "model_type") and sub.model_type:
            values[name] = tiny_values(sub)
        elif sub is AutoConfig and (kind := _default_type(cls, name)):
            values[name] = {"model_type": kind} | tiny_values(CONFIG_MAPPING[kind])
    return values | SPECIAL.get(cls.model_type, {})


def _default_type(cls: Any, name: str) -> str | None:
    """Return the type that a config has for one of its parts unless it is told."""
    with contextlib.suppress(Exception):  # some have none
        return getattr(cls(), name).model_type
    return None


BY_NAME = {
    "emu3_text_model": "Emu3ForCausalLM", "siglip_text_model": "SiglipTextModel",
    "mllama_text_model": "MllamaForCausalLM", "step3p5": "Step3p7TextModel",
    "mllama_vision_model": "MllamaVisionModel", "idefics3_vision": "Idefics3VisionTransformer",
    "granite4_vision_text": "Granite4VisionTextModel", "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
    "paddleocr_vl_text": "models.paddleocr_vl.modeling_paddleocr_vl.PaddleOCRTextModel",
    "voxtral_realtime_text":
        "models.voxtral_realtime.modeling_voxtral_realtime.VoxtralRealtimeTextModel",
}  # fmt: skip
"""Types that transformers has no automatic class for."""


class _Named:
    def __init__(self, cls: Any):
        self.cls = cls

    def from_config(self, config: Any) -> Any:
        return self.cls(config)


@contextlib.contextmanager
def at_most(parameters: int, name: str) -> Iterator[None]:
    """Raise `MemoryError` at the parameter of a module that makes too many, before it is written to."""
    size = 0

    def count(module: torch.nn.Module, name_: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal size
        size += 0 if parameter is None else parameter.numel()
        if size > parameters:
            raise MemoryError(f"{name} has more than {parameters} parameters")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def build(config: Any, autos: Sequence[Any] = ()) -> torch.nn.Module:
    """Return the model of a config with random weights, in float32.

    `autos`: which automatic classes to try. Raises `MemoryError` where it isn't tiny.
    """
    torch.manual_seed(0)
    if not autos:
        autos = [transformers.AutoModelForCausalLM, transformers.AutoModel]
        if getattr(config, "is_encoder_decoder", False):
            autos = autos[1:]
    named = BY_NAME.get(config.model_type)
    if named:
        autos = [_Named(operator.attrgetter(named)(transformers))]
    for auto in autos:
        try:
            with at_most(20_000_000, type(config).__name__):
                model = auto.from_config(config).eval()
            for name, parameter in model.named_parameters():
                if name.endswith("q_norm.weight"):  # ones show no norm's weight
                    torch.nn.init.normal_(parameter)
            return model  # type: ignore[no-any-return]
        except ValueError as error:
            if "Unrecognized configuration" not in str(error):
                raise
    raise ValueError(f"transformers has no model for {type(config).__name__}")


def inputs_of(model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Return what the model's forward takes."""
    kind = config.model_type
    tokens = torch.randint(3, 60, (1, 23))
    if kind in ("clip", "siglip"):
        size = config.vision_config.image_size
        return {"input_ids": tokens, "pixel_values": torch.randn(1, 3, size, size)}
    if kind in ("idefics3_vision", "smolvlm_vision"):
        return {"pixel_values": torch.randn(1, 3, config.image_size, config.image_size)}
    if kind == "mllama_vision_model":
        tiles, size = config.max_num_tiles, config.image_size
        return {
            "pixel_values": torch.randn(1, 1, tiles, 3, size, size),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
        }
    if kind == "trocr":
        return {"input_ids": tokens, "encoder_hidden_states": torch.randn(1, 7, 96)}
    if kind in ("kimi_linear", "bailing_hybrid"):
        return {"input_ids": tokens, "use_cache": False}
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(1, 3, height, width)}
    if kind == "whisper":
        frames = config.max_source_positions * 2
        features = torch.randn(1, config.num_mel_bins, frames)
        return {"input_features": features, "decoder_input_ids": tokens, "use_cache": False}
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        features = torch.randn(
            1, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 12)
        )
        return {"input_features": features}
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :11], "use_cache": False}
    if kind == "voxtral_realtime_text":
        return {"input_ids": tokens, "t_cond": torch.randn(1, 1, config.hidden_size)}
    if kind == "mllama_text_model":
        return {"input_ids": tokens, "cross_attention_states": torch.randn(1, 7, 96)}
    return {"input_ids": tokens}
