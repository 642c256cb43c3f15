"""How does a config say its rotary embedding? In `rope_parameters`, or as older files do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from polyattn import RopeSpec
from polyattn.errors import finite

from polyattn_models.config import Config, unknown_choice

SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ALIASES = {"default": "none", "mrope": "none", "su": "longrope"}
KNOWN = {
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "attention_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "mrope_section",
    "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings", "finetuned", "alpha",
}  # fmt: skip


def parameters(cfg: Config, layer_type: str, default: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters of a layer type: its own where the config has one set per type."""
    value = cfg.get("rope_scaling") or cfg.get("rope_parameters") or default or {}
    if not isinstance(value, Mapping):
        raise cfg.error("rope_parameters", value, "must be a JSON object")
    if {"full_attention", "sliding_attention", layer_type} & set(value):
        value = value.get(layer_type) or {}
        if not isinstance(value, Mapping):
            raise cfg.error(f"rope_parameters.{layer_type}", value, "must be a JSON object")
    for name in value:
        if name not in KNOWN:
            raise cfg.error(
                f"rope_parameters.{name}",
                value[name],
                f"isn't understood; known: {', '.join(sorted(KNOWN))}",
            )
    return dict(value)


def nested_parameters(cfg: Config) -> None:
    """Refuse `rope_parameters` of a type that has one set per layer type, where they aren't so."""
    value, older = cfg.get("rope_parameters"), cfg.get("rope_scaling")
    if isinstance(older, Mapping) and "rope_type" not in older:
        raise cfg.error("rope_scaling", older, "must name its rope_type")
    if value and not (
        isinstance(value, Mapping) and {"full_attention", "sliding_attention"} & set(value)
    ):
        raise cfg.error("rope_parameters", value, "must have full_attention and sliding_attention")


def read_rope(
    cfg: Config,
    head_size: int,
    *,
    pairing: str = "neox",
    partial: float | None = None,
    layer_type: str = "full_attention",
    theta: float | None = None,
    default: Mapping[str, Any] | None = None,
    scaled: bool = True,
    sections: tuple[int, ...] | None = None,
    interleaved: bool = False,
    alpha: bool = False,
) -> RopeSpec:
    """Return the rotary embedding of a layer type.

    `partial` is the default of `partial_rotary_factor`, or None where the type always rotates
    whole heads; `theta` the base where the config has none; `default` stands for absent
    parameters; `scaled` False: `rope_scaling` speaks of other layer types alone; `sections` are
    those of a type with several axes, and `interleaved` how it lays them out; `alpha` whether "dynamic"
    may come with a fixed `alpha`, which raises the base once (Hunyuan).
    """
    params = parameters(cfg, layer_type, default) if scaled else {}
    stated = theta if theta is not None else cfg.number("rope_theta", cfg.cls.theta)
    base = _number(cfg, "rope_theta", params.get("rope_theta") or stated)
    factor = params.get("partial_rotary_factor")
    if factor is None:
        factor = cfg.number("partial_rotary_factor", partial)
    elif cfg.given("partial_rotary_factor"):
        cfg.only("partial_rotary_factor", factor)
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ("none", *SCALINGS):
        raise unknown_choice(cfg, "rope_type", kind, [*SCALINGS, *ALIASES])
    if partial is None and factor not in (None, 1.0) and kind != "proportional":
        raise cfg.error("partial_rotary_factor", factor, "isn't read by this type of model")
    size = head_size
    if factor is not None:
        size = int(head_size * _number(cfg, "partial_rotary_factor", factor))
    if params.get("alpha") is not None:
        kind, base = _stretched_base(cfg, params["alpha"], alpha, kind, base, size)
    scaling = _scaling(cfg, kind, params) if kind != "none" else {}
    if kind == "proportional":  # whole pairs turn; all of the head are paired
        size, scaling["exponent_size"] = size // 2 * 2, head_size
    if sections is None and "mrope_section" in params:
        raise cfg.error(
            "mrope_section", params["mrope_section"], "isn't read by this type of model"
        )
    return RopeSpec(
        pairing=pairing,
        rotary_size=size,
        base=base,
        sections=sections and _sections(cfg, params.get("mrope_section") or sections),
        sections_interleaved=interleaved,
        **scaling,
    )


def with_temperature(cfg: Config, rope: RopeSpec, params: Mapping[str, Any]) -> RopeSpec:
    """Return the rope with Mistral's temperature, `llama_4_scaling_beta`."""
    beta = params.get("llama_4_scaling_beta")
    if not beta:
        return rope
    if not isinstance(beta, (int, float)):
        raise cfg.error("rope_parameters.llama_4_scaling_beta", beta, "must be a number")
    return dataclasses.replace(
        rope, temperature=float(beta), temperature_length=rope.original_length
    )


def _stretched_base(
    cfg: Config, stretch: Any, read: bool, kind: str, base: float, size: int
) -> tuple[str, float]:
    """Return the scaling and the base of "dynamic" with a fixed `alpha`. Raises `ConfigError`."""
    if not read:
        raise cfg.error("rope_parameters.alpha", stretch, "isn't read by this type of model")
    if not stretch or kind != "dynamic":
        return kind, base
    if size <= 2:
        raise cfg.error("rope_parameters.alpha", stretch, f"can't stretch heads of {size} elements")
    power = size / (size - 2)
    return "none", base * _number(cfg, "rope_parameters.alpha", stretch) ** power


def _sections(cfg: Config, value: Any) -> tuple[int, ...]:
    listed = isinstance(value, (list, tuple))
    if not listed or any(type(size) is not int or size < 0 for size in value):
        raise cfg.error("rope_parameters.mrope_section", value, "must be a list of sizes")
    return tuple(value)


def _number(cfg: Config, name: str, value: Any) -> float:
    if not finite(value) or value <= 0:
        raise cfg.error(name, value, "must be a positive number")
    return float(value)


def _scaling(cfg: Config, kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `RopeSpec` takes for a scaling, its defaults as transformers has them."""

    def number(name: str, default: float | None = None) -> float:
        value = params.get(name)
        value = default if value is None else value
        return _number(cfg, f"rope_parameters.{name}", value)

    out: dict[str, Any] = {"scaling": kind}
    longest = cfg.integer("max_position_embeddings")
    original = params.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        original = cfg.get("original_max_position_embeddings") or original or longest
    if kind == "dynamic":
        original = longest
    if kind in ("llama3", "yarn", "longrope", "dynamic"):
        out["original_length"] = int(_number(cfg, "original_max_position_embeddings", original))
    if kind in ("linear", "dynamic", "llama3"):
        out["factor"] = number("factor")
    if kind == "proportional":
        out["factor"] = number("factor", 1.0)
    if kind == "llama3":
        out |= {name: number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind in ("yarn", "longrope"):
        stretch = None if longest is None else longest / out["original_length"]
        out["factor"] = number("factor", stretch)
        out["attention_factor"] = number(
            "attention_factor", _attention_factor(cfg, kind, out, params)
        )
    if kind == "yarn":
        out["beta_fast"], out["beta_slow"] = number("beta_fast", 32), number("beta_slow", 1)
        out["truncate"] = params.get("truncate", True)
    if kind == "longrope":
        for name in ("short", "long"):
            factors = params.get(f"{name}_factor")
            if not isinstance(factors, (list, tuple)):
                raise cfg.error(
                    f"rope_parameters.{name}_factor", factors, "must be a list of numbers"
                )
            out[f"{name}_factors"] = tuple(factors)
    return out


def _attention_factor(
    cfg: Config, kind: str, out: Mapping[str, Any], params: Mapping[str, Any]
) -> float:
    """Return the factor that the scaling's authors recommend for a stretched context."""
    factor = out["factor"]
    if kind == "longrope":
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(out["original_length"]))
    one, all_ = (
        _number(cfg, f"rope_parameters.{name}", params[name]) if params.get(name) else None
        for name in ("mscale", "mscale_all_dim")
    )
    if one and all_:
        return yarn_mscale(factor, one) / yarn_mscale(factor, all_)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's magnitude correction, 0.1 m ln(factor) + 1 (Peng et al., 2023)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
