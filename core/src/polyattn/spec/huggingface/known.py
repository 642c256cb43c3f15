"""Is every field of a config understood? One that isn't may change attention, and is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from polyattn.errors import ConfigError
from polyattn.spec.huggingface.config import Config

HARMLESS = re.compile(
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
"""Fields that change no attention in any type: tokens, training, generation, MLPs, bookkeeping."""

QWEN3_5 = {
    "attn_output_gate": (True,), "output_gate_type": ("swish",), "mamba_ssm_dtype": ("float32",),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {"use_qk_norm": (True,)},
    "minimax_m2": {"use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
    "glm_moe_dsa": {
        "rope_interleave": (True,), "indexer_rope_interleave": (True,),
        "index_share_for_mtp_iteration": (True, False),
    },
    "qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5,
}  # fmt: skip
"""Fields of publishers' files that a type's class lacks, and the values that say what the type does."""


def check_fields(cfg: Config, assumed: bool, ignore: Collection[str] = ()) -> None:
    """Refuse what was neither read, nor belongs to the type, nor is harmless in every type."""
    unknown = [name for name in _unknown(cfg) if name not in ignore]
    if unknown:
        kind = cfg.model_type or "this model"
        raise ConfigError(
            f"{cfg.source}: "
            + ", ".join(f"{name}={cfg.values[name]!r:.60}" for name in unknown)
            + f" isn't known for model_type={kind!r} and may change its attention; where it "
            f"doesn't, say so: ignore={tuple(unknown)!r} ("
            + " ".join(f"--ignore {name}" for name in unknown)
            + ")"
            + (f" (read as {kind!r}, as was asked)" if assumed else "")
        )
    for part in cfg.parts:
        check_fields(part, False, ignore)


def _unknown(cfg: Config) -> Iterable[str]:
    for name, value in cfg.values.items():
        said = PUBLISHED.get(cfg.model_type, {}).get(name, ())
        known = name in cfg.read or name in cfg.cls.fields or value in said
        if not known and value is not None and not HARMLESS.fullmatch(name):
            yield name
