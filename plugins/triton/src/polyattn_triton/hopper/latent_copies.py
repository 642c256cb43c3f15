"""What copies latents for `hopper.latents`? A warp that asks the copy engine, or four that widen e4m3."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from polyattn_triton.hopper.copies import blocks_of_boxes, copy_tile
from polyattn_triton.hopper.items import advance, begin, bounds
from polyattn_triton.hopper.rows import barrier

HALF = gl.constexpr(256)
"""Columns of a group's outputs."""
ROPE = gl.constexpr(64)
LEFT, RIGHT, TURNED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Parts of a tile: the latents' halves, and what is rotated."""
WIDEN = gl.constexpr(
    """{ .reg .b32 low, high, rest, scale; mov.b32 scale, 0x7B807B80;
    prmt.b32 low, 0, $2, 0x5040; prmt.b32 high, 0, $2, 0x7060;
    shr.u32 rest, low, 4; and.b32 rest, rest, 0x07F007F0;
    and.b32 low, low, 0x80008000; or.b32 low, low, rest;
    shr.u32 rest, high, 4; and.b32 rest, rest, 0x07F007F0;
    and.b32 high, high, 0x80008000; or.b32 high, high, rest;
    mul.rn.bf16x2 $0, low, scale; mul.rn.bf16x2 $1, high, scale; }"""
)
"""Four e4m3 of a word as four bfloat16 of two: their fields; 2^120 is what their exponents differ by."""


@gluon.jit
def _far_blocks(TABLE, key, limit, BLOCK_SIZE: gl.constexpr):
    """Which blocks hold a tile's rows, two a lane; -1 past the limit."""
    at = key + gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    return gl.load(TABLE + at // BLOCK_SIZE, mask=at < limit, other=-1)


@gluon.jit
def prefetch(addresses):
    """Have latents of 1,152 bytes fetched into the L2, line by line."""
    for line in gl.static_range(9):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [addresses + 128 * line],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def produce(
    KV,
    WIDE,
    NARROW,
    BT,
    SEQ_LENS,
    STARTS,
    WORK,
    k_smem,
    turned_smem,
    full,
    empty,
    k_b,
    k_t,
    table_s,
    tiles,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    FEW: gl.constexpr,
    FETCH: gl.constexpr,
):
    """Copy the items' tiles part by part, as the parts become free."""
    BOX: gl.constexpr = WIDE.block_shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, SPLIT)
    n = 0
    while at < stop:
        _token0, _query_len, _seq_len, first, count, _full_low, _unmasked, limit = bounds(
            SEQ_LENS,
            STARTS,
            WORK,
            at,
            stop,
            low,
            high,
            seq,
            start,
            HEADS,
            64,
            64,
            FEW == 1,
            0,
            SPLIT,
        )
        TABLE = BT + seq.to(gl.int64) * table_s
        key = first * 64
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, 1, low, high, tile, head, SPLIT
        )
        blocks = blocks_of_boxes(TABLE, key, limit, True, BLOCK_SIZE, BOX, LANES)
        far = _far_blocks(TABLE, key + 128, limit, BLOCK_SIZE)
        for _i in range(count):
            later = _far_blocks(TABLE, key + 192, limit, BLOCK_SIZE)
            ahead = blocks_of_boxes(TABLE, key + 64, limit, True, BLOCK_SIZE, BOX, LANES)
            stage = n % 2
            free = (n // 2 + 1) & 1  # of a stage never used: at once
            copy_tile(
                NARROW,
                blocks,
                key,
                0,
                2 * HALF,
                k_b,
                turned_smem.index(stage),
                full.index(3 * stage + TURNED),
                empty.index(3 * stage + TURNED),
                free,
                ROPE,
                64,
                BLOCK_SIZE,
                True,
                BOX,
                LANES,
            )
            for half in gl.static_range(2):
                copy_tile(
                    WIDE,
                    blocks,
                    key,
                    0,
                    half * HALF,
                    k_b,
                    k_smem.index(2 * stage + half),
                    full.index(3 * stage + half),
                    empty.index(3 * stage + half),
                    free,
                    HALF,
                    64,
                    BLOCK_SIZE,
                    True,
                    BOX,
                    LANES,
                )
            # What has no place here yet may come from memory, and wait in the L2.
            if FETCH:
                LANES_OF: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
                place = (key + gl.arange(0, 64, layout=LANES_OF)) % BLOCK_SIZE
                row = (gl.maximum(far, 0).to(gl.int64) * k_b + place) * k_t
                prefetch((KV + row).to(gl.int64))
            far = later
            blocks = ahead
            key += 64
            n += 1


@gluon.jit
def _rows_at(TABLE, key, limit, kv_b, kv_t, BLOCK_SIZE: gl.constexpr):
    """Where a tile's rows begin, in words of four bytes; below zero past the limit."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    at = key + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    block = gl.load(TABLE + at // BLOCK_SIZE, mask=at < limit, other=-1).to(gl.int64)
    return gl.where(block >= 0, (block * kv_b + at % BLOCK_SIZE * kv_t) // 4, block)


@gluon.jit
def _words_of(KV, rows, COLUMN: gl.constexpr):
    """Load 64 columns of a tile's rows, four to a word; zeros where no row is."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    offs = COLUMN // 4 + gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(
        KV + rows[:, None] + offs[None, :],
        mask=(rows >= 0)[:, None] & (offs >= 0)[None, :],
        other=0,
    )


@gluon.jit
def _widened(x):
    """Words of four e4m3 as words of two of bfloat16: its fields, and the exponent's other origin."""
    low, high = gl.inline_asm_elementwise(WIDEN, "=r,=r,r", [x], (gl.int32, gl.int32), True, 1)
    return gl.join(low, high).reshape([64, 32])


@gluon.jit
def produce_narrow(
    KV,
    BT,
    SEQ_LENS,
    STARTS,
    WORK,
    k_smem,
    turned_smem,
    full,
    empty,
    kv_b,
    kv_t,
    table_s,
    tiles,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    FEW: gl.constexpr,
):
    """As `produce`, of e4m3, by four warps: loads run ahead, by half a part, of what is widened."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    KV = KV.to(gl.pointer_type(gl.int32))
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, SPLIT)
    n = 0
    while at < stop:
        _token0, _query_len, _seq_len, first, count, _full_low, _unmasked, limit = bounds(
            SEQ_LENS,
            STARTS,
            WORK,
            at,
            stop,
            low,
            high,
            seq,
            start,
            HEADS,
            64,
            64,
            FEW == 1,
            0,
            SPLIT,
        )
        TABLE = BT + seq.to(gl.int64) * table_s
        key = first * 64
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, 1, low, high, tile, head, SPLIT
        )
        rows = _rows_at(TABLE, key, limit, kv_b, kv_t, BLOCK_SIZE)
        a = _words_of(KV, rows, 512)
        b = _words_of(KV, rows, 0)
        c = _words_of(KV, rows, 64)
        d = _words_of(KV, rows, 128)
        for _i in range(count):
            stage = n % 2
            free = (n // 2 + 1) & 1  # of a stage never used: at once
            key += 64
            ahead = _rows_at(TABLE, key, limit, kv_b, kv_t, BLOCK_SIZE)
            for part in gl.static_range(9):  # of 64 columns: what is turned, then the others
                if part < 5:
                    e = _words_of(KV, rows, 64 * (part + 3))
                elif part == 5:
                    e = _words_of(KV, ahead, 512)
                else:
                    e = _words_of(KV, ahead, 64 * (part - 6))
                if part == 0:
                    mbarrier.wait(empty.index(3 * stage + TURNED), free)
                    k = turned_smem.index(stage)._reinterpret(gl.int32, [64, 32], WORDS)
                    k.store(_widened(a))
                else:
                    if part % 4 == 1:
                        mbarrier.wait(empty.index(3 * stage + part // 4), free)
                    k = k_smem.index(2 * stage + (part - 1) // 4)
                    k = k._reinterpret(gl.int32, [64, 128], WORDS)
                    k.slice((part - 1) % 4 * 32, 32, 1).store(_widened(a))
                if part % 4 == 0:
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(
                        full.index(3 * stage + (TURNED if part == 0 else part // 4 - 1))
                    )
                a = b
                b = c
                c = d
                d = e
            rows = ahead
            n += 1
