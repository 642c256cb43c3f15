"""Decoder-only models from before Llama: learned positions, ALiBi, names of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from polyattn import RopeSpec

from polyattn_models.attention import Decoder, head_sizes, no_rope
from polyattn_models.config import Config, unknown_choice
from polyattn_models.encoders import RELATIVE_BIAS
from polyattn_models.layers import Missing, Reader, Stack, spec_of, unserved
from polyattn_models.rotary import read_rope

HASHED = "attention within buckets of a hash that is drawn at random in each call"


def gptj_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """`rotary_dim` elements of a head are rotated, in neighbouring pairs."""
    return RopeSpec(pairing="gptj", rotary_size=cfg.integer("rotary_dim") or size)


def neox_rope(usual: float) -> Callable[[Config, int, int, str], RopeSpec]:
    """GPT-NeoX's own names: `rotary_pct`, what part of a head is rotated, and `rotary_emb_base`."""

    def rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
        part = cfg.number("rotary_pct", usual)
        cfg.only("partial_rotary_factor", part)
        return read_rope(cfg, size, partial=part, theta=cfg.number("rotary_emb_base", 10000.0))

    return rope


def clockwise_rope(cfg: Config, size: int, index: int, kind: str) -> RopeSpec:
    """Halves of a head turn the other way."""
    return dataclasses.replace(read_rope(cfg, size), clockwise=True)


def diffllama(cfg: Config) -> Stack:
    """Two KV heads, of one half each, share a value as wide as both; the model takes the difference."""
    layers = Decoder()(cfg)
    if layers[0].num_kv_heads % 2:
        raise cfg.error("num_key_value_heads", layers[0].num_kv_heads, "must be even")
    return [layer.replace(v_head_size=2 * layer.head_size) for layer in layers]


def dbrx(cfg: Config) -> Stack:
    """KV heads and the base of the rotation are said in `attn_config`."""
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    part = cfg.part("attn_config", "dbrx_attention")
    for name in ("attn_pdrop", "clip_qkv", "model_type"):
        part.get(name)
    theta = part.number("rope_theta", 10000.0)
    kv_heads = part.integer("kv_n_heads") or 1
    spec = spec_of(cfg, heads, size, num_kv_heads=kv_heads, rope=read_rope(cfg, size))
    if spec.rope is not None and spec.rope.base != theta:
        raise part.error("rope_theta", theta, f"isn't rope_parameters.rope_theta={spec.rope.base}")
    return [spec] * cfg.need("num_hidden_layers")


def gpt2_scale(cfg: Config, size: int, index: int) -> float:
    """The scale may be off, or fall with the layer's index."""
    scale = size**-0.5 if cfg.flag("scale_attn_weights", True) else 1.0
    return scale / (index + 1) if cfg.flag("scale_attn_by_inverse_layer_idx") else scale


def _embedded_heads(cfg: Config) -> tuple[int, int]:
    """Return the heads and their size where the width may be called `n_embed`."""
    heads, width = cfg.need("num_attention_heads"), cfg.need("n_embed", "hidden_size")
    if width % heads:
        raise cfg.error("hidden_size", width, f"isn't divisible by num_attention_heads={heads}")
    return heads, width // heads


def falcon(cfg: Config) -> Stack:
    """One KV head, or as many as the newer architecture says; ALiBi or a rotation."""
    heads, size = _embedded_heads(cfg)
    grouped = cfg.flag("new_decoder_architecture") or not cfg.flag("multi_query", True)
    kv_heads = (cfg.integer("num_kv_heads") or heads) if grouped else 1
    count = cfg.need("num_hidden_layers")
    if cfg.flag("alibi"):
        return [Missing("ALiBi that is scaled together with the logits")] * count
    spec = spec_of(cfg, heads, size, num_kv_heads=kv_heads, rope=read_rope(cfg, size))
    return [spec] * count


def bloom(cfg: Config) -> Stack:
    """ALiBi."""
    heads, size = _embedded_heads(cfg)
    cfg.get("offset_alibi")  # no code has ever used it
    return [spec_of(cfg, heads, size, alibi=True)] * cfg.need("num_hidden_layers")


def mpt(cfg: Config) -> Stack:
    """ALiBi or learned positions, said in `attn_config`."""
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    part = cfg.part("attn_config", "mpt_attention")
    part.only("attn_type", "multihead_attention")
    part.only("prefix_lm", False)
    part.only("alibi_bias_max", 8)
    part.only("qk_ln", False)
    part.only("attn_uses_sequence_id", False)
    for name in ("attn_impl", "attn_pdrop", "clip_qkv", "model_type"):
        part.get(name)
    scale, alibi = part.number("softmax_scale") or 0.0, part.flag("alibi", True)
    spec = spec_of(cfg, heads, size, scale=scale, alibi=alibi)
    return [spec] * cfg.need("num_hidden_layers")


def gpt_bigcode(cfg: Config) -> Stack:
    """GPT-2 with one KV head, where `multi_query` says so."""
    shared = cfg.flag("multi_query", True)
    cfg.only("num_key_value_heads", 1 if shared else cfg.need("num_attention_heads"))
    cfg.only("scale_attn_by_inverse_layer_idx", False)
    return [spec.replace(num_kv_heads=1 if shared else spec.num_heads) for spec in GPT2(cfg)]


def gpt_neo(cfg: Config) -> Stack:
    """A scale of 1, and local layers whose window is `window_size`."""
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    count = cfg.need("num_hidden_layers")
    stated = cfg.get("attention_types", default=[[["global", "local"], 12]])
    kinds: list[str] = []
    try:
        for names, repeat in stated:
            kinds += list(names) * min(repeat, count + 1)
    except (TypeError, ValueError):
        raise cfg.error("attention_types", stated, "must be [[[kind, …], count], …]") from None
    if len(kinds) != count:
        raise cfg.error(
            "attention_types", stated, f"is of {len(kinds)} layers, the model has {count}"
        )
    cfg.only("attention_layers", kinds)
    windows = {"global": None, "local": cfg.need("window_size")}
    for kind in kinds:
        if kind not in windows:
            raise unknown_choice(cfg, "attention_types", kind, list(windows))
    spec = spec_of(cfg, heads, size, scale=1.0)
    return [spec.replace(sliding_window=windows[kind]) for kind in kinds]


LEARNED = Decoder(head_dim=False, kv_heads=False, rope=no_rope)
GPT2 = Decoder(
    head_dim=False,
    kv_heads=False,
    rope=no_rope,
    scale=gpt2_scale,
    only={"add_cross_attention": (False,)},
)

READERS: dict[str, Reader] = {
    **dict.fromkeys(("gpt2", "gpt-sw3"), GPT2),
    **dict.fromkeys(("opt", "biogpt", "openai-gpt", "ctrl"), LEARNED),
    "xglm": Decoder(
        head_dim=False, kv_heads=False, rope=no_rope, only={"add_cross_attention": (False,)}
    ),
    "gpt_neox_japanese": Decoder(kv_heads=False, head_dim=False, rope=neox_rope(1.0)),
    "codegen": Decoder(kv_heads=False, head_dim=False, rope=gptj_rope),
    "dbrx": dbrx,
    "cpmant": unserved(RELATIVE_BIAS),
    "nanochat": Decoder(head_dim=False, rope=clockwise_rope),
    "diffllama": diffllama,
    "doge": unserved("a learned bias for each key"),
    "reformer": unserved(HASHED),
    "xlnet": unserved("two streams with a relative position bias"),
    "gpt_neox": Decoder(kv_heads=False, head_dim=False, rope=neox_rope(0.25)),
    "gptj": Decoder(kv_heads=False, head_dim=False, rope=gptj_rope),
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "falcon": falcon,
    "bloom": bloom,
    "mpt": mpt,
}
