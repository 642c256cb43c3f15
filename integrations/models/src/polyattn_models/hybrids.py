"""Models that mix attention with recurrences."""

from __future__ import annotations

from polyattn import LayerSpec, RopeSpec

from polyattn_models.attention import Decoder, no_rope, rotary, stack, window
from polyattn_models.config import Config
from polyattn_models.layers import Reader, Stack, spec_of
from polyattn_models.mla import latent_attention
from polyattn_models.patterns import (
    CONV,
    FULL,
    LINEAR,
    SLIDING,
    Pattern,
    all_of,
    every,
    layer_types,
    named,
)
from polyattn_models.recurrent import (
    gated_delta,
    gated_linear_unit,
    kimi_delta,
    kimi_sizes,
    lightning,
    mamba1,
    mamba2,
    short_convolution,
    silu,
    widened,
)
from polyattn_models.rotary import read_rope

NOPE = Decoder(head_dim=False, rope=no_rope)


def listed(cfg: Config, pattern: Pattern, *valid: str) -> list[str]:
    """Return the type of every layer."""
    return layer_types(cfg, cfg.need("num_hidden_layers"), pattern, valid)


def _mamba_fields(cfg: Config, channels: int) -> LayerSpec:
    """Return the Mamba-2 layer of Bamba, Granite 4 and Falcon-H1, which share field names."""
    heads = cfg.need("mamba_n_heads")
    size = cfg.get("mamba_d_head", default="auto")
    if size == "auto":
        size = channels // heads
    if not isinstance(size, int) or size * heads != channels:
        raise cfg.error("mamba_d_head", size, f"x mamba_n_heads={heads} isn't {channels} channels")
    return mamba2(
        cfg,
        heads,
        cfg.need("mamba_n_groups"),
        size,
        cfg.need("mamba_d_state"),
        cfg.need("mamba_d_conv"),
    )


def bamba(cfg: Config) -> Stack:
    """Mamba-2, and attention where `attn_layer_indices` says so; half of each head rotated."""
    attends = set(cfg.items("attn_layer_indices", int) or ())
    count = cfg.need("num_hidden_layers")
    if not all(0 <= index < count for index in attends):
        raise cfg.error("attn_layer_indices", sorted(attends), f"has layers beyond the {count}")
    recurrent = _mamba_fields(cfg, widened(cfg, "mamba_expand"))
    cfg.only("partial_rotary_factor", 0.5)
    attention = Decoder(rope=rotary(partial=0.5))
    types = [FULL if index in attends else LINEAR for index in range(count)]
    return stack(cfg, types, {FULL: attention, LINEAR: recurrent})


def granite_hybrid(cfg: Config) -> Stack:
    """Granite 4: Mamba-2, and attention that is rotated where `position_embedding_type` is rope."""
    cfg.only("position_embedding_type", "rope", "nope")
    rope = rotary() if cfg.get("position_embedding_type") == "rope" else no_rope
    attention = Decoder(
        head_dim=False, rope=rope, scale=lambda cfg, s, i: cfg.number("attention_multiplier") or 0.0
    )
    types = listed(cfg, all_of(LINEAR), FULL, LINEAR)
    recurrent = _mamba_fields(cfg, widened(cfg, "mamba_expand")) if LINEAR in types else ()
    return stack(cfg, types, {FULL: attention, LINEAR: recurrent})


def falcon_h1(cfg: Config) -> Stack:
    """Every layer has Mamba-2 and attention side by side."""
    channels = cfg.integer("mamba_d_ssm") or widened(cfg, "mamba_expand")
    recurrent = _mamba_fields(cfg, channels)
    attention = Decoder()
    return [
        (recurrent, attention.layer(cfg, index)) for index in range(cfg.need("num_hidden_layers"))
    ]


def jamba(cfg: Config) -> Stack:
    """Mamba-1, and attention without positions once per period."""
    period, offset = cfg.need("attn_layer_period"), cfg.get("attn_layer_offset", default=0)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise cfg.error("attn_layer_offset", offset, f"must be below attn_layer_period={period}")
    cfg.only("sliding_window")
    recurrent = mamba1(
        cfg, widened(cfg, "mamba_expand"), cfg.need("mamba_d_state"), cfg.need("mamba_d_conv")
    )
    types = [FULL if i % period == offset else LINEAR for i in range(cfg.need("num_hidden_layers"))]
    return stack(cfg, types, {FULL: NOPE, LINEAR: recurrent})


HYBRID = "hybrid"
"""Zamba's layers that have attention before their Mamba."""


def _shared_attention(cfg: Config, rotates: bool) -> LayerSpec:
    """Return Zamba's attention, of twice the hidden size: half of it are the token's embedding."""
    width, heads = 2 * cfg.need("hidden_size"), cfg.need("num_attention_heads")
    cfg.only("attention_hidden_size", width)
    size = cfg.integer("attention_head_dim") or width // heads
    kv_heads = cfg.integer("num_key_value_heads") or heads
    rope = read_rope(cfg, size) if rotates else None
    return spec_of(cfg, heads, size, num_kv_heads=kv_heads, scale=(size / 2) ** -0.5, rope=rope)


def zamba(cfg: Config) -> Stack:
    """Mamba-1 of several heads in every layer; in the hybrid ones, shared attention before it."""
    count = cfg.need("num_hidden_layers")
    kinds = cfg.items("layers_block_type", str, count)
    if kinds is None:
        period, offset = cfg.need("attn_layer_period"), cfg.get("attn_layer_offset", default=4)
        rest = [HYBRID if i % period == offset else LINEAR for i in range(count - 3)]
        kinds = [LINEAR, LINEAR, HYBRID, *rest][:count]
    types = named(cfg, "layers_block_type", kinds, (LINEAR, HYBRID))
    channels, groups = widened(cfg, "mamba_expand"), cfg.need("n_mamba_heads")
    if channels % groups:
        raise cfg.error("n_mamba_heads", groups, f"doesn't divide the {channels} channels")
    sizes = (cfg.need("mamba_d_state"), cfg.need("mamba_d_conv"), groups)
    recurrent = mamba1(cfg, channels, *sizes, activation="hidden_mamba_act")
    attention = _shared_attention(cfg, rotates=False)
    return stack(cfg, types, {HYBRID: (attention, recurrent), LINEAR: recurrent})


def zamba2(cfg: Config) -> Stack:
    """Mamba-2 in every layer; in the hybrid ones, shared attention of twice the width before it."""
    count = cfg.need("num_hidden_layers")
    kinds = cfg.items("layers_block_type", str, count)
    if kinds is None:
        raise cfg.error("layers_block_type", None, "is needed: which layers have attention")
    types = named(cfg, "layers_block_type", kinds, (LINEAR, HYBRID))
    channels, recurrent_heads = widened(cfg, "mamba_expand"), cfg.need("n_mamba_heads")
    recurrent = mamba2(
        cfg, recurrent_heads, cfg.need("mamba_ngroups"), channels // recurrent_heads,
        cfg.need("mamba_d_state"), cfg.need("mamba_d_conv"), activation="",
    )  # fmt: skip
    cfg.only("mamba_headdim", channels // recurrent_heads)
    cfg.only("hybrid_layer_ids", [i for i, kind in enumerate(types) if kind == HYBRID])
    attention = _shared_attention(cfg, rotates=cfg.flag("use_mem_rope"))
    return stack(cfg, types, {HYBRID: (attention, recurrent), LINEAR: recurrent})


NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def nemotron_h(cfg: Config) -> Stack:
    """Mamba-2, attention without positions, and layers that are an MLP alone."""
    pattern = cfg.get("hybrid_override_pattern")
    kinds = cfg.items("layers_block_type", str)
    if kinds is None and isinstance(pattern, str):
        if set(pattern) - set(NEMOTRON_LETTERS):
            raise cfg.error(
                "hybrid_override_pattern", pattern, "must have only the letters M * - E"
            )
        kinds = [NEMOTRON_LETTERS[letter] for letter in pattern]
    if kinds is None:
        raise cfg.error("layers_block_type", None, "or hybrid_override_pattern is needed")
    count = cfg.integer("num_hidden_layers") if cfg.given("num_hidden_layers") else None
    if count is not None and count != len(kinds):
        raise cfg.error("num_hidden_layers", count, f"isn't the {len(kinds)} layers of the pattern")
    types = named(cfg, "layers_block_type", kinds, (LINEAR, FULL, "mlp", "moe"))
    recurrent = mamba2(
        cfg, cfg.need("mamba_num_heads"), cfg.need("n_groups"), cfg.need("mamba_head_dim"),
        cfg.need("ssm_state_size"), cfg.need("conv_kernel"), activation="mamba_hidden_act",
    )  # fmt: skip
    for name in ("rope_theta", "partial_rotary_factor"):
        cfg.given(name)  # the publisher's files have them, and attention has no positions
    if cfg.given("attention_head_dim"):
        cfg.only("attention_head_dim", cfg.get("head_dim"))
    attention = Decoder(rope=no_rope)
    return stack(cfg, types, {FULL: attention, LINEAR: recurrent, "mlp": (), "moe": ()})


def recurrent_gemma(cfg: Config) -> Stack:
    """RG-LRU, and windowed attention."""
    kinds = cfg.items("block_types", str) or []
    if not kinds or set(kinds) - {"recurrent", "attention"}:
        raise cfg.error("block_types", kinds, "must list recurrent and attention")
    attention = Decoder(
        window=lambda cfg: cfg.need("attention_window_size"), rope=rotary(partial=0.5)
    )
    recurrent = gated_linear_unit(cfg)
    names = {"attention": SLIDING, "recurrent": LINEAR}
    types = [names[kinds[i % len(kinds)]] for i in range(cfg.need("num_hidden_layers"))]
    return stack(cfg, types, {SLIDING: attention, LINEAR: recurrent})


def _lfm2_types(cfg: Config, count: int) -> list[str]:
    attends = cfg.items("full_attn_idxs", int)
    return [FULL if attends is None or i in attends else CONV for i in range(count)]


def lfm2(cfg: Config) -> Stack:
    """Gated short convolutions, and attention."""
    for name, same in (
        ("conv_dim", "hidden_size"),
        ("conv_dim_out", "hidden_size"),
        ("block_dim", "hidden_size"),
        ("num_heads", "num_attention_heads"),
        ("theta", "rope_theta"),
    ):
        if cfg.get(name) is not None:
            cfg.only(name, cfg.get(same))
    cfg.only("use_pos_enc", True)
    attention = Decoder(head_dim=False)
    types = listed(cfg, _lfm2_types, FULL, CONV)
    return stack(cfg, types, {FULL: attention, CONV: short_convolution(cfg)})


def qwen3_next(cfg: Config) -> Stack:
    """Gated delta rules, and attention with a quarter of each head rotated."""
    cfg.only("use_sliding_window", False)
    return _gated(cfg, Decoder(rope=rotary(partial=0.25)))


def qwen3_5(cfg: Config) -> Stack:
    """Qwen3-Next's layers, whose positions have three axes."""
    return _gated(cfg, Decoder(rope=rotary(partial=0.25, sections=(11, 11, 10), interleaved=True)))


def _gated(cfg: Config, attention: Decoder) -> Stack:
    types = listed(cfg, every(4, "full_attention_interval", LINEAR), FULL, LINEAR)
    recurrent = gated_delta(cfg)
    return stack(cfg, types, {FULL: attention, LINEAR: recurrent})


def _minimax_types(cfg: Config, count: int) -> list[str]:
    kinds = cfg.items("attn_type_list", int, count)
    if kinds is None:
        return [FULL if (i + 1) % 2 else LINEAR for i in range(count)]
    if set(kinds) - {0, 1}:
        raise cfg.error("attn_type_list", kinds, "must list 0 (lightning) and 1 (softmax)")
    return [FULL if kind else LINEAR for kind in kinds]


def minimax(cfg: Config) -> Stack:
    """Lightning attention, and softmax attention."""

    def rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
        rotated = cfg.integer("rotary_dim")
        if cfg.model_type == "minimax":
            cfg.only("rotary_dim", size)  # transformers rotates whole heads whatever it says
        return read_rope(cfg, size, partial=rotated / size if rotated else None)

    attention = Decoder(window=window, rope=rope)
    types = listed(cfg, _minimax_types, FULL, LINEAR)
    full = attention.layer(cfg, 0, SLIDING)
    silu(cfg)
    linear = lightning(cfg, full.num_heads, full.head_size)
    return stack(cfg, types, {FULL: full, LINEAR: linear})


def kimi_linear(cfg: Config) -> Stack:
    """KDA, and MLA without positions."""
    count = cfg.need("num_hidden_layers")
    part = cfg.part("linear_attn_config") if cfg.get("linear_attn_config") is not None else None
    types = cfg.items("layer_types", str, count)
    full = (part.items("full_attn_layers", int) if part is not None else None) or []
    kda = (part.items("kda_layers", int) if part is not None else None) or []
    if types is None and (full or kda):
        if sorted([*full, *kda]) != list(range(1, count + 1)):
            raise cfg.error(
                "linear_attn_config",
                {"full_attn_layers": full, "kda_layers": kda},
                f"must name each of the layers 1 to {count} once",
            )
        types = [FULL if i + 1 in full else LINEAR for i in range(count)]
    elif types is None:
        types = [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    types = named(cfg, "layer_types", types, (FULL, LINEAR))
    cfg.only("mla_use_nope", True)
    attention = latent_attention(cfg, None)
    delta = kimi_delta(cfg, *kimi_sizes(cfg, part))
    return stack(cfg, types, {FULL: attention, LINEAR: delta})


def bailing_hybrid(cfg: Config) -> Stack:
    """Ling 2.5: KDA, and MLA whose neighbouring elements turn."""
    count, period = cfg.need("num_hidden_layers"), cfg.need("layer_group_size")
    types = layer_types(cfg, count, every(period, first=LINEAR), (FULL, LINEAR))
    rope = read_rope(cfg, cfg.need("qk_rope_head_dim"), pairing="gptj")
    heads, width = cfg.need("num_attention_heads"), cfg.need("short_conv_kernel_size")
    cfg.only("linear_num_heads", heads)
    cfg.only("linear_conv_kernel_dim", width)
    size = cfg.integer("linear_head_dim") or cfg.need("head_dim")
    delta = kimi_delta(cfg, heads, size, width)
    attention = latent_attention(cfg, rope)
    return stack(cfg, types, {FULL: attention, LINEAR: delta})


def olmo_hybrid(cfg: Config) -> Stack:
    """Gated delta rules, and attention that is rotated unless `rope_theta` is null."""
    count, heads = cfg.need("num_hidden_layers"), cfg.need("num_attention_heads")
    types = every(4, first=LINEAR)(cfg, count)
    if FULL not in types:
        types[-1] = FULL
    types = layer_types(cfg, count, lambda cfg, count: types, (FULL, LINEAR))
    params = cfg.get("rope_parameters")
    still = isinstance(params, dict) and "rope_theta" in params and params["rope_theta"] is None
    attention = Decoder(head_dim=False, rope=no_rope if still else rotary())
    groups = cfg.integer("linear_num_key_heads") or heads
    size = cfg.integer("linear_key_head_dim") or int(0.75 * cfg.need("hidden_size") / groups)
    cfg.values |= {
        "linear_num_key_heads": groups,
        "linear_key_head_dim": size,
        "linear_num_value_heads": cfg.integer("linear_num_value_heads") or heads,
        "linear_value_head_dim": cfg.integer("linear_value_head_dim") or 2 * size,
    }
    recurrent = gated_delta(cfg)
    return stack(cfg, types, {FULL: attention, LINEAR: recurrent})


READERS: dict[str, Reader] = {
    "bailing_hybrid": bailing_hybrid,
    "olmo_hybrid": olmo_hybrid,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "zamba": zamba,
    "zamba2": zamba2,
    "nemotron_h": nemotron_h,
    "recurrent_gemma": recurrent_gemma,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "minimax": minimax,
    "minimax_text_01": minimax,
    "minimax_m1": minimax,
    "kimi_linear": kimi_linear,
}
