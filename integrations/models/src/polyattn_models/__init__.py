"""What are a Hugging Face model's layers? Its `config.json`, read as the model's own code reads it."""

from __future__ import annotations

from collections.abc import Collection

from polyattn import LayerSpec
from polyattn.errors import ConfigError, SpecError, nearest

from polyattn_models.config import Config, Source, read_config, read_values, text_config
from polyattn_models.known import check_fields, warn_of_absent
from polyattn_models.layers import Layer, ModelLayers, Reader, Towers, model_of
from polyattn_models.multimodal import READERS as WITH_TOWERS
from polyattn_models.multimodal import text_part, towers
from polyattn_models.outside import outside_reader
from polyattn_models.quantization import (
    cache_dtype_of,
    cache_scales,
    is_cache_scale,
    weights_quantized,
)
from polyattn_models.recurrent import READERS as RECURRENT
from polyattn_models.unknown import why_unknown

__all__ = [
    "READERS",
    "Config",
    "Layer",
    "ModelLayers",
    "Reader",
    "Towers",
    "cache_dtype_of",
    "cache_scales",
    "is_cache_scale",
    "layer_specs",
    "model_layers",
    "read_config",
    "text_config",
    "weights_quantized",
]

READERS: dict[str, Reader] = {**RECURRENT, **WITH_TOWERS}
"""The reader of each `model_type` that is known."""


def layer_specs(
    config: Source,
    *,
    assume: str | None = None,
    ignore: Collection[str] = (),
    strict: bool = True,
    kv_cache_dtype: str | None = None,
) -> list[LayerSpec]:
    """Return the specs of the layers that a model serves text with, in order.

    `config` is a mapping, a config object (`to_dict`), or the path of a `config.json` or of its
    directory. One without a dtype is read as bfloat16.

    - `assume`: the `model_type` to read it as.
    - `ignore`: fields that are known not to change attention.
    - `strict` False: warn of a field that isn't understood (logger `polyattn`) instead of refusing it.
    - `kv_cache_dtype`: what the caches hold; `"auto"` and None: what the checkpoint asks for, else the
      model's dtype. `cache_scales` reads the checkpoint's scales.

    Raises `ConfigError`, among others where a layer can't be served: `model_layers` has those, and the
    towers of images.
    """
    return model_layers(
        config, assume=assume, ignore=ignore, strict=strict, kv_cache_dtype=kv_cache_dtype
    ).specs


def model_layers(
    config: Source,
    *,
    assume: str | None = None,
    ignore: Collection[str] = (),
    strict: bool = True,
    kv_cache_dtype: str | None = None,
) -> ModelLayers:
    """Return every layer of every tower of a model, those that can't be served included.

    Arguments as `layer_specs`. Raises `ConfigError` for what isn't understood.
    """
    values, source = read_values(config)
    stated = values.get("model_type")
    model = assume or stated
    reader = None if model is None else READERS.get(model) or outside_reader(model)
    if reader is None and assume is not None:
        raise ConfigError(f"assume={assume!r} is no model type{nearest(assume, READERS)}")
    if reader is None or model is None:
        raise ConfigError(f"{source}: {why_unknown(values, READERS)}")
    cfg = Config(values, source, model)
    warn_of_absent(values, ignore, source)
    if assume is not None and assume != stated and text_part(values) is not None:
        reader = towers(assume)  # a wrapper of another type, around a text tower of this one
        cfg.read.update(values)
    try:
        layers = reader(cfg)
        check_fields(cfg, assume is not None, ignore, strict)
        if kv_cache_dtype in (None, "auto"):
            return model_of(source, model, layers, cache_dtype_of(cfg))
    except SpecError as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        return model_of(source, model, layers, kv_cache_dtype)
    except SpecError as error:  # of the argument, which no file says
        raise ConfigError(str(error)) from error
