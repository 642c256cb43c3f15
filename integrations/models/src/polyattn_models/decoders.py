"""Decoder-only models whose every layer is attention."""

from __future__ import annotations

from typing import Any

from polyattn import LayerSpec, RopeSpec

from polyattn_models.attention import (
    Decoder,
    needed_window,
    optional_window,
    rotary,
    shared_keys,
    window,
)
from polyattn_models.config import Config
from polyattn_models.layers import Missing, Reader, Stack, Towers
from polyattn_models.patterns import (
    CHUNKED,
    FULL,
    SLIDING,
    all_of,
    every,
    lower_even_layers,
    starting,
    upper_layers,
)
from polyattn_models.rotary import nested_parameters, parameters, read_rope, with_temperature

YARN_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
YARN_MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def by_field(name: str) -> Any:
    """Return a scale that a field states as such (Granite's `attention_multiplier`)."""
    return lambda cfg, size, index: cfg.number(name) or 0.0


def query_scalar(cfg: Config, size: int, index: int) -> float:
    """Return `query_pre_attn_scalar` ** -0.5 (Gemma 2 and 3)."""
    scalar = cfg.number("query_pre_attn_scalar")
    return float(scalar) ** -0.5 if scalar else 0.0


def two_bases(local_field: str) -> Any:
    """Return Gemma 3's ropes: windowed layers have a base of their own and no scaling."""

    def rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
        nested_parameters(cfg)
        if cfg.get("rope_parameters"):
            return read_rope(cfg, size, layer_type=kind, theta=cfg.cls.theta[_LOCALITY[kind]])
        base = {  # both are understood, also where all layers are of one kind
            SLIDING: cfg.number(local_field, cfg.cls.theta["local"]),
            FULL: cfg.number("rope_theta", cfg.cls.theta["global"]),
        }
        return read_rope(cfg, size, theta=base[kind], scaled=kind == FULL)

    return rope


_LOCALITY = {FULL: "global", SLIDING: "local"}


def sliding_alone(**options: Any) -> Any:
    """Return a rope of the windowed layers alone: full attention has no positions (Command R7B)."""
    return lambda cfg, size, index, kind: (
        read_rope(cfg, size, **options) if kind == SLIDING else None
    )


def exaone_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
    """Full attention has no positions in a model with windows (Exaone 4)."""
    if kind == FULL and cfg.integer("sliding_window") is not None:
        return None
    return read_rope(cfg, size)


def has_rope(cfg: Config, index: int) -> bool:
    """Return whether `no_rope_layers`, 1 for those with positions, has this layer rotated."""
    count = cfg.need("num_hidden_layers")
    listed = cfg.items("no_rope_layers", int, count) if cfg.get("no_rope_layers") else None
    if listed is not None:
        return bool(listed[index])
    return (index + 1) % (cfg.integer("no_rope_layer_interval") or 4) != 0


def olmo3_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """Windowed layers aren't stretched."""
    nested_parameters(cfg)
    scaled = kind == FULL or bool(cfg.get("rope_parameters"))
    if not cfg.get("rope_parameters"):
        cfg.only("rope_theta", cfg.cls.theta)  # transformers gives windowed layers no other
    return read_rope(cfg, size, layer_type=kind, scaled=scaled)


def smollm3_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
    """Some layers have no positions."""
    return read_rope(cfg, size) if has_rope(cfg, index) else None


def smollm3_types(cfg: Config, count: int) -> list[str]:
    """The layers without positions may be windowed."""
    windowed = optional_window(cfg) is not None
    return [SLIDING if windowed and not has_rope(cfg, i) else FULL for i in range(count)]


def llama4_types(cfg: Config, count: int) -> list[str]:
    """The layers with positions see their chunk alone."""
    return [CHUNKED if has_rope(cfg, i) else FULL for i in range(count)]


def llama4_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec | None:
    """Layers without positions scale the query by a temperature that grows with its position."""
    if has_rope(cfg, index):
        return read_rope(cfg, size, pairing="gptj")
    tuning = cfg.get("attn_temperature_tuning")
    if not tuning:
        return None
    return RopeSpec(
        rotary_size=0,
        temperature=cfg.number("attn_scale") or 0.0,
        temperature_length=cfg.need("floor_scale"),
        temperature_offset=1,
    )


def ministral3_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """A rotation, and a temperature that grows with the position."""
    rope = read_rope(cfg, size, default=YARN_MINISTRAL)
    params = parameters(cfg, kind, YARN_MINISTRAL)
    return with_temperature(cfg, rope, params)


def phi3_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """Whatever scaling Phi-3 names is LongRoPE."""
    rope = read_rope(cfg, size, partial=1.0)
    if rope.scaling not in ("none", "longrope"):
        raise cfg.error("rope_scaling", rope.scaling, "can't be served; Phi-3 has only LongRoPE")
    return rope


def phi4_multimodal(cfg: Config) -> Towers:
    """Phi-4: as Phi-3, beside towers of images and sounds."""
    out: Towers = {"text": Decoder(types=all_of(SLIDING), window=window, rope=phi3_rope)(cfg)}
    for tower in ("vision", "audio"):
        if cfg.get(f"{tower}_config") is not None:
            out[tower] = [Missing(f"{tower} towers of type 'phi4_multimodal'")]
    return out


def phimoe_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """LongRoPE with magnitudes of its own isn't stated by a `RopeSpec`."""
    params = cfg.get("rope_scaling", "rope_parameters") or {}
    if (
        isinstance(params, dict)
        and params.get("rope_type", params.get("type", "default")) != "default"
    ):
        raise cfg.error(
            "rope_scaling",
            params.get("rope_type", params.get("type")),
            "of Phi-3.5-MoE has magnitudes per length, which can't be served",
        )
    return read_rope(cfg, size)


def minimax_m2_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """`rotary_dim` elements of a head are rotated."""
    rotated = cfg.integer("rotary_dim")
    return read_rope(cfg, size, partial=rotated / size if rotated else 1.0)


def gemma2_window(cfg: Config) -> int:
    """Return `sliding_window`, which the publisher's files say twice."""
    cfg.only("sliding_window_size", cfg.need("sliding_window"))
    return needed_window(cfg)


def qwen2_types(cfg: Config, count: int) -> list[str]:
    """Upper layers are windowed where windows are used at all."""
    return upper_layers(cfg, count) if optional_window(cfg) else [FULL] * count


def qwen2_moe_types(cfg: Config, count: int) -> list[str]:
    """Every second lower layer is windowed where windows are used at all."""
    return lower_even_layers(cfg, count) if optional_window(cfg) else [FULL] * count


def qwen3_moe_types(cfg: Config, count: int) -> list[str]:
    """All layers or none are windowed; where none is, `max_window_layers` says nothing."""
    if optional_window(cfg) is None:
        cfg.get("max_window_layers")
    else:
        cfg.only("max_window_layers", 0)
    return [SLIDING] * count


def minimax_m2_types(cfg: Config, count: int) -> list[str]:
    """Every layer is softmax attention, which the publisher's files may list."""
    if cfg.get("attn_type_list") is not None:
        cfg.only("attn_type_list", [1] * count)
    return [FULL] * count


def exaone_types(cfg: Config, count: int) -> list[str]:
    """Three of four layers are windowed; a letter per layer in the publisher's own files."""
    pattern = cfg.get("sliding_window_pattern")
    if cfg.integer("sliding_window") is None:
        return [FULL] * count
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise cfg.error("sliding_window_pattern", pattern, "must have only the letters L and G")
        kinds = {"L": SLIDING, "G": FULL}
        return [kinds[pattern[i % len(pattern)]] for i in range(count - 1)] + [FULL]
    return every(4, "sliding_window_pattern")(cfg, count)


def moshi(cfg: Config) -> Stack:
    """The text tower, whose window is the whole context; the depth decoder is a model by itself."""
    window, longest = cfg.need("sliding_window"), cfg.need("max_position_embeddings")
    if window < longest:
        raise cfg.error("sliding_window", window, f"is below max_position_embeddings={longest}")
    cfg.get("audio_encoder_config", "depth_decoder_config")
    return LLAMA(cfg)


def jetmoe(cfg: Config) -> Stack:
    """The queries of each expert see all KV heads: keys and values are repeated before attention."""
    heads = cfg.need("num_key_value_heads") * cfg.need("num_experts_per_tok")
    cfg.only("num_attention_heads", heads)
    size = cfg.need("kv_channels")
    spec = LayerSpec(num_heads=heads, head_size=size, dtype=cfg.dtype, rope=read_rope(cfg, size))
    return [spec] * cfg.need("num_hidden_layers")


LLAMA = Decoder()
GPTJ_PAIRS = Decoder(rope=rotary(pairing="gptj"))
MISTRAL = Decoder(types=all_of(SLIDING), window=window)
QWEN2 = Decoder(types=qwen2_types, listed=True, window=optional_window)
QWEN_MOE = Decoder(types=qwen2_moe_types, listed=True, window=optional_window)
GRANITE = Decoder(
    scale=by_field("attention_multiplier"), only={"position_embedding_type": ("rope",)}
)
GEMMA2 = Decoder(
    types=every(2),
    listed=True,
    window=gemma2_window,
    scale=query_scalar,
    soft_cap="attn_logit_softcapping",
    only={"use_bidirectional_attention": (False,)},
)
GEMMA3 = Decoder(
    types=every(6, "sliding_window_pattern"),
    listed=True,
    window=needed_window,
    scale=query_scalar,
    rope=two_bases("rope_local_base_freq"),
    only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
)
GEMMA3N = Decoder(
    types=every(5),
    listed=True,
    window=needed_window,
    scale=lambda cfg, size, index: 1.0,
    rope=two_bases("rope_local_base_freq"),
)


def gemma3n(cfg: Config) -> Stack:
    """The last `num_kv_shared_layers` read the keys of the last layer of their type before them."""
    types = GEMMA3N.layer_types(cfg, cfg.need("num_hidden_layers"))
    layers = [GEMMA3N.layer(cfg, index, kind) for index, kind in enumerate(types)]
    return shared_keys(cfg, layers, types)


EXAONE4 = Decoder(types=exaone_types, listed=True, window=window, rope=exaone_rope)
LLAMA4 = Decoder(types=llama4_types, listed=True, rope=llama4_rope)

READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("llama", "arcee", "seed_oss", "solar_open", "jais2", "bitnet", "olmo", "olmo2", "olmoe",
         "flex_olmo", "aria_text", "internlm3", "iquestcoder", "hy_v3", "emu3_text_model"),
        LLAMA,
    ),
    **dict.fromkeys(("chameleon", "deepseek_ocr2_text"), Decoder(head_dim=False)),
    **dict.fromkeys(("mistral", "mixtral", "starcoder2", "voxtral_realtime_text"), MISTRAL),
    **dict.fromkeys(("helium", "ernie4_5", "ernie4_5_moe", "cohere"), GPTJ_PAIRS),
    **dict.fromkeys(("glm", "glm4"), Decoder(rope=rotary(pairing="gptj", partial=0.5))),
    **dict.fromkeys(("phi", "nemotron", "glm4_moe"), Decoder(rope=rotary(partial=0.5))),
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoeshared", "hyperclovax", "granite4_vision_text",
         "granite_docling_text"),
        GRANITE,
    ),
    "apertus": Decoder(rope=rotary(default=LLAMA3 | {"rope_theta": 12e6})),
    "cwm": Decoder(
        types=starting(4), listed=True, window=window,
        rope=rotary(default=LLAMA3 | {"rope_theta": 1e6, "factor": 16.0}),
    ),
    "stablelm": Decoder(rope=rotary(partial=0.25)),
    "persimmon": Decoder(kv_heads=False, head_dim=False, rope=rotary(partial=0.5)),
    "ministral": Decoder(types=all_of(SLIDING), listed=True, window=window),
    "ministral3": Decoder(types=all_of(SLIDING), window=window, rope=ministral3_rope),
    "qwen2": QWEN2,
    "mimo": QWEN2,
    "qwen3": QWEN2,
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": Decoder(types=qwen3_moe_types, window=optional_window),
    "dots1": Decoder(types=upper_layers, listed=True, window=window),
    "gemma": Decoder(only={"use_bidirectional_attention": (False,)}),
    "gemma2": GEMMA2,
    "vaultgemma": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3n_text": gemma3n,
    "phi3": Decoder(types=all_of(SLIDING), window=window, rope=phi3_rope),
    "phi4_multimodal": phi4_multimodal,
    "moshi": moshi,
    "jetmoe": jetmoe,
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), Decoder(rope=rotary(alpha=True))),
    "phimoe": Decoder(types=all_of(SLIDING), window=window, rope=phimoe_rope),
    "minimax_m2": Decoder(types=minimax_m2_types, rope=minimax_m2_rope),
    "cohere2": Decoder(
        types=every(4, "sliding_window_pattern"), listed=True, window=needed_window,
        rope=sliding_alone(pairing="gptj"),
    ),
    "afmoe": Decoder(
        types=every(4, "global_attn_every_n_layers"), listed=True, window=needed_window,
        rope=sliding_alone(),
    ),
    "olmo3": Decoder(
        types=every(4), listed=True, window=needed_window,
        rope=olmo3_rope,
    ),
    "smollm3": Decoder(types=smollm3_types, listed=True, window=optional_window, rope=smollm3_rope),
    "exaone4": EXAONE4,
    "exaone_moe": EXAONE4,
    "llama4_text": LLAMA4,
    "gpt_oss": Decoder(
        types=every(2), listed=True, window=needed_window, sinks=True,
        rope=rotary(default=YARN_GPT_OSS),
    ),
}  # fmt: skip
