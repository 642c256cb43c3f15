"""Configs that differ from a tiny one in one field: renamed, dropped, added or with another value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tiny import CONFIG_MAPPING, class_fields, tiny_values

NOT_TRIED = re.compile(
    r"""_.* | .*_token(_id|_ids|_index|_indices)? | .*_tokens | .*dropout.* | .*_pdrop | .*_dropout_prob
    | (layer_norm|norm|rms_norm)_(eps|epsilon) | .*layernorm_epsilon | initializer_.* | init_std
    | vocab_size.* | .*intermediate_size | hidden_act.* | activation(_function)? | mlp_.* | ffn_.*
    | .*expert.* | .*router.* | moe_.* | .*aux_loss.* | .*z_loss.* | norm_topk_prob | topk_group
    | n_group | topk_method | scoring_func | seq_aux | ep_size | score_function
    | use_cache | tie_.* | architectures | auto_map | transformers_version | dtype | torch_dtype
    | model_type | quantization_config | compression_config | name_or_path | attn_implementation
    | return_dict | output_(attentions|hidden_states|router_logits) | torchscript | use_bfloat16
    | pruned_heads | problem_type | id2label | label2id | num_labels | finetuning_task | task_.*
    | chunk_size_feed_forward | gradient_checkpointing | pretraining_tp | pad_to_multiple_of
    | bad_words_ids | num_beams?(_groups)? | do_sample | max_length | min_length | early_stopping
    | temperature | top_[kp] | typical_p | repetition_penalty | length_penalty | diversity_penalty
    | no_repeat_ngram_size | encoder_no_repeat_ngram_size | num_return_sequences | prefix
    | forced_decoder_ids | remove_invalid_values | exponential_decay_length_penalty | tf_legacy_loss
    | tokenizer_class | sep_token_id | cache_implementation | use_mamba_kernels
    | is_composition | is_encoder_decoder | add_final_layer_norm | classif.* | summary_.*
    | max_position_embeddings | language_model_only | fused_.* | .*_fusion
    | use_flash_attn.* | flash_attn.* | unsloth.* | .*_hash
    | projection_(dim|size) | num_image_tokens | vision_use_head | mm_tokens_per_image
    | (attention|attention_out|qkv|mlp|mamba_conv|mamba_proj|conv)_bias | use_(qkv_|conv_)?bias
    | (residual|skip|apply_residual)_.* | layernorm_.*_(alpha|beta) | postnorm | shared_.*
    | time_step_(floor|max|min|rank|scale|init_scheme) | rescale_prenorm_residual | rms_norm
    | pad_vocab_size_multiple | attention_softmax_in_fp32 | seq_length | n_ctx | n_positions
    | mamba_inner_layernorms | calc_logits_.* | block_(mlp|out|norm|use|auto|ff|ffn|multiple)_.*
    | conv_use_xavier_init | initial_context_length | swiglu_limit | .*layerdrop
    | num_nextn_predict_layers | mtp_.* | num_mtp_modules | use_mtp | .*routing.*
    | num_logits_to_keep | mlp_only_layers | final_logit_softcapping""",
    re.VERBOSE,
)
"""Fields around attention: another value builds another model, or takes long to build."""

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "num_attention_heads": [2, 8], "num_key_value_heads": [1, 4, None], "head_dim": [12, None],
    "hidden_size": [64], "sliding_window": [3, None, 64], "use_sliding_window": [True, False],
    "max_window_layers": [1, 3], "attention_chunk_size": [4], "num_hidden_layers": [3, 5],
    "rope_theta": [300.0], "partial_rotary_factor": [0.5, 0.25], "rotary_pct": [1.0, 0.25],
    "rotary_emb_base": [300], "rotary_dim": [4, None], "rope_local_base_freq": [300.0],
    "rope_scaling": [
        None, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, YARN,
        LLAMA3,
    ],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 700.0}, YARN],
    "query_pre_attn_scalar": [25], "attention_multiplier": [0.3], "attn_logit_softcapping": [7.0, None],
    "layer_types": [
        ["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2,
        ["linear_attention", "full_attention"] * 2, ["chunked_attention"] * 4,
    ],
    "sliding_window_pattern": [2, 3], "full_attention_interval": [2], "full_attn_idxs": [[0, 2]],
    "attn_layer_indices": [[0, 3]], "attn_layer_period": [2], "attn_layer_offset": [0],
    "block_types": [["recurrent", "attention"]], "hybrid_override_pattern": ["M*-M", "MM**"],
    "layers_block_type": [["linear_attention", "hybrid"] * 2, ["mamba", "attention", "mamba", "mamba"]],
    "no_rope_layers": [[1, 0, 1, 0]], "no_rope_layer_interval": [2], "local_attention": [4],
    "global_attn_every_n_layers": [2], "window_size": [3], "multi_query": [True, False],
    "new_decoder_architecture": [True, False], "num_kv_heads": [2], "alibi": [True, False],
    "is_decoder": [True, False], "is_causal": [True], "use_bidirectional_attention": [True, False],
    "position_embedding_type": ["relative_key", "rope", "rotary", "absolute"],
    "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True],
    "add_cross_attention": [True], "rope_interleave": [False], "index_topk": [3],
    "mamba_expand": [1, 3], "expand": [1], "mamba_d_state": [4], "state_size": [4],
    "conv_kernel": [3], "mamba_d_conv": [3], "n_groups": [1], "mamba_n_heads": [4],
    "attn_temperature_tuning": [False, True], "floor_scale": [4], "attn_scale": [0.3],
    "use_mem_rope": [True], "attention_head_dim": [12], "time_step_limit": [[0.0, 0.1]],
    "logit_scale": [0.3], "scale": [0.3], "attention_types": [[[["local", "global"], 2]]],
    "mamba_d_ssm": [96, 32], "attention_window_size": [3], "attn_type_list": [[0, 1, 1, 0]],
    "v_head_dim": [12, 24], "kv_lora_rank": [8], "qk_nope_head_dim": [8], "qk_rope_head_dim": [16],
    "q_lora_rank": [None], "linear_num_value_heads": [2], "linear_conv_kernel_dim": [3],
    "sliding_window_size": [3], "qk_layernorm": [True], "use_qk_norm": [True], "clip_qkv": [1.0],
    "hidden_act": ["relu"], "key_multiplier": [0.5], "encoder_attention_heads": [4],
    "decoder_attention_heads": [6], "encoder_layers": [1], "d_kv": [8], "conv_L_cache": [4],
    "linear_attn_config": [{"full_attn_layers": [2], "kda_layers": [1, 3, 4], "num_heads": 4,
                            "head_dim": 8, "short_conv_kernel_size": 4}],
    "original_max_position_embeddings": [16], "max_position_embeddings": [128],
    "attention_bias": [True], "dual_chunk_attention_config": [{"chunk_size": 4}], "use_nope": [True],
    "swa_num_key_value_heads": [1], "attn_window": [4], "kv_heads": [1], "attention_sink_size": [4],
}  # fmt: skip
"""What a field may be changed to; a field that a type doesn't have is one that is added."""


def alternatives(value: Any) -> list[Any]:
    """Return other values for a field that isn't listed."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 0.5 + 0.1]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    return []


def variations(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return what was done and the values of the config."""
    cls = CONFIG_MAPPING[model_type]
    values, names = tiny_values(cls), class_fields(cls)
    yield "hub form", values
    for name in values:
        if not NOT_TRIED.fullmatch(name):
            rest = {k: v for k, v in values.items() if k != name}
            yield f"{name} dropped", rest
            yield f"{name} renamed", rest | {f"{name}_x": values[name]}
            yield f"{name} renamed to attn", rest | {f"attn_{name}": values[name]}
    for name in sorted(set(VALUES) | {n for n in names if not NOT_TRIED.fullmatch(n)}):
        for other in VALUES.get(name, []) or alternatives(values.get(name, _default(cls, name))):
            if other != values.get(name, ...):
                yield f"{name}={other!r}", values | {name: other}


def _default(cls: Any, name: str) -> Any:
    return getattr(cls, name, None)
