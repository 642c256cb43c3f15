"""Recurrent layers, and models whose every layer is one."""

from __future__ import annotations

import math
from typing import Any

from polyattn import AttentionKind, LayerSpec, RecurrentSpec

from polyattn_models.config import Config
from polyattn_models.layers import Reader, Stack, spec_of, unserved


def recurrence(
    cfg: Config, kind: AttentionKind, heads: int, size: int, form: RecurrentSpec, **more: Any
) -> LayerSpec:
    """Return a recurrent layer; `more`: fields of `LayerSpec`."""
    return spec_of(cfg, heads, size, kind=kind, recurrent=form, **more)


def mamba1(
    cfg: Config,
    channels: int,
    state: int,
    width: int,
    groups: int = 1,
    activation: str = "hidden_act",
) -> LayerSpec:
    """Return a Mamba-1 layer; `groups` of its channels each have a B and a C of their own.

    `activation` names the field of the convolution's.
    """
    silu(cfg, activation)
    form = RecurrentSpec(
        state_size=state, conv_width=width, activation="silu", channel_groups=groups
    )
    return recurrence(cfg, AttentionKind.MAMBA1, channels, 1, form)


def mamba2(
    cfg: Config,
    heads: int,
    groups: int,
    head_size: int,
    state: int,
    width: int,
    activation: str = "hidden_act",
) -> LayerSpec:
    """Return a Mamba-2 layer; `activation` names the field of the convolution's.

    Raises `ConfigError` where the step size is clamped.
    """
    limit = cfg.get("time_step_limit")
    if limit is not None and list(limit) not in ([0.0, math.inf], [0, "Infinity"], [0.0, 1e308]):
        raise cfg.error("time_step_limit", limit, "can't be served; only [0, Infinity] is")
    if activation:
        silu(cfg, activation)
    if heads % groups:
        raise cfg.error("n_groups", groups, f"doesn't divide the {heads} heads")
    form = RecurrentSpec(state_size=state, conv_width=width, activation="silu")
    return recurrence(cfg, AttentionKind.MAMBA2, heads, head_size, form, num_kv_heads=groups)


def silu(cfg: Config, name: str = "hidden_act") -> str:
    """Return the activation after the convolution. Raises `ConfigError` where it isn't SiLU."""
    cfg.only(name, "silu", "swish")
    return "silu"


def gated_delta(cfg: Config) -> LayerSpec:
    """Return a gated delta rule (Qwen3-Next)."""
    heads, groups = cfg.need("linear_num_value_heads"), cfg.need("linear_num_key_heads")
    if heads % groups:
        raise cfg.error("linear_num_key_heads", groups, f"doesn't divide the {heads} value heads")
    size = cfg.need("linear_key_head_dim")
    values, width = cfg.need("linear_value_head_dim"), cfg.need("linear_conv_kernel_dim")
    form = RecurrentSpec(state_size=size, conv_width=width, activation=silu(cfg), qk_norm=True)
    return recurrence(
        cfg, AttentionKind.GDN, heads, size, form, num_kv_heads=groups, v_head_size=values
    )


def lightning(cfg: Config, heads: int, size: int) -> LayerSpec:
    """Return lightning attention (MiniMax)."""
    return recurrence(
        cfg, AttentionKind.LINEAR, heads, size, RecurrentSpec(state_size=size), scale=1.0
    )


def kimi_sizes(cfg: Config, part: Config | None) -> list[int]:
    """Return the heads, their size and the convolution's width, which may be in a part of their own."""
    return [
        (part.integer(own) if part is not None else None) or cfg.need(name)
        for own, name in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    ]


def kimi_delta(cfg: Config, heads: int, size: int, width: int) -> LayerSpec:
    """Return Kimi delta attention (Kimi Linear)."""
    form = RecurrentSpec(state_size=size, conv_width=width, activation=silu(cfg), qk_norm=True)
    return recurrence(cfg, AttentionKind.KDA, heads, size, form)


def gated_linear_unit(cfg: Config) -> LayerSpec:
    """Return RG-LRU (RecurrentGemma)."""
    channels, blocks = cfg.integer("lru_width"), cfg.need("num_attention_heads")
    channels = cfg.need("hidden_size") if channels is None else channels
    if channels % blocks:
        raise cfg.error("lru_width", channels, f"is no multiple of num_attention_heads={blocks}")
    form = RecurrentSpec(conv_width=cfg.need("conv1d_width"))
    return recurrence(cfg, AttentionKind.RG_LRU, channels, 1, form)


def short_convolution(cfg: Config) -> LayerSpec:
    """Return a gated short convolution (LFM2)."""
    channels, form = cfg.need("hidden_size"), RecurrentSpec(conv_width=cfg.need("conv_L_cache"))
    return recurrence(cfg, AttentionKind.SHORT_CONV, channels, 1, form)


def widened(cfg: Config, *names: str) -> int:
    """Return the channels that `expand` makes of the hidden size."""
    factor = next((f for f in (cfg.number(name) for name in names) if f is not None), 2.0)
    return int(factor * cfg.need("hidden_size"))


def _mamba(cfg: Config) -> Stack:
    channels = cfg.integer("intermediate_size") or widened(cfg, "expand")
    for name, value in (
        ("d_inner", channels),
        ("d_model", cfg.need("hidden_size")),
        ("ssm_cfg", {}),
        ("n_layer", cfg.need("num_hidden_layers")),
    ):
        cfg.only(name, value)
    layer = mamba1(cfg, channels, cfg.need("state_size"), cfg.need("conv_kernel"))
    return [layer] * cfg.need("num_hidden_layers")


def _mamba2(cfg: Config) -> Stack:
    heads, size = cfg.need("num_heads"), cfg.need("head_dim")
    if widened(cfg, "expand") != heads * size:
        raise cfg.error("num_heads", heads, f"x head_dim={size} isn't expand x hidden_size")
    layer = mamba2(
        cfg, heads, cfg.need("n_groups"), size, cfg.need("state_size"), cfg.need("conv_kernel")
    )
    return [layer] * cfg.need("num_hidden_layers")


RWKV_BESIDE = (
    "num_attention_heads", "head_size_divisor", "layer_norm_epsilon", "rescale_every",
    "context_length",
)  # fmt: skip
"""Fields of RWKV-5 and RWKV-6 that their recurrence doesn't depend on: heads are `head_size` wide, and
`num_attention_heads` is 64 in files of every size."""
FLA_BESIDE = (
    "attn_mode", "hidden_ratio", "gate_low_rank_dim", "norm_first", "norm_bias", "norm_eps",
    "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
)  # fmt: skip
"""Fields of fla's configs that RWKV's recurrences don't depend on."""
RWKV7_BESIDE = (*FLA_BESIDE, "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")


def _rwkv6(cfg: Config) -> Stack:
    """RWKV-6, in its publisher's fields or fla's; and RWKV-5.2, whose decay is a parameter.

    A file of fla's has `num_heads`. fla scales no query, as the publisher doesn't.
    """
    if "num_heads" in cfg.values:
        cfg.get(*FLA_BESIDE, "proj_low_rank_dim")
        cfg.only("attn")
        heads = cfg.need("num_heads")
        keys, values = _expanded(cfg, "expand_k", 0.5), _expanded(cfg, "expand_v", 1.0)
    else:
        cfg.get(*RWKV_BESIDE)
        cfg.only("model_version", "5_2", "6_0")
        hidden = cfg.need("attention_hidden_size", "hidden_size")
        keys = cfg.integer("head_size") or 64
        if hidden % keys:
            raise cfg.error("head_size", keys, f"doesn't divide attention_hidden_size={hidden}")
        heads, values = hidden // keys, keys
    form = RecurrentSpec(state_size=keys)
    layer = recurrence(cfg, AttentionKind.RWKV6, heads, keys, form, v_head_size=values, scale=1.0)
    return [layer] * cfg.need("num_hidden_layers")


def _expanded(cfg: Config, name: str, usual: float) -> int:
    """Return a head's share of `hidden_size` times a factor."""
    factor, heads = cfg.number(name, usual), cfg.need("num_heads")
    assert factor is not None
    size = factor * cfg.need("hidden_size") / heads
    if size < 1 or size != int(size):
        raise cfg.error(name, factor, f"x hidden_size isn't a multiple of num_heads={heads}")
    return int(size)


def _rwkv7(cfg: Config) -> Stack:
    """RWKV-7, in the fields of its published configs (fla's); `attn` would mix in attention."""
    cfg.get(*RWKV7_BESIDE)
    cfg.only("attn")
    hidden, count = cfg.need("hidden_size"), cfg.need("num_hidden_layers")
    size, heads = cfg.integer("head_dim"), cfg.integer("num_heads")
    if size is None:  # the class has 64 where the file has no such field
        size = hidden // heads if heads and "head_dim" in cfg.values else 64
    if hidden % size:
        raise cfg.error("hidden_size", hidden, f"isn't divisible by head_dim={size}")
    if heads is not None and heads * size != hidden:
        raise cfg.error("num_heads", heads, f"x head_dim={size} isn't hidden_size={hidden}")
    value = cfg.get("value_dim", default=hidden)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or any(type(v) is not int or v < 1 or v % hidden for v in values):
        raise cfg.error(
            "value_dim", value, f"must be multiples of hidden_size={hidden}, one a layer"
        )
    form = RecurrentSpec(state_size=size)
    layer = recurrence(cfg, AttentionKind.RWKV7, hidden // size, size, form, scale=1.0)
    return [layer.replace(v_head_size=v * size // hidden) for v in values]


READERS: dict[str, Reader] = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "rwkv": unserved("the RWKV-4 recurrence"),
    "rwkv5": _rwkv6,
    "rwkv6": _rwkv6,
    "rwkv7": _rwkv7,
    "xlstm": unserved("the mLSTM recurrence"),
}
