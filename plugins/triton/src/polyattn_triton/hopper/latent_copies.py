"""Copies latents for Hopper's kernels: a warp drives the copy engine, part by part."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from polyattn_triton.hopper.copies import blocks_of_boxes, copy_tile
from polyattn_triton.hopper.items import advance, begin, bounds
from polyattn_triton.hopper.names import barrier


@gluon.jit
def turns(COUNT: gl.constexpr, COPIES: gl.constexpr = 1):
    """Return two barriers for each of COUNT places: one side waits for the first, one for the other.

    `COPIES`: how many fill a place.
    """
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=COPIES)
        mbarrier.init(empty.index(place), count=1)
    return full, empty


@gluon.jit
def places(token0, row, t, h, HEADS: gl.constexpr):
    """Return where (token, head) rows begin, in elements: strides between heads may be any.

    `HEADS`: 0 where all rows are one token's.
    """
    if HEADS == 0:
        return token0.to(gl.int64) * t + row.to(gl.int64) * h
    return (token0 + row // HEADS).to(gl.int64) * t + (row % HEADS).to(gl.int64) * h


@gluon.jit
def keys_of(
    STEP,
    at,
    stop,
    low,
    high,
    seq,
    start,
    HEADS: gl.constexpr,
    FEW: gl.constexpr,
    HEIGHT: gl.constexpr,
):
    """The keys of an item of `HEIGHT` rows, as `items.bounds`."""
    lens, starts, work = STEP[0], STEP[1], STEP[2]
    return bounds(
        lens, starts, work, at, stop, low, high, seq, start, HEADS, HEIGHT, 64, FEW == 1, 0, True
    )


@gluon.jit
def clear(latents, held):
    """Zero a tile's latents, (64, 256) of 16 bits, from row `held` on: behind the length may be NaN.

    As `prefill.clear`, but two columns at a time: code that runs once is fetched from memory, which is
    busy, and takes longer than it runs.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    pairs = latents._reinterpret(gl.int32, [64, 128], gl.NVMMASharedLayout(128, 32, 2))
    for first in gl.static_range(0, 64, 16):
        if first + 16 > held:
            part = pairs.slice(first, 16)
            row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where((row < held)[:, None], part.load(LAYOUT), 0))
    fence_async_shared()
    barrier()


@gluon.jit
def produce(
    WIDE, NARROW, BT, k_b, table_s, STEP, SMEM, BARRIERS,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, FEW: gl.constexpr, PIPE: gl.constexpr,
    program=None,
):  # fmt: skip
    """Copy the items' tiles part by part, as the parts become free: the rotated part first.

    `PIPE`: rows of a tile of queries, stages, how many others there are, and turns of a stage: each
    part's own, or one. `program`: as `items.begin`'s.
    """
    HEIGHT: gl.constexpr = PIPE[0]
    STAGES: gl.constexpr = PIPE[1]
    WIDES: gl.constexpr = PIPE[2]
    TURNS: gl.constexpr = PIPE[3]
    BOX: gl.constexpr = WIDE.block_shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WORK, tiles = STEP[2], STEP[3]
    k_smem, turned_smem = SMEM[1], SMEM[2]
    full, empty = BARRIERS
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, True, program)
    n = 0
    while at < stop:
        _token0, _query_len, _seq_len, first, count, _full_low, _unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, FEW, HEIGHT
        )
        TABLE = BT + seq.to(gl.int64) * table_s
        key = first * 64
        at, low, high, tile, seq, start, head = advance(WORK, tiles, 1, low, high, tile, head, True)
        blocks = blocks_of_boxes(TABLE, key, limit, True, BLOCK_SIZE, BOX, LANES)
        for _i in range(count):
            ahead = blocks_of_boxes(TABLE, key + 64, limit, True, BLOCK_SIZE, BOX, LANES)
            stage = n % STAGES
            free = (n // STAGES + 1) & 1  # of a stage never used: at once
            for part in gl.static_range(WIDES, -1, -1):
                turn = TURNS * stage + part % TURNS
                copy_tile(
                    NARROW if part == WIDES else WIDE, blocks, key, 0, part * WIDE.block_shape[1], k_b,
                    turned_smem.index(stage) if part == WIDES else k_smem.index(WIDES * stage + part),
                    full.index(turn), empty.index(turn), free,
                    NARROW.block_shape[1] if part == WIDES else WIDE.block_shape[1],
                    64, BLOCK_SIZE, True, BOX, LANES,
                )  # fmt: skip
            blocks = ahead
            key += 64
            n += 1
