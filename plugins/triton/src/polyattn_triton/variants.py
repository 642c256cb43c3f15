"""Which variants of TRITON_ATTN's kernels are there? Constants, tiles and splits of each."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
from polyattn.kernel import STORAGE_DTYPES, Invariance, LayerSpec, arch_matches, storage_dtype

from polyattn_triton.configs import Config, PrefixConfig, pick, prefix_configs
from polyattn_triton.functions.pointwise import NOTHING
from polyattn_triton.functions.rows import NO_ROWS
from polyattn_triton.launch import (
    Merge,
    launches_early,
    merge_constants,
    merge_rows,
    parts_at_once,
    power,
)
from polyattn_triton.turn_table import rope_constants

MIN_SPLIT_KEYS = 128
"""A split below this costs more in the merge than it gains."""
FEW_SPLITS = 16
MAX_SPLITS = 128
FEW_ON_ONE = 3
"""Programs of the configuration for few that fit on a multiprocessor of Hopper's at once."""
MANY_ON_ONE = 4
"""And of the other configuration."""
CHEAP_TO_MERGE = 4
"""Splits up to which one more costs less than it gains where sequences share keys."""
MAX_MERGED_BY_ONE = 2048
"""Outputs of a group above which one program would be too slow to merge their splits."""
HIGH_ON_ONE = 2
"""And where its tiles are of more than 16 rows, 128 columns, or of 8-bit keys."""
FULL_REGISTERS = 128
"""Registers of a thread, so that a Hopper multiprocessor holds four programs of decodes at a
level, or two of prompts whose keys and values have up to `PAIRED` elements."""
PAIRED, PAIRED_WARPS = 64, 8
LEAST_BUSY = 0.8
"""Of the chip, while equal programs run that don't fit on it at once: else they are cut to stretches."""
MOST_FEW_ROWS = 64
"""Rows of (token, head of group) up to which the decode kernel serves a sequence's queries anyway."""
LONGEST_FEW = 16
"""Tokens up to which it serves more rows than that where keys are few."""
MOST_FEW_KEYS = 1536
"""Keys that each multiprocessor then reads, those of a tile of rows again for the next. On an H200 (20
steps of 80 to 192 rows) its tiles of 64 rows took 14.7 us and 1.05 for each 64 keys that one reads;
Hopper's prefill, of 128 rows, 24.4 and 2.58 for each 128: alike at about 1,536."""
TALLEST_FEW = 64
"""Rows of the decode kernel's highest tile. Of 128, registers spill: 54 us for 22."""
WIDE = 256
"""Columns of a head above which a tile of a large group's rows and its keys outgrow a chip's memory."""


SCALES = {"number": 0, "tensor": 1, "head": 2}
"""How the kernels read a layer's scales (`softmax.scaled`)."""


@lru_cache(1024)
def even_splits(programs: int, num_sms: int) -> int:
    """Return how many splits leave the fullest multiprocessor the least to do.

    It has two or three programs: one computes while the others' keys arrive. Of equal numbers a few
    more splits are faster where sequences share their keys, more than a few slower to merge.
    """
    loads = [
        (on_one / splits, splits)
        for on_one in (2, FEW_ON_ONE)
        if (splits := on_one * num_sms // programs)
    ]
    if not loads:
        return 1
    least = min(loads)[0]
    equal = [splits for load, splits in loads if load == least]
    splits = max((s for s in equal if s <= CHEAP_TO_MERGE), default=min(equal))
    if splits == 1 and 2 * programs <= MANY_ON_ONE * num_sms:
        splits = 2
    return splits


def leaves_tail(programs: int, num_sms: int) -> bool:
    """Whether equal programs end in a round that leaves much of the chip idle."""
    rounds = programs / (MANY_ON_ONE * num_sms)
    return rounds > 1 and rounds < LEAST_BUSY * -(-programs // (MANY_ON_ONE * num_sms))


def _shape_constants(spec: LayerSpec, config: Config, block_size: int) -> tuple[Any, ...]:
    return (
        spec.head_size, spec.v_head_size, power(spec.head_size), power(spec.v_head_size),
        config.block_m, config.block_n, block_size,
    )  # fmt: skip


def _mask_constants(spec: LayerSpec, lse: bool, functions: tuple[Any, ...]) -> tuple[Any, ...]:
    return (
        spec.causal, spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens,
        spec.logit_soft_cap is not None, spec.alibi, spec.learned_sinks, lse, *functions,
    )  # fmt: skip


def prefill_constants(
    spec: LayerSpec, config: Config, block_size: int, paged: bool, split: bool, lse: bool, arch: str,
    functions: tuple[Any, ...] = NOTHING, where_seen: tuple[Any, ...] | None = None, turns_at: int = 0,
    read: tuple[Any, ...] = NO_ROWS,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `prefill_kernel`'s constants, in its order. `functions`: `Generated.constants`.

    `where_seen`: `Generated`'s, where key tiles are listed. `turns_at`: `rope_constants`' `at`.
    `read`: `Rows.constants`.
    """
    shape = _shape_constants(spec, config, block_size)
    early = split and launches_early(arch)
    masks = _mask_constants(spec, lse, functions)
    listed = (False, None, 0) if where_seen is None else (True, *where_seen)
    rope = rope_constants(spec, turns_at)
    return (
        spec.gqa_ratio,
        *shape,
        paged,
        *masks,
        split,
        early,
        SCALES[spec.scales],
        *listed,
        *rope,
        multiplies_eight_bits(spec, arch),
        spec.batch_invariant >= Invariance.STEPS,
        *read,
    )


EIGHT_BITS = ("sm_89", "sm_100+", "gfx950", "x86_64", "aarch64")
"""Chips that multiply OCP's e4m3 numbers (and the interpreter's hosts), but for Hopper's.

There values would have to be turned in shared memory: made float16 they are faster (H200)."""


def multiplies_eight_bits(spec: LayerSpec, arch: str) -> bool:
    """Whether prefill's products are of e4m3 numbers: where the layer lets weights be rounded to it."""
    if not spec.fp8_compute or spec.qkv_dtype != "fp8_e4m3":
        return False
    changed = spec.rope or spec.variant or spec.mask
    return not changed and any(arch_matches(pattern, arch) for pattern in EIGHT_BITS)


def precision(spec: LayerSpec, arch: str) -> str:
    """Return how products of float32 are made, as Triton names it.

    On NVIDIA's tensor cores three products of tf32 stand for one. The arithmetic units would compute all
    rows of a tile, of which a group's heads are few.
    """
    tensor_cores = spec.dtype == "float32" and arch_matches("sm_80+", arch)
    return "tf32x3" if tensor_cores else "ieee"


LISTED_AT_ONCE = 8192
"""Pairs of rows and keys that a program that lists key tiles looks at in one go."""


def list_constants(
    spec: LayerSpec, height: int, block_n: int, masks: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return `list_kernel`'s constants, in its order. `height`: the rows of a tile that it looks at.

    `masks`: functions of the masks alone.
    """
    return (
        spec.gqa_ratio, height, block_n, max(1, LISTED_AT_ONCE // (height * block_n)), spec.causal,
        spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens, *masks[:2],
    )  # fmt: skip


def decode_constants(
    spec: LayerSpec, config: Config, block_size: int, way: str, lse: bool, arch: str, alike: bool,
    paired: bool, functions: tuple[Any, ...] = NOTHING, turns_at: int = 0, rows: int = 0,
    read: tuple[Any, ...] = NO_ROWS, long: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `decode_kernel`'s constants, in its order. `way`: one of `WAYS`.

    `alike`: V has K's strides. `paired`: V is read two 8-bit values at a time.
    `functions`: `Generated.constants`. `turns_at`: `rope_constants`' `at`. `rows`: of a part; 0: as many
    as `part_rows` says. `read`: `Rows.constants`. `long`: a plan's.
    """
    listed, split = way in ("listed", "singles", "few"), way != "decode"
    rows = rows or part_rows(spec, config, way == "few")
    at_once = most_merged_by_one(spec, arch) if way == "split" else 0
    early = split and not at_once and launches_early(arch)
    return (
        spec.gqa_ratio, *_shape_constants(spec, config, block_size),
        *_mask_constants(spec, lse, functions),
        split, rows, at_once, early, alike, paired, listed, tiled(way), way == "few", SCALES[spec.scales],
        *rope_constants(spec, turns_at), *read, long, precision(spec, arch),
    )  # fmt: skip


def merging_constants(
    spec: LayerSpec, merge: Merge, way: str, rows: int, lse: bool, early: bool, summed: bool
) -> tuple[Any, ...]:
    """Return `merge_kernel`'s constants where it merges what a plan of this `way` cut, `rows` a part."""
    singles = way in ("listed", "many", "singles")
    return merge_constants(
        merge, spec.gqa_ratio, spec.v_head_size, rows, tiled(way), singles,
        spec.learned_sinks, lse, early, SCALES[spec.scales], summed, way != "many",
    )  # fmt: skip


def in_pairs(dtype: torch.dtype, strides: tuple[int, ...]) -> bool:
    """Whether a cache's values are of 8 bits, and every row of them begins at an even address."""
    eight = dtype.itemsize == 1 and dtype != torch.uint8  # which is rows of bytes
    return eight and all(stride % 2 == 0 for stride in strides[:3])


def part_rows(spec: LayerSpec, config: Config, few: bool) -> int:
    """Return how many rows a part of a tile of the decode kernel has in the workspace."""
    return config.block_m if few else triton.next_power_of_2(spec.gqa_ratio)


def most_merged_by_one(spec: LayerSpec, arch: str) -> int:
    """Return how many even splits the program that ends last merges, all at once; 0: a kernel does.

    Not on AMD, where the order of memory between programs was never seen to hold.
    """
    rows = triton.next_power_of_2(spec.gqa_ratio)
    outputs = rows * triton.next_power_of_2(spec.v_head_size)
    if arch.startswith("gfx") or outputs > MAX_MERGED_BY_ONE:
        return 0
    return parts_at_once(rows, spec.v_head_size)


NARROW_KEYS = 32
"""Keys of a tile on Hopper, at most, where 8-bit values become 16-bit ones of up to 32 columns. For 64
ptxas 12.8 (Triton 3.6) has all but the first product read V where a register says that nothing wrote."""


def _most_keys(spec: LayerSpec, arch: str, block_n: int) -> int:
    """Return `block_n`, or how many keys a tile may have at most."""
    eight = storage_dtype(spec.stored_dtype).itemsize == 1 or spec.qkv_dtype != "auto"
    narrow = eight and power(spec.v_head_size) <= 32 and arch_matches("sm_90", arch)
    return min(block_n, NARROW_KEYS) if narrow else block_n


def tile_config(spec: LayerSpec, arch: str, phase: str, rows: int = 0) -> Config:
    """Return the configuration of a phase (prefill, paged, decode, few) on `arch`.

    `rows`: how many a tile must hold at least.
    """
    width = power(max(spec.head_size, spec.v_head_size))
    stored = spec.dtype if phase == "prefill" else spec.stored_dtype
    # Keys that are rotated want the registers of four warps.
    plain = bool(spec.rope) or not (spec.sliding_window or spec.chunk_size or spec.alibi)
    config = pick(arch, phase, width, storage_dtype(stored).itemsize, plain)
    config = replace(config, block_n=_most_keys(spec, arch, config.block_n))
    if phase in ("prefill", "paged"):
        # Deeper pipelines over the gap behind kept first tokens crash ptxas (Triton 3.6, sm_90a).
        return replace(config, num_stages=1) if spec.sink_tokens else config
    rows = max(config.block_m, triton.next_power_of_2(max(rows, spec.gqa_ratio)))
    rows = min(rows, tallest_tile(spec, arch))
    return replace(config, block_m=rows, num_warps=max(config.num_warps, min(4, rows // 16)))


def tallest_tile(spec: LayerSpec, arch: str) -> int:
    """Return how many rows the decode kernel's tiles may have: of wide heads no more than a prefill's."""
    if power(max(spec.head_size, spec.v_head_size)) <= WIDE:
        return max(TALLEST_FEW, power(spec.gqa_ratio))
    return tile_config(spec, arch, "prefill").block_m


STEPS_ROWS = 64
"""Rows of a tile where steps must not count, at most: a decode computes as many, and a prompt's next tile
reads its keys again."""


def steps_config(spec: LayerSpec, arch: str) -> Config:
    """Return the prefill's configuration for all rows of a layer whose bits no step may change."""
    config = tile_config(spec, arch, "paged")
    height = min(STEPS_ROWS, config.block_m)
    warps = max(min(4, config.num_warps), config.num_warps * height // config.block_m)
    return replace(config, block_m=height, num_warps=warps)


WAYS = ("decode", "split", "many", "listed", "singles", "few", "prefill", "pieces")
"""What runs: decode of whole sequences, of even splits, of more than the one that ends last merges, of
stretches of sequences, of stretches of tiles of one query token or of a few; prefill of whole tiles, of
stretches."""


def tiled(way: str) -> bool:
    """Whether the work of a way lists tiles of rows, not sequences."""
    return way not in ("listed", "many")


def paired(spec: LayerSpec, config: Config) -> bool:
    """Whether two programs of prompts run on a multiprocessor of Hopper's, of `FULL_REGISTERS` each."""
    return max(spec.head_size, spec.v_head_size) <= PAIRED and config.num_warps == PAIRED_WARPS


def on_one(spec: LayerSpec, config: Config, way: str) -> int:
    """Return how many programs of stretches, or of whole tiles, Hopper's registers allow."""
    if config.num_warps > 4:
        return HIGH_ON_ONE if paired(spec, config) else 1
    if way in ("prefill", "pieces"):
        return 2
    wide = power(max(spec.head_size, spec.v_head_size)) > 128
    tall = way == "few" and config.block_m > 16
    small = storage_dtype(spec.stored_dtype).itemsize == 1
    # The masks of a size that is no power of two and of a window are held at once.
    masked = power(spec.head_size) != spec.head_size and spec.sliding_window is not None
    # So are the distances that several tokens' scores are lowered by.
    masked = masked or (way == "few" and spec.alibi)
    return HIGH_ON_ONE if wide or tall or small or masked or spec.rope else FEW_ON_ONE


def shared_bytes(spec: LayerSpec, config: Config, way: str) -> int:
    """Return about how much shared memory a program's tiles take."""
    item = storage_dtype(spec.stored_dtype).itemsize
    keys = config.block_n * (spec.head_size + spec.v_head_size) * item
    stages = config.num_stages if way in ("prefill", "pieces") else config.num_stages - 1
    query = config.block_m * spec.head_size * STORAGE_DTYPES[spec.dtype].itemsize
    return max(1, stages) * keys + query


UNTUNED_TALLEST = 64
"""Rows of the highest tile of rows that share keys, where none was measured."""


def prefix_tiles(spec: LayerSpec, arch: str) -> tuple[PrefixConfig, ...]:
    """Return the configurations that `prefix_kernel` may run in, lowest tiles first.

    Each tile holds one row's heads of a KV head at least.
    """
    width, least = power(max(spec.head_size, spec.v_head_size)), power(spec.gqa_ratio)
    stored = storage_dtype(spec.stored_dtype).itemsize
    known = [c for c in prefix_configs(arch, width, stored) if c.tall >= least]
    if known:
        return tuple(replace(c, block_n=_most_keys(spec, arch, c.block_n)) for c in known)
    configs: list[PrefixConfig] = []
    height, tallest = least, min(UNTUNED_TALLEST, tallest_tile(spec, arch))
    while not configs or height <= tallest:
        config = tile_config(spec, arch, "few", height)
        on_one = HIGH_ON_ONE if height > 16 or width > 128 else FEW_ON_ONE
        on_one = 1 if config.num_warps > 4 else on_one
        small = 18 if height > 16 else 22  # as Hopper's, until others are measured
        tile = (height, config.block_n, config.num_warps, config.num_stages)
        configs.append(PrefixConfig(*tile, on_one, small, 22, 40))
        height *= 2
    return tuple(configs)


def prefix_constants(
    spec: LayerSpec,
    config: PrefixConfig,
    block_size: int,
    arch: str,
    alike: bool,
    read: tuple[Any, ...] = NO_ROWS,
    several: bool = False,
) -> tuple[Any, ...]:
    """Return `prefix_kernel`'s constants, in its order. `several`: rows have several tokens."""
    return (
        spec.gqa_ratio, spec.head_size, spec.v_head_size, power(spec.head_size),
        power(spec.v_head_size), power(spec.gqa_ratio), config.tall, config.block_n, block_size,
        spec.logit_soft_cap is not None, alike, launches_early(arch), SCALES[spec.scales],
        *read, several, spec.sliding_window or 0, spec.alibi,
    )  # fmt: skip


def rows_merged(spec: LayerSpec) -> int:
    """Return how many of a token's heads of one KV head a program of `merge_parts_kernel` takes."""
    return merge_rows(triton.next_power_of_2(spec.gqa_ratio), spec.v_head_size)


def parts_constants(spec: LayerSpec, lse: bool, early: bool) -> tuple[Any, ...]:
    """Return `merge_parts_kernel`'s constants, in its order."""
    rows = rows_merged(spec)
    return (
        spec.gqa_ratio, spec.v_head_size, power(spec.v_head_size), rows,
        parts_at_once(rows, spec.v_head_size),
        spec.learned_sinks, lse, early, SCALES[spec.scales],
    )  # fmt: skip


def prefix_bytes(spec: LayerSpec, config: PrefixConfig) -> int:
    """Return about how much shared memory a program of `prefix_kernel` takes."""
    tile = Config(config.tall, config.block_n, config.num_warps, config.num_stages)
    return shared_bytes(spec, tile, "few")
