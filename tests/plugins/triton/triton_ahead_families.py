"""Compiles the MLA and recurrent kernels ahead of time for a GPU that need not be here."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import AttentionKind, LayerSpec
from polyattn_triton.channels import (
    TOKEN_OPTIONS,
    channel_constants,
    chunk_constants,
    pair_constants,
    pair_options,
    walk_options,
)
from polyattn_triton.configs import SCANS, prompt_config
from polyattn_triton.delta import SYSTEM_OPTIONS, delta_constants, system_constants
from polyattn_triton.hopper.choice import DEFAULT_WARPS
from polyattn_triton.hopper.descriptors import NARROW, SHARED
from polyattn_triton.hopper.few_heads import few_heads_kernel
from polyattn_triton.hopper.latent_bytes import latent_bytes_kernel
from polyattn_triton.hopper.latents import latents_kernel
from polyattn_triton.kernels.channels import chunk_kernel, pair_kernel
from polyattn_triton.kernels.delta import delta_kernel, system_kernel
from polyattn_triton.kernels.mla import mla_kernel
from polyattn_triton.kernels.pieces import phi_kernel, unit_pieces_kernel
from polyattn_triton.kernels.scan import conv_kernel, gated_kernel
from polyattn_triton.kernels.selective import selective_kernel
from polyattn_triton.kernels.step import conv_drafts_kernel, mamba1_kernel, step_kernel
from polyattn_triton.kernels.token import channel_kernel, unit_kernel
from polyattn_triton.launch import launches_early
from polyattn_triton.mla import (
    FEW_HEADS,
    FEW_HEADS_OPTIONS,
    HALF,
    ROPE,
    latents_constants,
    mla_config,
    mla_constants,
    mla_hopper_kernel,
)
from polyattn_triton.plan import Way
from polyattn_triton.scan import scan_constants
from polyattn_triton.selective import (
    OPTIONS,
    selective_configs,
    selective_constants,
    widest_words,
)
from polyattn_triton.token_scan import (
    piece_constants,
    piece_options,
    token_constants,
    token_options,
)
from triton_ahead import CACHE, ELEMENT, compile_kernel

PREFILLS = {
    AttentionKind.SHORT_CONV: conv_kernel,
    AttentionKind.MAMBA1: selective_kernel,
    AttentionKind.MAMBA2: gated_kernel,
    AttentionKind.LINEAR: gated_kernel,
    AttentionKind.GDN: delta_kernel,
}
DECODES = {AttentionKind.SHORT_CONV: conv_kernel, AttentionKind.MAMBA1: mamba1_kernel}
"""Kinds whose decode isn't `step_kernel`'s."""
OPTIONAL = frozenset({"D", "dt_bias", "bias"})


def compile_mla(spec: LayerSpec, arch: str, split: bool, few: int = 0, block_size: int = 64) -> Any:
    """Compile TRITON_MLA's kernel (TRITON_MLA_SPARSE's for a sparse layer) to machine code."""
    assert spec.latent is not None
    element = ELEMENT[spec.dtype]
    cached = CACHE.get(spec.kv_cache_dtype, element)
    if cached == "fp8e4nv" and arch == "gfx942":
        cached = "fp8e4b8"  # the FNUZ flavour is what this hardware computes
    config = mla_config(spec, arch)
    constants = mla_constants(
        spec, config, block_size, Way(split, few), spec.sparse is not None, spec.needs_lse,
        launches_early(arch),
    )  # fmt: skip
    pointers = {"Q": element, "KV": cached, "OUT": element}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = mla_hopper_kernel if config.hopper else mla_kernel
    return compile_kernel(kernel, pointers, constants, arch, options)


def compile_latents(spec: LayerSpec, few: int, block_size: int = 64) -> Any:
    """Compile TRITON_MLA's kernel with roles, or over e4m3, to Hopper's machine code."""
    element, box, way = ELEMENT[spec.dtype], min(64, block_size), Way(True, few)
    kernel, options, narrow = latents_kernel, {"num_warps": DEFAULT_WARPS}, (ROPE, SHARED)
    constants = latents_constants(spec, block_size, way, spec.needs_lse)
    cached = element
    if spec.num_heads <= FEW_HEADS and not few:
        kernel, options = few_heads_kernel, FEW_HEADS_OPTIONS
    if spec.stored_dtype != spec.dtype:
        cached, narrow = "i16", (ROPE // 2, NARROW)
        kernel = latent_bytes_kernel
    pointers = {
        name: f"tensordesc<{cached}[{box}, {width}],{layout!r}>"
        for name, (width, layout) in (("WIDE", (HALF, SHARED)), ("NARROW", narrow))
    }
    pointers |= {"Q": element, "OUT": element}
    return compile_kernel(kernel, pointers, constants, "sm_90", options)


def compile_token_scan(spec: LayerSpec, arch: str, part: str = "") -> Any:
    """Compile TRITON_TOKEN_SCAN's kernel of a recurrent layer to machine code.

    `part`: of its prompts' kernel; else by the token.
    """
    element = ELEMENT[spec.dtype]
    names = ("X", "INPUT_GATE", "RECURRENT_GATE", "Q", "K", "V", "BETA", "A", "B", "OUT")
    pointers = dict.fromkeys(names, element)
    pointers |= dict.fromkeys(("STARTS", "SEQ_LENS", "PIECE_SEQ", "PIECE_START"), "i32")
    pointers |= {"STATE_SLOTS": "i64", "TARGETS": "i64"}
    units = spec.kind is AttentionKind.RG_LRU
    if part:
        kernel = unit_pieces_kernel if units else phi_kernel
        constants = piece_constants(spec, part)
        return compile_kernel(kernel, pointers, constants, arch, piece_options(spec))
    kernel = unit_kernel if units else channel_kernel
    return compile_kernel(kernel, pointers, token_constants(spec), arch, token_options(spec))


def compile_channels(spec: LayerSpec, arch: str, phase: str) -> Any:
    """Compile one of TRITON_SCAN's kernels for KDA or RWKV-7: "pairs", "prefill" or "decode"."""
    element = ELEMENT[spec.dtype]
    pointers = dict.fromkeys(("Q", "K", "V", "G", "BETA", "A", "B", "WORK", "OUT"), element)
    names = ("STARTS", "SEQ_LENS", "TILE_SEQ", "TILE_START")
    pointers |= dict.fromkeys(names, "i32") | {"STATE_SLOTS": "i64", "TARGETS": "i64"}
    if phase == "decode":
        constants = channel_constants(spec)
        return compile_kernel(channel_kernel, pointers, constants, arch, TOKEN_OPTIONS)
    if phase == "pairs":
        return compile_kernel(
            pair_kernel, pointers, pair_constants(spec, arch), arch, pair_options(spec, arch)
        )
    options = walk_options(spec, arch)
    return compile_kernel(chunk_kernel, pointers, chunk_constants(spec, arch), arch, options)


def compile_scan(spec: LayerSpec, arch: str, phase: str) -> Any:
    """Compile TRITON_SCAN's kernel for prefill, decode or drafts of a recurrent layer to machine code.

    Mamba-1 has two prefills more, "left" and "out": `selective_kernel`'s parts; the delta rule "system".
    KDA and RWKV-7 have kernels of their own: `compile_channels`.
    """
    kind, element = spec.kind, ELEMENT[spec.dtype]
    kernel = PREFILLS[kind]
    if phase in ("decode", "drafts"):
        kernel = DECODES.get(kind, step_kernel)
    if phase == "drafts" and kind is AttentionKind.SHORT_CONV:
        kernel = conv_drafts_kernel
    given = OPTIONAL if kind is not AttentionKind.LINEAR else frozenset()
    if phase == "system":
        kernel, constants = system_kernel, system_constants(spec, arch)
    elif phase == "prefill" and kernel is delta_kernel:
        constants = delta_constants(spec, arch)
    elif phase in ("left", "out"):
        assert spec.recurrent is not None
        first = selective_configs(spec.recurrent.state_size)[0]
        constants = selective_constants(spec, first, widest_words(spec), (True, True), phase)
    else:
        constants = scan_constants(spec, phase, given)
    names = ("X", "OUT", "DT", "B", "C", "Q", "K", "V", "BETA", "Z", "WORK")
    pointers = dict.fromkeys(names, element)
    pointers |= dict.fromkeys(
        ("STARTS", "SEQ_LENS", "TILE_SEQ", "TILE_START", "PIECE_SEQ", "PIECE_START"), "i32"
    )
    pointers["STATE_SLOTS"] = pointers["TARGETS"] = "i64"
    pointers["STATE"] = element if kind is AttentionKind.SHORT_CONV else "fp32"
    options = {"num_warps": 4}
    if kernel is selective_kernel:
        options = OPTIONS
    elif kernel is system_kernel:
        options = SYSTEM_OPTIONS
    elif kernel is delta_kernel:
        config = prompt_config(spec, arch)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    elif kind is not AttentionKind.SHORT_CONV:
        config = SCANS[kind, "decode" if phase in ("decode", "drafts") else "prefill"]
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(kernel, pointers, constants, arch, options)
