"""The layers of a decoder: what a type of models has in common with Llama, and what not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyattn import LayerSpec, NormSpec, RopeSpec

from polyattn_models.config import Config
from polyattn_models.layers import Part, Stack
from polyattn_models.patterns import CHUNKED, FULL, SLIDING, Pattern, layer_types
from polyattn_models.rotary import read_rope


def every_full(cfg: Config, count: int) -> list[str]:
    """Every layer sees everything."""
    return [FULL] * count


@dataclass(frozen=True)
class Decoder:
    """How a type of decoder-only models departs from Llama.

    - `types`: the pattern of layer types; `listed` whether the config may list them itself.
    - `window`: returns the window of the windowed layers, or None where the config has none.
    - `head_dim`: whether the field is read; `kv_heads` whether `num_key_value_heads` is.
    - `scale`: returns the scale of a head size and layer, 0 for the default.
    - `rope`: returns the rotary embedding of a layer, or None; `soft_cap`, `sinks`: as in LayerSpec.
    - `only`: fields with the only values that can be served.
    """

    types: Pattern = every_full
    listed: bool = False
    window: Callable[[Config], int | None] = lambda cfg: None
    head_dim: bool = True
    kv_heads: bool = True
    scale: Callable[[Config, int, int], float] = lambda cfg, size, index: 0.0
    rope: Callable[[Config, int, int, str], RopeSpec | None] = lambda cfg, size, index, kind: (
        read_rope(cfg, size)
    )
    soft_cap: str = ""
    sinks: bool = False
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __call__(self, cfg: Config) -> list[LayerSpec]:
        """Return the layers."""
        for name, valid in self.only.items():
            cfg.only(name, *valid)
        count = cfg.need("num_hidden_layers")
        types = self.layer_types(cfg, count)
        return [self.layer(cfg, i, kind) for i, kind in enumerate(types)]

    def layer_types(self, cfg: Config, count: int) -> list[str]:
        """Return the type of every layer."""
        if self.listed:
            return layer_types(cfg, count, self.types, (FULL, SLIDING, CHUNKED))
        return self.types(cfg, count)

    def layer(self, cfg: Config, index: int, kind: str = FULL) -> LayerSpec:
        """Return one attention layer."""
        heads, kv_heads, size = head_sizes(cfg, self.head_dim, self.kv_heads)
        masked: dict[str, Any] = {}
        if kind == SLIDING:
            masked["sliding_window"] = self.window(cfg)
            if masked["sliding_window"] is None and cfg.get("layer_types") and self.listed:
                raise cfg.error("sliding_window", None, "but layer_types has windowed layers")
        if kind == CHUNKED:
            masked["chunk_size"] = cfg.need("attention_chunk_size")
        return LayerSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            dtype=cfg.dtype,
            scale=self.scale(cfg, size, index),
            logit_soft_cap=cfg.number(self.soft_cap) if self.soft_cap else None,
            learned_sinks=self.sinks,
            qk_norm=qk_norm(cfg),
            rope=self.rope(cfg, size, index, kind),
            **masked,
        )


def stack(
    cfg: Config, types: list[str], layers: Mapping[str, Decoder | Part | tuple[Part, ...]]
) -> Stack:
    """Return the layers of types in order; those of a `Decoder` may depend on their index."""
    made = [(i, kind, layers[kind]) for i, kind in enumerate(types)]
    return [one.layer(cfg, i, kind) if isinstance(one, Decoder) else one for i, kind, one in made]


_HEADS = """qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text dots1 glm4_moe
exaone4 exaone_moe apertus afmoe hy_v3 gemma3n_text gemma4_text gemma4_unified_text beam flint
kolibri1 laguna lfm3 mellum"""
_FROM_ONE = "gemma3_text qwen3_next qwen3_5_text qwen3_5_moe_text step3p5 minimax_m3_vl_text"
_TOKENS = "olmo2 olmo3 olmoe flex_olmo olmo_hybrid minimax_m2"
NORMED: dict[str, tuple[str, float]] = {
    **dict.fromkeys(_HEADS.split(), ("head", 0.0)),
    **dict.fromkeys(_FROM_ONE.split(), ("head", 1.0)),
    **dict.fromkeys(_TOKENS.split(), ("token", 0.0)),
}
"""The types that norm queries and keys before they rotate them: what a row is, the weight's offset."""


def qk_norm(cfg: Config) -> NormSpec | None:
    """Return the norm of queries and keys; None also where a clip comes between it and the rotation."""
    over, offset = NORMED.get(cfg.model_type, ("", 0.0))
    flagged = cfg.model_type == "glm4_moe" and not cfg.flag("use_qk_norm")
    if not over or flagged or (cfg.model_type == "olmoe" and cfg.get("clip_qkv") is not None):
        return None
    eps = cfg.number("rms_norm_eps")
    if eps is None or eps < 0:
        raise cfg.error("rms_norm_eps", eps, "must be 0 or more")
    return NormSpec(over=over, eps=eps, offset=offset)


def head_sizes(cfg: Config, head_dim: bool = True, kv: bool = True) -> tuple[int, int, int]:
    """Return the numbers of heads and KV heads and the size of a head."""
    heads = cfg.need("num_attention_heads")
    kv_heads = (cfg.integer("num_key_value_heads") if kv else None) or heads
    size = cfg.integer("head_dim") if head_dim else None
    if size is None:
        width = cfg.need("hidden_size")
        if width % heads:
            raise cfg.error(
                "hidden_size",
                width,
                f"isn't divisible by num_attention_heads={heads}; add head_dim",
            )
        size = width // heads
    return heads, kv_heads, size


def window(cfg: Config) -> int | None:
    """Return `sliding_window`, null for none."""
    return cfg.integer("sliding_window")


def needed_window(cfg: Config) -> int:
    """Return `sliding_window` of a type that can't be without one."""
    return cfg.need("sliding_window")


def optional_window(cfg: Config) -> int | None:
    """Return `sliding_window` where `use_sliding_window` says so."""
    return cfg.integer("sliding_window") if cfg.flag("use_sliding_window") else None


def rotary(**options: Any) -> Callable[[Config, int, int, str], RopeSpec]:
    """Return a reader of the same rotary embedding for every layer."""
    return lambda cfg, size, index, kind: read_rope(cfg, size, layer_type=kind, **options)


def no_rope(cfg: Config, size: int, index: int, kind: str) -> None:
    """Positions enter elsewhere: learned, sinusoidal, as a bias, or not at all."""
    return


def shared_keys(cfg: Config, layers: list[LayerSpec], types: list[str]) -> list[LayerSpec]:
    """Return the layers; the last `num_kv_shared_layers` read the last own keys of their type."""
    count, shared = len(layers), cfg.get("num_kv_shared_layers", default=0)
    if type(shared) is not int or not 0 <= shared < count:
        raise cfg.error("num_kv_shared_layers", shared, f"must be from 0 to {count - 1}")
    first = count - shared
    source = {kind: index for index, kind in enumerate(types[:first])}
    if shared and set(types) - set(source):
        raise cfg.error("num_kv_shared_layers", shared, "leaves no layer of some type before them")
    return layers[:first] + [
        layer.replace(kv_source=source[kind])
        for layer, kind in zip(layers[first:], types[first:], strict=True)
    ]
