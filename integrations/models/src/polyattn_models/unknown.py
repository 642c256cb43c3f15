"""What can be said of a type that no reader knows? What its fields look like, and how to say so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from polyattn.errors import nearest, shown

from polyattn_models.encoders import READERS as ENCODERS
from polyattn_models.multimodal import TOWERS, text_part

LOOKALIKES = (
    ("index_topk", "deepseek_v32"), ("kv_lora_rank", "deepseek_v3"), ("encoder_layers", "bart"),
    ("linear_key_head_dim", "qwen3_next"), ("mamba_d_state", "jamba"), ("state_size", "mamba"),
    ("full_attention_interval", "qwen3_next"), ("layer_types", "qwen3"),
    ("sliding_window", "mistral"), ("num_key_value_heads", "llama"), ("rope_theta", "llama"),
    ("rotary_pct", "gpt_neox"), ("n_embd", "gpt2"), ("num_attention_heads", "llama"),
)  # fmt: skip
"""A telling field, and the type that it speaks for; the first one that a config has decides."""
ENCODER_NAME = re.compile(r".*(bert|encoder|embed|bidirec|vit\b|vision|clip|rerank|e5|gte).*", re.I)
ENCODER_CLASS = re.compile(
    r".*(Bert|MaskedLM|Encoder|Embedding|ImageClassification|SequenceClassification"
    r"|TokenClassification|QuestionAnswering).*"
)
ENCODER_FIELDS = (
    "type_vocab_size",
    "classifier_pooling",
    "image_size",
    "num_mel_bins",
    "mlm_probability",
)
WITH_ALIBI = ("bloom", "mpt")
EITHER = ("baichuan",)
"""Models of some sizes have ALiBi, of others a rotary embedding, and no field says which."""
ALIBI_NAME = re.compile(r".*(baichuan|refact|replit|btlm|mosaic|mpt|bloom|jina).*", re.I)
"""Names of models that have ALiBi without saying so in a field."""


def why_unknown(values: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return why a config is refused, what its fields look like, and how to say so."""
    model = values.get("model_type")
    said = f"model_type={model!r} is unknown" if model else "lacks the field 'model_type'"
    text = text_part(values)
    inner = text.get("model_type") if text is not None else None
    if isinstance(inner, str) and inner in TOWERS:
        return (
            f"{said}; its text_config is of type {inner!r}, which is known: if the rest "
            f"changes no text layer, confirm it: {_how(inner)}"
        )
    encoder, alibi = is_encoder(values), has_alibi(values)
    likely = [
        name for name in known if (name in ENCODERS) >= encoder and (name in WITH_ALIBI) >= alibi
    ]
    near = nearest(model, likely) if isinstance(model, str) and likely else ""
    said += near if near.startswith("; did") else ""
    guess = _lookalike(values, encoder, alibi)
    if guess is None:
        return f"{said}; its fields look like no type that is known"
    return f"{said}; its fields look like {guess!r}: if it is one, confirm it: {_how(guess)}"


def _how(model: str) -> str:
    return f"assume={model!r} (--assume {model})"


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Return whether a config speaks of a model that sees its text both ways."""
    classes = values.get("architectures")
    names = classes if isinstance(classes, list) else []
    return (
        values.get("is_causal") is False
        or bool(values.get("use_bidirectional_attention"))
        or any(values.get(name) is not None for name in ENCODER_FIELDS)
        or bool(ENCODER_NAME.fullmatch(str(values.get("model_type"))))
        or any(ENCODER_CLASS.fullmatch(str(name)) for name in names)
    )


def has_alibi(values: Mapping[str, Any]) -> bool:
    """Return whether a config speaks of a model with ALiBi."""
    part = values.get("attn_config")
    fields = {**part, **values} if isinstance(part, Mapping) else values
    return bool(ALIBI_NAME.fullmatch(str(values.get("model_type")))) or any(
        ("alibi" in str(name).lower() and value) or "alibi" in shown(value, 40).lower()
        for name, value in fields.items()
    )


def _lookalike(values: Mapping[str, Any], encoder: bool, alibi: bool) -> str | None:
    if values.get("model_type") in EITHER:
        return None
    rotated = any("rope" in str(name) or "rotary" in str(name) for name in values)
    if alibi or encoder:
        grouped = "num_key_value_heads" in values
        plain = "num_attention_heads" in values and not (rotated or grouped or (alibi and encoder))
        return ("bloom" if alibi else "bert") if plain else None
    return next((model for name, model in LOOKALIKES if name in values), None)
