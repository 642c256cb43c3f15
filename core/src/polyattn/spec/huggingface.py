"""Reads a Hugging Face `config.json` into one `LayerSpec` a layer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import ConfigError, SpecError
from polyattn.spec.kinds import AttentionKind, Role
from polyattn.spec.layer import LatentSpec, LayerSpec, RecurrentSpec

ENCODER_ONLY = {
    "albert", "bert", "camembert", "deberta", "distilbert", "electra", "esm", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta",
}  # fmt: skip
INEXPRESSIBLE = {"t5", "mt5", "umt5", "longt5", "deberta", "deberta-v2"}


class Config:
    """A config whose missing fields are errors that name the field and the file."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` that is there and not null."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return default

    def need(self, *names: str) -> int:
        """Return a positive integer field under the first of its `names` that is there."""
        value = self.get(*names)
        if value is None:
            raise ConfigError(
                f"{self.source}: lacks the field {names[0]!r}"
                + (f" (or {', '.join(map(repr, names[1:]))})" if names[1:] else "")
            )
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.source}: {names[0]}={value!r} must be a positive integer")
        return value


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | object) -> Config:
    """Return the config behind a mapping, a config object, a file or a directory."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no such file; give a config.json or its directory"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not JSON, or truncated: {error}") from error
        except OSError as error:
            raise ConfigError(f"{path}: can't be read: {error}") from error
        source = str(path)
    else:
        values = config.to_dict() if hasattr(config, "to_dict") else config
        source = "config"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: must be a JSON object, not {type(values).__name__}")
    text = values.get("text_config")
    if isinstance(text, Mapping) and "num_hidden_layers" not in values:
        values = {**values, **text}
    return Config(values, source)


def layer_specs(config: Mapping[str, Any] | str | os.PathLike[str] | object) -> list[LayerSpec]:
    """Return the spec of every layer of the model, in order. Raises `ConfigError`."""
    cfg = read_config(config)
    model = str(cfg.get("model_type", default=""))
    if model in INEXPRESSIBLE:
        raise ConfigError(
            f"{cfg.source}: model_type={model!r} adds a learned relative-position bias to its "
            "logits, which no LayerSpec can state; such a model can't be served"
        )
    if cfg.get("encoder_layers") and cfg.get("decoder_layers"):
        build: Callable[[Config], list[LayerSpec]] = _encoder_decoder
    else:
        build = _stack
    try:
        return build(cfg)
    except SpecError as error:
        raise ConfigError(f"{cfg.source}: {error}") from error


def _dtype(cfg: Config) -> str:
    return str(cfg.get("torch_dtype", "dtype", default="bfloat16")).removeprefix("torch.")


def _attention(cfg: Config, **overrides: Any) -> LayerSpec:
    """The plain attention layer of this model, before what a layer's type changes."""
    model = str(cfg.get("model_type", default=""))
    heads = cfg.need("num_attention_heads", "n_head", "num_heads")
    kv_heads = cfg.get("num_key_value_heads", "num_kv_heads", default=heads)
    if model == "falcon" and not cfg.get("new_decoder_architecture"):
        kv_heads = 1 if cfg.get("multi_query") else heads
    head_size = cfg.get("head_dim") or cfg.need("hidden_size", "n_embd", "d_model") // heads
    query_scalar = cfg.get("query_pre_attn_scalar")
    encoder_only = model in ENCODER_ONLY and not cfg.get("is_decoder")
    values: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "dtype": _dtype(cfg),
        "scale": float(query_scalar) ** -0.5 if query_scalar else 0.0,
        "logit_soft_cap": cfg.get("attn_logit_softcapping"),
        "alibi": model == "bloom" or bool(cfg.get("alibi")),
        "learned_sinks": model == "gpt_oss",
    }
    if encoder_only:
        values |= {"role": Role.ENCODER_ONLY, "causal": False}
    return LayerSpec(**(values | overrides))


def _latent_attention(cfg: Config) -> LayerSpec:
    nope, rope = cfg.need("qk_nope_head_dim"), cfg.need("qk_rope_head_dim")
    topk = cfg.get("index_topk")
    heads = cfg.need("num_attention_heads")
    return LayerSpec(
        kind=AttentionKind.SPARSE_MLA if topk else AttentionKind.MLA,
        num_heads=heads,
        head_size=nope + rope,
        v_head_size=cfg.need("v_head_dim"),
        dtype=_dtype(cfg),
        latent=LatentSpec(
            rank=cfg.need("kv_lora_rank"),
            rope_head_size=rope,
            topk=topk,
            index_heads=cfg.get("index_n_heads", default=0),
            index_head_size=cfg.get("index_head_dim", default=0),
        ),
    )


def _mamba1(cfg: Config) -> LayerSpec:
    expand = cfg.get("mamba_expand", "expand", default=2)
    channels = cfg.get("intermediate_size") if cfg.get("model_type") == "mamba" else None
    return LayerSpec(
        kind=AttentionKind.MAMBA1,
        num_heads=channels or expand * cfg.need("hidden_size"),
        head_size=1,
        dtype=_dtype(cfg),
        recurrent=RecurrentSpec(
            state_size=cfg.need("mamba_d_state", "state_size"),
            conv_width=cfg.need("mamba_d_conv", "conv_kernel"),
            activation="silu",
        ),
    )


def _mamba2(cfg: Config) -> LayerSpec:
    groups = cfg.get("n_groups", "mamba_n_groups", default=1)
    return LayerSpec(
        kind=AttentionKind.MAMBA2,
        num_heads=cfg.need("mamba_n_heads", "num_heads"),
        num_kv_heads=groups,
        head_size=cfg.need("mamba_d_head", "head_dim"),
        dtype=_dtype(cfg),
        recurrent=RecurrentSpec(
            state_size=cfg.need("mamba_d_state", "state_size"),
            conv_width=cfg.need("mamba_d_conv", "conv_kernel"),
            activation="silu",
        ),
    )


def _linear(cfg: Config) -> LayerSpec:
    if cfg.get("linear_key_head_dim"):
        return LayerSpec(
            kind=AttentionKind.GDN,
            num_heads=cfg.need("linear_num_value_heads"),
            num_kv_heads=cfg.need("linear_num_key_heads"),
            head_size=cfg.need("linear_key_head_dim"),
            v_head_size=cfg.need("linear_value_head_dim"),
            dtype=_dtype(cfg),
            recurrent=RecurrentSpec(
                state_size=cfg.need("linear_key_head_dim"),
                conv_width=cfg.need("linear_conv_kernel_dim"),
                activation="silu",
                qk_norm=True,
            ),
        )
    heads = cfg.need("num_attention_heads")
    size = cfg.get("head_dim") or cfg.need("hidden_size") // heads
    return LayerSpec(
        kind=AttentionKind.LINEAR,
        num_heads=heads,
        head_size=size,
        scale=1.0,
        dtype=_dtype(cfg),
        recurrent=RecurrentSpec(state_size=size),
    )


def _short_conv(cfg: Config) -> LayerSpec:
    return LayerSpec(
        kind=AttentionKind.SHORT_CONV,
        num_heads=cfg.need("conv_dim", "hidden_size"),
        head_size=1,
        dtype=_dtype(cfg),
        recurrent=RecurrentSpec(conv_width=cfg.need("conv_L_cache")),
    )


def _sliding(cfg: Config) -> LayerSpec:
    return _attention(cfg, sliding_window=cfg.need("sliding_window"))


def _chunked(cfg: Config) -> LayerSpec:
    return _attention(cfg, chunk_size=cfg.need("attention_chunk_size"))


LAYER_TYPES: dict[str, Callable[[Config], LayerSpec]] = {
    "full_attention": _attention,
    "attention": _attention,
    "sliding_attention": _sliding,
    "chunked_attention": _chunked,
    "linear_attention": _linear,
    "conv": _short_conv,
    "mamba": _mamba1,
    "mamba2": _mamba2,
}


def _stack(cfg: Config) -> list[LayerSpec]:
    count = cfg.need("num_hidden_layers", "n_layer", "num_layers")
    return [_layer(cfg, kind) for kind in _layer_types(cfg, count)]


def _layer(cfg: Config, kind: str) -> LayerSpec:
    if kind == "latent":
        return _latent_attention(cfg)
    return LAYER_TYPES[kind](cfg)


def _layer_types(cfg: Config, count: int) -> list[str]:
    model = str(cfg.get("model_type", default=""))
    listed = cfg.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list):
            raise ConfigError(f"{cfg.source}: layer_types={listed!r} must be a list of names")
        if len(listed) != count:
            raise ConfigError(
                f"{cfg.source}: layer_types has {len(listed)} entries, the model {count} layers"
            )
        for index, kind in enumerate(listed):
            if kind not in LAYER_TYPES:
                raise ConfigError(
                    f"{cfg.source}: layer_types[{index}]={kind!r} is unknown; "
                    f"known: {', '.join(sorted(LAYER_TYPES))}"
                )
        return list(listed)
    if model in ("mamba", "mamba2"):
        return [model] * count
    if cfg.get("kv_lora_rank"):
        return ["latent"] * count
    if cfg.get("attn_layer_period"):
        period, offset = cfg.need("attn_layer_period"), cfg.get("attn_layer_offset", default=0)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    windowed = cfg.get("sliding_window") and cfg.get("use_sliding_window", default=True)
    return ["sliding_attention" if windowed else "full_attention"] * count


def _encoder_decoder(cfg: Config) -> list[LayerSpec]:
    """Encoder layers, then each decoder layer's self- and cross-attention (Whisper, BART)."""
    width = cfg.need("d_model", "hidden_size")

    def spec(heads: int, role: Role) -> LayerSpec:
        return LayerSpec(
            num_heads=heads,
            head_size=width // heads,
            dtype=_dtype(cfg),
            role=role,
            causal=role is Role.DECODER,
        )

    encoder = spec(cfg.need("encoder_attention_heads"), Role.ENCODER)
    heads = cfg.need("decoder_attention_heads")
    decoder = [spec(heads, Role.DECODER), spec(heads, Role.CROSS)]
    return [encoder] * cfg.need("encoder_layers") + decoder * cfg.need("decoder_layers")
