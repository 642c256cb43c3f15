"""Compiles the kernels ahead of time for a GPU that need not be here."""

from __future__ import annotations

from typing import Any

import triton
from machine_code import code_of, read_unwritten
from polyattn.device import Device
from polyattn.kernel import Invariance, KVCache, LayerSpec
from polyattn.selection.cache_format import format_of
from polyattn.spec.row_format import is_rows, rows_of
from polyattn_triton.configs import HOPPER_PIPES, PrefixConfig
from polyattn_triton.functions.pointwise import NOTHING, Generated
from polyattn_triton.functions.row_writers import writer
from polyattn_triton.functions.rows import NO_ROWS, Rows, by_hand
from polyattn_triton.hopper.packed import packed_kernel
from polyattn_triton.hopper.packing import packed_config, packed_constants, packed_options
from polyattn_triton.hopper.widening import copy_constants
from polyattn_triton.kernels.decode import decode_kernel
from polyattn_triton.kernels.four_bit_store import four_bit_constants, write_four_kernel
from polyattn_triton.kernels.parts import merge_kernel
from polyattn_triton.kernels.prefill import prefill_kernel
from polyattn_triton.kernels.prefix import merge_parts_kernel, prefix_kernel
from polyattn_triton.kernels.rotated_store import rotate_constants, rotate_store_kernel
from polyattn_triton.kernels.row_store import OPTIONS as OF_WRITERS
from polyattn_triton.kernels.row_store import write_rows_kernel
from polyattn_triton.kernels.tile_lists import list_kernel
from polyattn_triton.kernels.widen import widen_kernel
from polyattn_triton.launch import Merge, launches_early, merge_options
from polyattn_triton.store import write_kernel
from polyattn_triton.variants import (
    SCALES,
    WAYS,
    decode_constants,
    list_constants,
    merging_constants,
    most_merged_by_one,
    part_rows,
    parts_constants,
    prefill_constants,
    prefix_constants,
    prefix_tiles,
    steps_config,
    tile_config,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

ELEMENT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CACHE = {"int8": "i8", "fp8_e4m3": "fp8e4nv", "fp8_e5m2": "fp8e5"}
MERGES = {"merge": "pieces", "merge listed": "listed", "merge many": "many", "merge wide": "many"}
"""What merges parts, each with the way of a plan that cut them: tiles of rows, stretches, even splits."""
OTHERS = ("paged", "paged pieces", *MERGES, "write")
"""Beside `variants.WAYS`: prefill over pages, and the kernels that merge and store."""
SHARED = ("prefix low", "prefix high", "prefix several", "prefix merge")
"""Shared prefixes: decodes with the lowest and the highest tiles, rows of several tokens, the merge."""
LISTED = ("paged listed", "paged pieces listed", "list")
"""And where masks are asked which key tiles there are, which the last does."""
OF_ROWS = ("k_b", "k_t", "k_h", "v_b", "v_t", "v_h")
"""Strides that are multiples of a row's bytes, where the cache has rows."""
FEW_TOKENS = 4
"""Query tokens of a sequence in what is compiled for a few."""


def target_of(arch: str) -> GPUTarget:
    """Return Triton's target for `sm_90` or `gfx942`."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64)


def phases_of(spec: LayerSpec, arch: str) -> tuple[str, ...]:
    """Return what there is to compile: what `TRITON_ATTN` runs for this layer on `arch`."""
    alone = spec.chunk_size or spec.sink_tokens or spec.rope or spec.variant or spec.mask
    masked = LISTED if Generated.of_mask(spec) is not None else ()
    # Where a program merges no splits, a kernel merges few of them too.
    ways = [way for way in WAYS if way != "split" or most_merged_by_one(spec, arch)]
    return (*ways, *OTHERS, *masked, *(() if alone else SHARED))


def compile_phase(spec: LayerSpec, arch: str, phase: str, block_size: int = 16) -> Any:
    """Compile one of TRITON_ATTN's phases (`phases_of`), or `"rotate"`, down to machine code.

    Returns Triton's compiled kernel, whose `asm` holds `cubin` or `hsaco`. Raises what Triton
    raises when the target can't do it.
    """
    query = ELEMENT[spec.dtype]
    cached = "u8" if is_rows(spec.kv_cache_dtype) else CACHE.get(spec.kv_cache_dtype, query)
    if cached == "fp8e4nv" and arch == "gfx942":
        cached = "fp8e4b8"  # the FNUZ flavour is what this hardware computes
    if phase in SHARED:
        return _compile_shared(spec, arch, phase, query, cached, block_size)
    if phase == "list":
        return _compile_lists(spec, arch)
    if phase in (*MERGES, "write", "rotate"):
        return _compile_small(spec, arch, phase, query, cached, block_size)
    phase, listed = phase.removesuffix(" listed"), phase.endswith(" listed")
    way = phase.removeprefix("paged ") if phase != "paged" else "prefill"
    eight = CACHE["fp8_e4m3"]
    given = query if spec.qkv_dtype == "auto" else eight
    pointers = {"Q": given, "OUT": query if spec.out_dtype == "auto" else eight}
    generated = Generated.of(spec)
    functions = NOTHING if generated is None else generated.constants
    if way in ("prefill", "pieces"):
        paged = phase.startswith("paged")
        config = tile_config(spec, arch, "paged" if paged else "prefill")
        if spec.batch_invariant >= Invariance.STEPS:
            config = steps_config(spec, arch)
        pointers |= dict.fromkeys(("K", "V"), cached if paged else given)
        constants = prefill_constants(
            spec,
            config,
            block_size if paged else 1,
            paged,
            way == "pieces",
            spec.needs_lse,
            arch,
            functions,
            generated.where_seen if generated is not None and listed else None,
            read=rows_constants(spec, block_size, False) if paged else NO_ROWS,
        )
        kernel: Any = prefill_kernel
    else:
        rows = FEW_TOKENS * spec.gqa_ratio if way == "few" else 0
        config = tile_config(spec, arch, "decode" if way == "decode" else "few", rows)
        pointers |= dict.fromkeys(("K", "V"), cached)
        alike = spec.head_size == spec.v_head_size
        constants = decode_constants(
            spec, config, block_size, way, spec.needs_lse, arch, alike,
            cached in CACHE.values(), functions, read=rows_constants(spec, block_size, True),
        )  # fmt: skip
        kernel = decode_kernel
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(kernel, pointers, constants, arch, options)


def rows_constants(spec: LayerSpec, block_size: int, apart: bool) -> tuple[Any, ...]:
    """Return how the cache's rows are read where they lie as `KVCache.allocate` lays them."""
    if not spec.cached or not is_rows(spec.kv_cache_dtype):
        return NO_ROWS
    form = format_of(spec, Device("cuda", "sm_90"), "NHD", block_size)
    rows = Rows.of(form, KVCache.allocate(form, 1).alignment, spec.dtype)
    assert rows is not None
    return rows.constants(apart)


def _compile_shared(
    spec: LayerSpec, arch: str, phase: str, query: str, cached: str, block_size: int
) -> Any:
    if phase == "prefix merge":
        constants = parts_constants(spec, spec.needs_lse, launches_early(arch))
        return compile_kernel(merge_parts_kernel, {"OUT": query}, constants, arch, {"num_warps": 4})
    config = prefix_tiles(spec, arch)[0 if phase == "prefix low" else -1]
    several = phase == "prefix several"
    return compile_prefix(spec, arch, config, query, cached, block_size, several)


def compile_prefix(
    spec: LayerSpec, arch: str, config: PrefixConfig, query: str, cached: str, block_size: int = 16,
    several: bool = False,
) -> Any:  # fmt: skip
    """Compile decodes over shared prefixes in one configuration; `query`, `cached`: element types.

    `several`: rows of several tokens instead.
    """
    alike = spec.head_size == spec.v_head_size
    rows = rows_constants(spec, block_size, False)
    constants = prefix_constants(spec, config, block_size, arch, alike, rows, several)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    pointers = {"Q": query, "K": cached, "V": cached}
    return compile_kernel(prefix_kernel, pointers, constants, arch, options)


def _compile_lists(spec: LayerSpec, arch: str) -> Any:
    masks = Generated.of_mask(spec)
    assert masks is not None
    config = tile_config(spec, arch, "paged")
    constants = list_constants(spec, config.block_m, config.block_n, masks.constants)
    pointers = {"LISTS": "i32", "INPUTS": "i64"}
    return compile_kernel(list_kernel, pointers, constants, arch, {"num_warps": 4})


def compile_hopper(spec: LayerSpec, block_size: int, split: bool) -> Any:
    """Compile TRITON_ATTN's own prefill for Hopper; `split`: in pieces.

    `block_size` 0: over keys by token.
    Raises LookupError where it doesn't serve this layer, or blocks of this size.
    """
    from polyattn_triton.hopper.choice import (
        DEFAULT_WARPS,
        box_rows,
        hopper_config,
        hopper_constants,
    )
    from polyattn_triton.hopper.descriptors import SHARED
    from polyattn_triton.hopper.prefill import prefill_hopper_kernel

    generated = Generated.of(spec)
    config = hopper_config(spec, "sm_90", generated)
    box = None if config is None else box_rows(config.block_n, block_size)
    if config is None or box is None:
        raise LookupError(f"prefill_hopper serves no {spec} in blocks of {block_size}")
    element = ELEMENT[spec.dtype]
    boxes = f"tensordesc<{element}[{box}, {spec.head_size}],{SHARED!r}>"
    pointers = {"Q": element, "OUT": element, "K": boxes, "V": boxes}
    pipe = HOPPER_PIPES[spec.head_size][split]
    functions = NOTHING if generated is None else generated.constants
    constants = hopper_constants(spec, config, pipe, block_size, split, spec.needs_lse, functions)
    return compile_kernel(
        prefill_hopper_kernel, pointers, constants, "sm_90", {"num_warps": DEFAULT_WARPS}
    )


def compile_packed(spec: LayerSpec, way: str, block_size: int = 16, layout: str = "NHD") -> Any:
    """Compile the decode over packed rows for Hopper, as `TRITON_ATTN` runs it."""
    form = format_of(spec, Device("cuda", "sm_90"), layout, block_size)
    config = packed_config(spec, form, "sm_90", None)
    assert config is not None
    rows = part_rows(spec, config, False)
    apart = [n * (1 if layout == "HND" else spec.num_kv_heads) for n in form.widths]
    constants = (*packed_constants(spec, form, config, way, spec.needs_lse, rows), *apart)
    cached = CACHE.get(spec.kv_cache_dtype, "u8")
    pointers = {"Q": ELEMENT[spec.dtype], "OUT": ELEMENT[spec.dtype], "K": cached, "V": cached}
    return compile_kernel(packed_kernel, pointers, constants, "sm_90", packed_options(config))


def compile_widening(spec: LayerSpec, block_size: int) -> Any:
    """Compile what copies a narrow cache's tokens for Hopper's own prefill."""
    query, cached = ELEMENT[spec.dtype], CACHE.get(spec.kv_cache_dtype, "u8")
    pointers = {"K": cached, "V": cached, "K_OUT": query, "V_OUT": query}
    read = rows_constants(spec, block_size, False)[:2]
    constants = copy_constants(spec.head_size, block_size, spec.sliding_window or 0, read)
    return compile_kernel(widen_kernel, pointers, constants, "sm_90", {"num_warps": 4})


def _compile_small(
    spec: LayerSpec,
    arch: str,
    phase: str,
    query: str,
    cached: str,
    block_size: int,
) -> Any:
    if phase in MERGES:
        return _compile_merge(spec, arch, phase, query)
    if phase == "rotate":
        return _compile_rotation(spec, arch, query, cached, block_size)
    pointers = {"KEY": query, "VALUE": query, "K": cached, "V": cached, "SLOTS": "i64"}
    if cached == "u8" and not all(map(by_hand, rows_of(spec.kv_cache_dtype))):
        key, value = (
            writer(f, n)
            for f, n in zip(
                rows_of(spec.kv_cache_dtype), (spec.head_size, spec.v_head_size), strict=True
            )
        )
        constants: tuple[Any, ...] = (
            spec.num_kv_heads, block_size, False, SCALES[spec.scales], key.write, value.write
        )  # fmt: skip
        tables = dict.fromkeys(("K_TABLE", "V_TABLE"), "i32")
        return compile_kernel(write_rows_kernel, pointers | tables, constants, arch, OF_WRITERS)
    if cached == "u8":
        sizes = (spec.num_kv_heads, spec.head_size, spec.v_head_size)
        constants = four_bit_constants(*sizes, block_size, SCALES[spec.scales])
        return compile_kernel(write_four_kernel, pointers, constants, arch, {"num_warps": 4})
    width = spec.num_kv_heads * max(spec.head_size, spec.v_head_size)
    constants = (
        spec.num_kv_heads, spec.head_size, spec.v_head_size, triton.next_power_of_2(width),
        block_size, cached != query, cached == "i8", False, SCALES[spec.scales], launches_early(arch),
    )  # fmt: skip
    return compile_kernel(write_kernel, pointers, constants, arch, {"num_warps": 4})


def _compile_merge(spec: LayerSpec, arch: str, phase: str, query: str) -> Any:
    generated = Generated.of(spec)
    summed = generated is not None and not generated.softmax
    config = tile_config(spec, arch, "prefill")
    way = MERGES[phase]
    height = config.block_m if way == "pieces" else part_rows(spec, config, few=False)
    merge = Merge(99, 1, 99, phase == "merge wide")
    constants = merging_constants(
        spec, merge, way, height, spec.needs_lse, launches_early(arch), summed
    )
    out = query if spec.out_dtype == "auto" else CACHE["fp8_e4m3"]
    return compile_kernel(
        merge_kernel, {"OUT": out}, constants, arch, merge_options(merge, spec.v_head_size, False)
    )


def _compile_rotation(spec: LayerSpec, arch: str, query: str, cached: str, block_size: int) -> Any:
    """Compile what stores fused QKV with a bias; without a rope in the spec, whole heads turn."""
    rope = spec.rope
    sizes = (spec.head_size, spec.head_size, spec.v_head_size)
    constants = rotate_constants(
        spec.num_heads, spec.num_kv_heads, sizes, block_size,
        spec.head_size if rope is None else rope.span, False,
        rope is None or rope.pairing == "neox", rope is not None and rope.temperature > 0, True,
        cached == query, cached != query, cached == "i8", False, SCALES[spec.scales],
        None if spec.qk_norm is None else spec.qk_norm.over,
    )  # fmt: skip
    given = dict.fromkeys(("QUERY", "KEY", "VALUE", "OUT", "KEY_OUT", "VALUE_OUT"), query)
    pointers = given | {"K": cached, "V": cached, "SLOTS": "i64"}
    return compile_kernel(rotate_store_kernel, pointers, constants, arch, {"num_warps": 4})


FREE = {
    "lse_t", "bt_s", "tiles", "bt_end", "table_s", "splits", "width", "count", "skip", "st_k", "st_v",
    "programs", "by_tile", "piece_tokens", "bounds", "part_rows", "parts", "listed", "seqs", "halvings",
    "tokens", "ids_n", "out_n", "each",
}  # fmt: skip
LONGS = {"INPUTS"}
INTS = {"BT", "SEQ_LENS", "STARTS", "KEY_STARTS", "WORK", "SLOTS", "DONE", "FIRSTS", "ORIGINS"}
FLOATS = {"scale", "v_scale", "soft_cap", "k_scale", "limit", "eps"}


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
            usual = "i64" if name in LONGS else "i32" if name in INTS else "fp32"
            element = pointers.get(name, usual)
            described = element.startswith("tensordesc")
            signature[name] = element if described else f"*{element}"
        else:
            signature[name] = "i32"
    # As a launch finds them: aligned pointers, strides that are multiples of 16. Without these no
    # load is vectorised, and what is compiled is not what runs.
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in fixed
        and name not in FLOATS
        and name not in FREE
        and not (pointers.get("K") == "u8" and name in OF_ROWS)
        and not signature[name].startswith("tensordesc")
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, fixed, attrs)
    return compile_source(source, arch, options)


CODES: dict[bytes, str] = {}
"""Machine code, and whose it is, that is yet to be looked at (`read_unwritten`)."""


def compile_source(source: Any, arch: str, options: dict[str, int]) -> Any:
    compiled = triton.compile(source, target=target_of(arch), options=options)
    if arch == "sm_90":  # whose instructions `machine_code` knows
        CODES[code_of(compiled.asm["cubin"])] = source.fn.__name__
    return compiled


def look() -> None:
    """Assert that no kernel that was compiled since the last look reads what nothing wrote."""
    unwritten = read_unwritten([(name, code) for code, name in CODES.items()])
    CODES.clear()
    assert not unwritten
