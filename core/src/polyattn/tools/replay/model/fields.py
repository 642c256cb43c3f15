"""What does a model's config say beyond its attention? The fields that a whole decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.errors import ConfigError, nearest
from polyattn.spec.models import model_reader

LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
PLAIN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": PLAIN | {"vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": PLAIN | {"intermediate_size": 22016},
    "qwen3": PLAIN | {"intermediate_size": 22016, "attention_bias": False},
    "qwen3_moe": PLAIN | {
        "hidden_size": 2048, "intermediate_size": 6144, "attention_bias": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": PLAIN | {
        "vocab_size": 32000, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "phi3": PLAIN | {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
    },
    "olmo2": PLAIN | {
        "vocab_size": 50304, "intermediate_size": 11008, "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    "glm4": PLAIN | {
        "vocab_size": 151552, "intermediate_size": 13696, "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"vocab_size": 262208, "final_logit_softcapping": None},
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "hidden_act": "silu", "first_k_dense_replace": 3,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
        "attention_bias": False, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "mamba2": {
        "vocab_size": 32768, "hidden_size": 4096, "use_bias": False, "use_conv_bias": True,
        "residual_in_fp32": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    },
    "jamba": {
        "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "hidden_act": "silu",
        "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 256, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The fields of each type that is run whole, with the defaults of transformers' config classes."""

ONLY = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
}
"""Fields of the publisher's own code with the only value that transformers computes."""


class Fields:
    """A decoder's config: each field of its type, or of the type to `assume`, checked, or its default.

    Raises `ConfigError` for a type that isn't run whole, and for a field's value.
    """

    def __init__(self, source: object, assume: str | None = None):
        cfg = model_reader().text_config(source, assume)
        self.cfg, self.model_type = cfg, cfg.model_type
        if self.model_type not in DEFAULTS:
            raise ConfigError(
                f"{cfg.source}: model_type={self.model_type!r} isn't run with weights"
                f"{nearest(self.model_type, DEFAULTS)}; without --weights its layers are served"
            )
        self.defaults = DEFAULTS[self.model_type]
        for field, value in ONLY.get(self.model_type, {}).items():
            cfg.only(field, value)

    def value(self, name: str) -> Any:
        """Return a field as the file has it, null included, or its default."""
        return self.cfg.values[name] if self.cfg.given(name) else self.defaults[name]

    def size(self, name: str) -> int:
        """Return a positive integer."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.cfg.error(name, value, "must be a positive integer")
        return value

    def index(self, name: str) -> int:
        """Return 0 or a positive integer."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.cfg.error(name, value, "must be 0 or a positive integer")
        return value

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.value(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self.cfg.error(name, value, "must be a positive number")
        return float(value)

    def optional(self, name: str) -> float | None:
        """Return a positive number, or None where the field is null."""
        return None if self.value(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.cfg.error(name, value, "must be true or false")
        return value

    def choice(self, name: str, valid: Mapping[str, Any]) -> Any:
        """Return what a name stands for."""
        value = self.value(name)
        if not isinstance(value, str) or value not in valid:
            raise self.cfg.error(name, value, f"is unknown{nearest(str(value), valid)}")
        return valid[value]

    def below(self, name: str, limit: str) -> int:
        """Return a positive integer that is at most another field's."""
        value, most = self.size(name), self.size(limit)
        if value > most:
            raise self.cfg.error(name, value, f"must be at most {limit}={most}")
        return value
