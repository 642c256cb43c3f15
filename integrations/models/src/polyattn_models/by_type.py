"""Decoders whose heads, window or rotary embedding depend on a layer's type or index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyattn import LayerSpec, NormSpec, RopeSpec

from polyattn_models.attention import (
    Decoder,
    needed_window,
    qk_norm,
    rotary,
    shared_keys,
    stack,
    window,
)
from polyattn_models.config import Config, unknown_choice
from polyattn_models.decoders import sliding_alone
from polyattn_models.layers import Reader, Stack
from polyattn_models.patterns import CONV, FULL, SLIDING, every, named, starting
from polyattn_models.recurrent import short_convolution
from polyattn_models.rotary import read_rope

ROPE_BY_TYPE = Callable[[Config, int, int, str], RopeSpec | None]
WARM = RopeSpec(rotary_size=0, temperature_power=0.1, temperature_length=2048, temperature_offset=1)
"""Beam's layers without positions."""


def rope_by_type(
    defaults: Mapping[str, Any], partial: float | None = 1.0, **options: Any
) -> ROPE_BY_TYPE:
    """Return a reader of `rope_parameters` with a set for each layer type; null: no rotation.

    `defaults` stand for absent parameters; `partial` and `options` as in `read_rope`.
    """

    def rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
        cfg.only("rope_scaling")
        cfg.only("partial_rotary_factor", partial)
        stated = cfg.get("rope_parameters", default=defaults)
        if not isinstance(stated, Mapping) or kind not in stated:
            raise cfg.error("rope_parameters", stated, f"lacks the layer type {kind!r}")
        if stated[kind] is None:
            return None
        return read_rope(cfg, size, layer_type=kind, default=defaults, partial=partial, **options)

    return rope


def _default(theta: float, partial: float | None = None) -> dict[str, Any]:
    turned = {} if partial is None else {"partial_rotary_factor": partial}
    return {"rope_type": "default", "rope_theta": theta, **turned}


def _by_type(full: Mapping[str, Any], sliding: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {FULL: full, SLIDING: sliding}


LAGUNA = Decoder(
    listed=True,
    window=needed_window,
    rope=rope_by_type(_by_type(_default(500000.0, 0.5), _default(10000.0, 1.0))),
)


def laguna(cfg: Config) -> Stack:
    """Each layer has a number of heads of its own."""
    count = cfg.need("num_hidden_layers")
    heads = cfg.items("num_attention_heads_per_layer", int, count)
    layers = [LAGUNA.layer(cfg, i, kind) for i, kind in enumerate(LAGUNA.layer_types(cfg, count))]
    if heads is not None:
        layers = [one.replace(num_heads=n) for one, n in zip(layers, heads, strict=True)]
    return layers


def granite_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
    """Each layer has a base of its own, 0 for no rotation (Granite with windows)."""
    count = cfg.need("num_hidden_layers")
    bases = cfg.get("layer_rope_theta")
    rope = read_rope(cfg, size)
    if bases is None:
        return rope
    good = isinstance(bases, list) and len(bases) == count
    if not good or any(type(base) not in (int, float) or base < 0 for base in bases):
        raise cfg.error("layer_rope_theta", bases, f"must be {count} numbers that aren't negative")
    return dataclasses.replace(rope, base=float(bases[index])) if bases[index] else None


def cohere2_moe(cfg: Config) -> Stack:
    """Windowed layers are rotated; of the first dense layers all are, or have a window pattern."""
    cfg.only("rope_scaling")
    count, dense = cfg.need("num_hidden_layers"), cfg.get("first_k_dense_replace", default=0)
    if type(dense) is not int or not 0 <= dense <= count:
        raise cfg.error("first_k_dense_replace", dense, f"must be from 0 to {count}")
    period = cfg.integer("prefix_dense_sliding_window_pattern") or 1
    rest = cfg.integer("sliding_window_pattern") or 4
    derived = every(period)(cfg, dense) + every(rest)(cfg, count - dense)
    types = cfg.items("layer_types", str, count) or derived
    types = named(cfg, "layer_types", types, (FULL, SLIDING))
    mlps = cfg.items("mlp_layer_types", str, count) or ["dense"] * dense + ["sparse"] * count
    rotated = Decoder(window=needed_window, rope=rotary(pairing="gptj"))
    layers = []
    for i, kind in enumerate(types):
        layer = rotated.layer(cfg, i, kind)
        turns = kind == SLIDING or (mlps[i] == "dense" and period == 1)
        layers.append(layer if turns else layer.replace(rope=None))
    return layers


def molmo2_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """Only the layers that `rope_scaling_layers` lists are stretched; null: all are."""
    layers = cfg.items("rope_scaling_layers", int)
    rope = read_rope(cfg, size)
    if layers is None or index in layers:
        return rope
    return RopeSpec(rotary_size=rope.rotary_size, base=rope.base)


def molmo2(cfg: Config) -> Stack:
    """Molmo 2: text that attends causally; image tokens among it see each other both ways."""
    over = {"qwen3": "head", "olmo": "token"}
    kind = cfg.get("qk_norm_type", default="qwen3")
    if kind not in over:
        raise unknown_choice(cfg, "qk_norm_type", kind, list(over))
    norm = NormSpec(over=over[kind], eps=cfg.number("rms_norm_eps") or 0.0)
    return [layer.replace(qk_norm=norm) for layer in Decoder(rope=molmo2_rope)(cfg)]


def muse_types(cfg: Config, count: int) -> list[str]:
    """The last layer, and every fourth before it, sees everything."""
    return [SLIDING if (count - 1 - i) % 4 else FULL for i in range(count)]


def muse(theta: float) -> Decoder:
    """Return Meta's Muse: one base for all layers, and no positions where a layer's own is 0."""

    def rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
        count = cfg.need("num_hidden_layers")
        bases = cfg.get("layer_rope_theta") or [k == SLIDING for k in muse_types(cfg, count)]
        if not isinstance(bases, list) or len(bases) != count:
            raise cfg.error("layer_rope_theta", bases, f"must be {count} numbers")
        shared = read_rope(cfg, size, default={"rope_type": "default", "rope_theta": theta})
        return shared if bases[index] else None

    return Decoder(types=muse_types, listed=True, window=needed_window, rope=rope)


def kolibri_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
    """Full attention has no positions in a model with windows."""
    return None if kind == FULL and window(cfg) is not None else read_rope(cfg, size)


def flint_types(cfg: Config, count: int) -> list[str]:
    """The first two layers, every fourth and the last one see everything."""
    return [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]


def beam_types(cfg: Config, count: int) -> list[str]:
    """Every sixth layer and the last one see everything."""
    return [*every(6)(cfg, count)[:-1], FULL]


BEAM = Decoder(
    types=beam_types,
    listed=True,
    window=needed_window,
    rope=rope_by_type({SLIDING: _default(10000.0), FULL: None}, None),
)


def beam(cfg: Config) -> Stack:
    """A layer without positions multiplies the query by ((position + 1) / 2048 + 1) ** 0.1."""
    return [layer.replace(rope=layer.rope or WARM) for layer in BEAM(cfg)]


MIMO_ROPE = _by_type(_default(5e6, 0.334), _default(1e4, 0.334))


def mimo(cfg: Config) -> Stack:
    """MiMo-V2-Flash: windowed layers have sinks and twice the KV heads; values are smaller than keys.

    The window counts the query's own token: the publisher's 128 are 129 here, as in transformers.
    """
    count = cfg.need("num_hidden_layers")
    size, v_size = cfg.need("head_dim"), cfg.need("v_head_dim")
    heads, kv_heads = cfg.need("num_attention_heads"), cfg.need("num_key_value_heads")
    stated = cfg.integer("sliding_window_size")
    within = cfg.need("sliding_window") if stated is None else stated + 1
    for name, value in (
        ("swa_head_dim", size), ("swa_v_head_dim", v_size), ("swa_num_attention_heads", heads),
        ("swa_num_key_value_heads", 2 * kv_heads), ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False), ("rope_theta", 5e6), ("swa_rope_theta", 1e4),
        ("partial_rotary_factor", 0.334),
    ):  # fmt: skip
        cfg.only(name, value)
    cfg.number("attention_value_scale")
    derived = [SLIDING if i and (i + 1) % 6 else FULL for i in range(count)]
    pattern = cfg.items("hybrid_layer_pattern", int, count)
    if pattern is not None and pattern != [int(kind == SLIDING) for kind in derived]:
        remedy = "must be 0 for the first layer and each sixth, else 1; state others by layer_types"
        raise cfg.error("hybrid_layer_pattern", pattern, remedy)
    types = cfg.items("layer_types", str, count) or derived
    types = named(cfg, "layer_types", types, (FULL, SLIDING))
    rope = rope_by_type(MIMO_ROPE, 0.334)

    def layer(index: int, kind: str) -> LayerSpec:
        slides = kind == SLIDING
        return LayerSpec(
            num_heads=heads, num_kv_heads=2 * kv_heads if slides else kv_heads, head_size=size,
            v_head_size=v_size, dtype=cfg.dtype, learned_sinks=slides,
            sliding_window=within if slides else None, rope=rope(cfg, size, index, kind),
        )  # fmt: skip

    return [layer(i, kind) for i, kind in enumerate(types)]


def _by_layer(cfg: Config, name: str, count: int) -> list[float] | None:
    """Return a number for each layer: the field's, a list's, whose rest is drafts' layers, or None."""
    value = cfg.get(name)
    if not isinstance(value, list):
        one = cfg.number(name)
        return None if one is None else [one] * count
    if len(value) < count or any(type(each) not in (int, float) for each in value):
        raise cfg.error(name, value, f"must be a number for each of {count} layers")
    return [float(each) for each in value[:count]]


def step(cfg: Config) -> Stack:
    """Step-3.7: windowed layers may have more heads; each layer type has a rotation of its own."""
    count = cfg.need("num_hidden_layers")
    cfg.get("num_nextn_predict_layers")  # lists may have entries for drafts' layers behind
    types = (cfg.items("layer_types", str) or [FULL] * count)[:count]
    types = named(cfg, "layer_types", types, (FULL, SLIDING))
    if len(types) != count:
        raise cfg.error("layer_types", types, f"must have an entry for each of {count} layers")
    heads, size = cfg.need("num_attention_heads"), cfg.need("head_dim")
    other = cfg.part("attention_other_setting") if cfg.get("attention_other_setting") else None
    near = cfg.integer("num_sliding_attention_heads")
    if other is not None:
        near = near or other.integer("num_attention_heads")
        other.get("attention_type")
        other.only("num_attention_groups", cfg.get("num_key_value_heads"))
        other.only("head_dim", size)
    near = near or heads
    wanted = {"num_attention_heads": near}
    for index, kind in enumerate(types):
        own = cfg.layer_values(index)
        if own and (kind != SLIDING or own != wanted):
            name = f"per_layer_config.{index}"
            raise cfg.error(name, own, f"isn't {wanted} for windowed layers alone")
    scalar = cfg.number("query_pre_attn_scalar") or size
    thetas = _by_layer(cfg, "rope_theta", count) or [float(cfg.cls.theta)] * count
    parts = _by_layer(cfg, "partial_rotary_factors", count) or [1.0] * count
    scaled, stated = cfg.get("rope_scaling", default={}), cfg.get("rope_parameters")
    if not isinstance(scaled, Mapping):
        raise cfg.error("rope_scaling", scaled, "must be a JSON object")
    if not (isinstance(stated, Mapping) and {*types} <= {*stated}):
        stated = {
            kind: {
                "rope_type": "default",
                "rope_theta": thetas[types.index(kind)],
                "partial_rotary_factor": parts[types.index(kind)],
                **(scaled if kind == FULL else {}),
            }
            for kind in {*types}
        }
    cfg.values["rope_parameters"] = stated
    for name in ("rope_scaling", "rope_theta"):
        cfg.values.pop(name, None)
    layers = {
        kind: LayerSpec(
            num_heads=heads if kind == FULL else near,
            num_kv_heads=cfg.need("num_key_value_heads"),
            head_size=size,
            dtype=cfg.dtype,
            scale=scalar**-0.5,
            sliding_window=needed_window(cfg) if kind == SLIDING else None,
            qk_norm=qk_norm(cfg),
            rope=read_rope(cfg, size, layer_type=kind, partial=1.0),
        )
        for kind in {*types}
    }
    return [layers[kind] for kind in types]


GEMMA4_ROPE = _by_type(
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _default(10000.0),
)


def gemma4(cfg: Config) -> Stack:
    """Gemma 4: global layers have larger heads, rotate a quarter of each, and may have V = K."""
    cfg.only("use_bidirectional_attention", "vision")
    count = cfg.need("num_hidden_layers")
    types = cfg.items("layer_types", str, count) or every(6)(cfg, count)
    types = [*named(cfg, "layer_types", types, (FULL, SLIDING))[:-1], FULL]
    size, kv_heads = cfg.need("head_dim"), cfg.need("num_key_value_heads")
    whole_size = cfg.integer("global_head_dim") or 512
    whole_heads = cfg.integer("num_global_key_value_heads")
    if whole_heads is None or not cfg.flag("attention_k_eq_v"):
        whole_heads = kv_heads
    sizes = {SLIDING: (size, kv_heads), FULL: (whole_size, whole_heads)}
    rope = rope_by_type(GEMMA4_ROPE)

    def layer(index: int, kind: str) -> LayerSpec:
        own_size, own_heads = sizes[kind]
        own = cfg.layer_values(index)
        if own is not None:
            part = Config(own, f"{cfg.source}: per_layer_config.{index}")
            own_size = part.integer("head_dim") or size
            own_heads = part.integer("num_key_value_heads") or kv_heads
            cfg.parts.append(part)
        return LayerSpec(
            num_heads=cfg.need("num_attention_heads"),
            num_kv_heads=own_heads,
            head_size=own_size,
            scale=1.0,
            dtype=cfg.dtype,
            rope=rope(cfg, own_size, index, kind),
            qk_norm=qk_norm(cfg),
            sliding_window=needed_window(cfg) if kind == SLIDING else None,
        )

    layers = [layer(index, kind) for index, kind in enumerate(types)]
    return shared_keys(cfg, layers, types)


LFM3_ROPE = _by_type(
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    _default(10000.0),
)


def lfm3(cfg: Config) -> Stack:
    """Gated short convolutions, windowed and full attention."""
    count = cfg.need("num_hidden_layers")
    derived = [FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else CONV for i in range(count)]
    types = cfg.items("layer_types", str, count) or derived
    types = named(cfg, "layer_types", types, (FULL, SLIDING, CONV))
    attention = Decoder(window=needed_window, rope=rope_by_type(LFM3_ROPE))
    return stack(cfg, types, {FULL: attention, SLIDING: attention, CONV: short_convolution(cfg)})


COMPASS = Decoder(
    listed=True,
    window=needed_window,
    head_dim=False,
    rope=rope_by_type({}, None, sections=(24, 20, 20), interleaved=True),
)


def cohere_compass(cfg: Config) -> Stack:
    """Positions have three axes; a layer type without a rotation has null for it."""
    cfg.only("head_dim", cfg.need("hidden_size") // cfg.need("num_attention_heads"))
    return COMPASS(cfg)


READERS: dict[str, Reader] = {
    "laguna": laguna,
    "mellum": Decoder(
        listed=True, window=needed_window,
        rope=rope_by_type(_by_type(_default(500000.0), _default(10000.0)), None),
    ),
    "cohere2_moe": cohere2_moe,
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"),
        Decoder(
            types=starting(4), listed=True, window=needed_window, sinks=True, rope=granite_rope,
            scale=lambda cfg, size, index: cfg.number("attention_multiplier") or 0.0,
        ),
    ),
    "kolibri1": Decoder(types=every(5), listed=True, window=window, rope=kolibri_rope),
    "flint": Decoder(
        types=flint_types, listed=True, window=needed_window, sinks=True,
        rope=sliding_alone(),
    ),
    "beam": beam,
    "molmo2_text": molmo2,
    "muse_glimmer_text": muse(10000.0),
    "muse_spark_text": muse(500000.0),
    "mimo_v2_flash": mimo,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), gemma4),
    "lfm3": lfm3,
    "step3p5": step,
    "cohere_compass_text": cohere_compass,
}  # fmt: skip
