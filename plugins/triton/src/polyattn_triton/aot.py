"""Compiles the kernels ahead of time for a GPU that need not be here."""

from __future__ import annotations

from typing import Any

import triton
from polyattn import LayerSpec
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from polyattn_triton.attention import decode_constants, prefill_constants, tile_config
from polyattn_triton.decode import decode_kernel, merge_kernel
from polyattn_triton.launch import launches_early, merge_constants
from polyattn_triton.prefill import prefill_kernel
from polyattn_triton.store import write_kernel

ELEMENT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CACHE = {"int8": "i8", "fp8_e4m3": "fp8e4nv", "fp8_e5m2": "fp8e5"}
PHASES = ("prefill", "paged", "decode", "split", "merge", "write")


def target_of(arch: str) -> GPUTarget:
    """Return Triton's target for `sm_90` or `gfx942`."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64)


def compile_phase(spec: LayerSpec, arch: str, phase: str, block_size: int = 16) -> Any:
    """Compile one of `PHASES` of TRITON_ATTN down to machine code.

    Returns Triton's compiled kernel, whose `asm` holds `cubin` or `hsaco`. Raises what Triton
    raises when the target can't do it.
    """
    query = ELEMENT[spec.dtype]
    cached = CACHE.get(spec.kv_cache_dtype, query)
    if cached == "fp8e4nv" and arch == "gfx942":
        cached = "fp8e4b8"  # the FNUZ flavour is what this hardware computes
    if phase in ("merge", "write"):
        return _compile_small(spec, arch, phase, query, cached, block_size)
    decode = phase in ("decode", "split")
    config = tile_config(spec, arch, "few" if phase == "split" else phase)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    keys = query if phase == "prefill" else cached
    pointers = {"Q": query, "K": keys, "V": keys, "OUT": query, "BT": "i32", "SEQ_LENS": "i32"}
    if decode:
        alike = spec.head_size == spec.v_head_size
        constants = decode_constants(
            spec, config, block_size, phase == "split", spec.needs_lse, arch, alike
        )
        return compile_kernel(decode_kernel, pointers | {"DONE": "i32"}, constants, arch, options)
    paged = phase == "paged"
    constants = prefill_constants(spec, config, block_size if paged else 1, paged, spec.needs_lse)
    pointers |= {"STARTS": "i32", "KEY_STARTS": "i32", "TILE_SEQ": "i32", "TILE_START": "i32"}
    return compile_kernel(prefill_kernel, pointers, constants, arch, options)


def _compile_small(
    spec: LayerSpec,
    arch: str,
    phase: str,
    query: str,
    cached: str,
    block_size: int,
) -> Any:
    if phase == "merge":
        constants: tuple[Any, ...] = merge_constants(
            spec.num_heads, spec.v_head_size, 64, spec.learned_sinks, spec.needs_lse,
            launches_early(arch),
        )  # fmt: skip
        return compile_kernel(merge_kernel, {"OUT": query}, constants, arch, {"num_warps": 2})
    width = spec.num_kv_heads * max(spec.head_size, spec.v_head_size)
    constants = (
        spec.num_kv_heads, spec.head_size, spec.v_head_size, triton.next_power_of_2(width),
        block_size, cached != query, cached == "i8", False,
    )  # fmt: skip
    pointers = {"KEY": query, "VALUE": query, "K": cached, "V": cached, "SLOTS": "i64"}
    return compile_kernel(write_kernel, pointers, constants, arch, {"num_warps": 4})


FREE = {"lse_t", "bt_s", "bt_end", "table_s", "splits", "st_k", "st_v"}
FLOATS = {"scale", "v_scale", "soft_cap", "k_scale", "limit"}


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: tuple[Any, ...],
    arch: str,
    options: dict[str, int],
) -> Any:
    names = kernel.arg_names
    fixed = dict(zip(names[-len(constants) :], constants, strict=True))
    signature = {}
    for name in names:
        if name in fixed:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name.isupper():
            signature[name] = f"*{pointers.get(name, 'fp32')}"
        else:
            signature[name] = "i32"
    # As a launch finds them: aligned pointers, strides that are multiples of 16. Without these no
    # load is vectorised, and what is compiled is not what runs.
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in fixed and name not in FLOATS and name not in FREE
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, fixed, attrs)
    return triton.compile(source, target=target_of(arch), options=options)
