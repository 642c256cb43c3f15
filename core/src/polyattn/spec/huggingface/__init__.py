"""What are a Hugging Face model's layers? Its `config.json`, read as the model's own code reads it."""

from __future__ import annotations

from collections.abc import Collection

from polyattn.errors import ConfigError, SpecError, nearest
from polyattn.spec.huggingface.config import Config, Source, read_config, read_values
from polyattn.spec.huggingface.known import check_fields
from polyattn.spec.huggingface.layers import Layer, ModelLayers, model_of
from polyattn.spec.huggingface.multimodal import READERS as WITH_TOWERS
from polyattn.spec.huggingface.quantization import check_cache_scheme
from polyattn.spec.huggingface.recurrent import READERS as RECURRENT
from polyattn.spec.layer import LayerSpec

__all__ = [
    "READERS",
    "Config",
    "Layer",
    "ModelLayers",
    "layer_specs",
    "model_layers",
    "read_config",
]

READERS = {**RECURRENT, **WITH_TOWERS}
"""The reader of each `model_type` that is known."""


def layer_specs(
    config: Source,
    *,
    assume: str | None = None,
    ignore: Collection[str] = (),
    kv_cache_dtype: str | None = None,
) -> list[LayerSpec]:
    """Return the specs of the layers that a model serves text with, in order.

    `config` is a mapping, a config object (`to_dict`), or the path of a `config.json` or of its
    directory. `assume`: read it as this type; `ignore`: fields that are known not to change
    attention; `kv_cache_dtype`: what the caches hold, whatever the checkpoint asks for. Raises
    `ConfigError`, among others where a layer can't be served: `model_layers` has those, and the towers
    of images.
    """
    return model_layers(config, assume=assume, ignore=ignore, kv_cache_dtype=kv_cache_dtype).specs


def model_layers(
    config: Source,
    *,
    assume: str | None = None,
    ignore: Collection[str] = (),
    kv_cache_dtype: str | None = None,
) -> ModelLayers:
    """Return every layer of every tower of a model, those that can't be served included.

    Arguments as `layer_specs`. Raises `ConfigError` for what isn't understood.
    """
    values, source = read_values(config)
    model = assume or values.get("model_type")
    if assume is not None and assume not in READERS:
        raise ConfigError(f"assume={assume!r} is no model type{nearest(assume, READERS)}")
    if model not in READERS:
        raise ConfigError(f"{source}: {_unknown(values.get('model_type'), values)}")
    cfg = Config(values, source, model)
    try:
        towers = READERS[model](cfg)
        check_fields(cfg, assume is not None, ignore)
        if kv_cache_dtype is None:
            check_cache_scheme(cfg)
        return model_of(source, model, towers, kv_cache_dtype or "auto")
    except SpecError as error:
        raise ConfigError(f"{source}: {error}") from error


def _unknown(model: object, values: object) -> str:
    """Return why a type is refused, what its fields look like, and how to say so."""
    guess = _lookalike(values)
    said = f"model_type={model!r} is unknown" if model else "lacks the field 'model_type'"
    if isinstance(model, str):
        said += nearest(model, READERS) if nearest(model, READERS).startswith("; did") else ""
    if guess is None:
        return f"{said}; its fields look like no type that is known"
    how = f"(assume={guess!r}, --assume {guess})"
    return f"{said}; its fields look like {guess!r}: where it is one, say so {how}"


LOOKALIKES = (
    ("index_topk", "deepseek_v32"), ("kv_lora_rank", "deepseek_v3"), ("encoder_layers", "bart"),
    ("linear_key_head_dim", "qwen3_next"), ("mamba_d_state", "jamba"), ("state_size", "mamba"),
    ("full_attention_interval", "qwen3_next"), ("layer_types", "qwen3"),
    ("sliding_window", "mistral"), ("num_key_value_heads", "llama"), ("rope_theta", "llama"),
    ("rotary_pct", "gpt_neox"), ("n_embd", "gpt2"), ("num_attention_heads", "llama"),
)  # fmt: skip
"""A telling field, and the type that it speaks for; the first one that a config has decides."""


def _lookalike(values: object) -> str | None:
    names = values if isinstance(values, Collection) else ()
    return next((model for name, model in LOOKALIKES if name in names), None)
