"""Decode over latents for Hopper, in Gluon: what `kernels.mla` computes over pages, by roles.

The division of labour is FlashInfer's for this chip, but for who copies. A latent is read once, for its
key and its value. One group of four warps computes the scores of 64 rows and 64 keys, and their weights;
of the outputs each of two groups has half of the columns, 256. Weights pass from one to the other
through shared memory. What copies runs a tile ahead: a warp that asks the copy engine (TMA) for
16-bit latents, or four warps that make bfloat16 of e4m3. A tile comes, and becomes free, in parts.

Gluon has no interpreter: CI compiles this ahead of time and runs it on the host, over NumPy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from polyattn_triton.hopper.copies import blocks_of_boxes, copy_tile
from polyattn_triton.hopper.items import advance, begin, bounds, part_of
from polyattn_triton.hopper.mla import store_part, store_whole
from polyattn_triton.hopper.prefill import clear, kept_below
from polyattn_triton.hopper.rows import barrier

LOG2E = gl.constexpr(1.4426950408889634)
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
def _query(q, Q, token0, query_len, start, q_t, q_h, HEADS: gl.constexpr):
    """Copy one half of the columns of 64 (token, head) rows into shared memory, without waiting."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    offs = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE))
    at = (token0 + row // HEADS).to(gl.int64) * q_t + row % HEADS * q_h
    async_copy.async_copy_global_to_shared(
        q,
        Q + at[:, None] + offs[None, :],
        mask=(row < query_len * HEADS)[:, None] & (offs < HALF)[None, :],
    )
    async_copy.commit_group()


@gluon.jit
def _next_query(
    q, Q, STARTS, at, stop, seq, start, q_t, q_h, HEADS: gl.constexpr
):  # fmt: skip
    """Copy an item's half of the columns, if there is an item."""
    if at < stop:
        token0 = gl.load(STARTS + seq)
        _query(q, Q, token0, gl.load(STARTS + seq + 1) - token0, start, q_t, q_h, HEADS)


@gluon.jit
def _turned_query(Q, token0, query_len, start, q_t, q_h, HEADS: gl.constexpr):
    """The rotated part of 64 rows, as the first operand of a product: shared memory has no room."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))
    offs = 2 * HALF + gl.arange(0, ROPE, layout=gl.SliceLayout(0, OPERAND))
    at = (token0 + row // HEADS).to(gl.int64) * q_t + row % HEADS * q_h
    return gl.load(
        Q + at[:, None] + offs[None, :],
        mask=(row < query_len * HEADS)[:, None] & (offs >= 0)[None, :],
        other=0.0,
    )


@gluon.jit
def _add_scores(s, q_smem, k_smem, full, n, PART: gl.constexpr):
    """Ask for what one half of a tile's latents adds to its scores, once it is there."""
    stage = n % 2
    mbarrier.wait(full.index(3 * stage + PART), (n // 2) & 1)
    k = k_smem.index(2 * stage + PART).permute((1, 0))
    return warpgroup_mma(q_smem.index(PART), k, s, is_async=True)


@gluon.jit
def _scaled(acc, ratio):
    return acc * gl.convert_layout(ratio, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _store(
    acc, m, l, by, OUT, LSE, PARTS, PART_LSE, v_scale, token0, query_len, start, o_t, o_h, lse_t, cut,
    place, GROUP: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Store a group's half of the outputs, or of a part that is merged."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    l = gl.convert_layout(l, ROW)
    m = gl.convert_layout(m * by, ROW)
    whole = True
    if SPLIT:
        whole = not cut
        if cut:
            store_part(
                acc, m, l, PARTS + GROUP * HALF, PART_LSE, place, query_len, start, HEADS, HALF,
                2 * HALF, 64, GROUP == 0,
            )  # fmt: skip
    if whole:
        store_whole(
            acc, m, l, OUT + GROUP * HALF, LSE, v_scale, token0, query_len, start, o_t, o_h, lse_t,
            HEADS, HALF, 64, HAS_LSE and GROUP == 0,
        )  # fmt: skip


@gluon.jit
def _score(
    Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, turned_smem, p_smem, row_smem,
    full, empty, p_full, q_turns, by, v_scale, q_t, q_h, o_t, o_h, lse_t, tiles,
    HEADS: gl.constexpr, SPLIT: gl.constexpr, FEW: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Weigh the items' keys, and add up the outputs' right halves."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, SPLIT)
    n = 0
    item = 0
    _next_query(q_smem.index(1), Q + HALF, STARTS, at, stop, seq, start, q_t, q_h, HEADS)
    while at < stop:
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = bounds(
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
        unmasked = gl.minimum(unmasked, limit // 64)  # a piece may have no keys
        cut = False
        place = 0
        if SPLIT:
            cut, place = part_of(WORK, low, high, 0)
        my_start = start
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, 1, low, high, tile, head, SPLIT
        )
        turned = _turned_query(Q, token0, query_len, my_start, q_t, q_h, HEADS)
        bound = gl.full([64], 0, gl.int32, ROW) + limit
        if FEW == 1:
            row_pos = seq_len - query_len + (my_start + gl.arange(0, 64, layout=ROW)) // HEADS
            bound = gl.minimum(row_pos + 1, limit)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.wait(q_turns.index(0), item & 1)  # the other half

        m = gl.full([64], float("-inf"), gl.float32, ROW)
        l = gl.zeros([64], gl.float32, ROW)
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        for i in range(count):
            stage = n % 2
            s = gl.zeros([64, 64], gl.float32, SCORES)
            mbarrier.wait(full.index(3 * stage + TURNED), (n // 2) & 1)
            k = turned_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(turned, k, s, use_acc=False, is_async=True)
            s = _add_scores(s, q_smem, k_smem, full, n, LEFT)
            s = _add_scores(s, q_smem, k_smem, full, n, RIGHT)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()
            mbarrier.arrive(empty.index(3 * stage + TURNED))
            if first + i >= unmasked:
                key = (first + i) * 64
                places = key + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
                s = kept_below(s, places[None, :], bound[:, None], "0fFF800000")
                # Beyond the length there may be NaN, which no weight hides.
                if (key < seq_len) & (key + 64 > seq_len):
                    clear(k_smem.index(2 * stage), seq_len - key, HALF, 64)
                    clear(k_smem.index(2 * stage + 1), seq_len - key, HALF, 64)
            m_new = gl.maximum(m, gl.max(s, 1))
            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
            p = gl.exp2(s * by - (base * by)[:, None])
            ratio = gl.exp2((m - base) * by)
            m = m_new
            rounded = p.to(DTYPE)
            row_smem.index(stage).store(ratio)
            p_smem.index(stage).store(rounded)
            fence_async_shared()
            barrier()
            mbarrier.arrive(p_full.index(stage))
            acc = _scaled(acc, ratio)
            weights = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUTPUT, 2))
            acc = warpgroup_mma(weights, k_smem.index(2 * stage + 1), acc, is_async=True)
            l = l * ratio + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(3 * stage + RIGHT))
            n += 1
        row_smem.index(2).store(m)
        row_smem.index(3).store(l)
        barrier()
        mbarrier.arrive(q_turns.index(1))
        item += 1
        _next_query(q_smem.index(1), Q + HALF, STARTS, at, stop, seq, start, q_t, q_h, HEADS)
        _store(
            acc, m, l, by, OUT, LSE, PARTS, PART_LSE, v_scale, token0, query_len, my_start, o_t, o_h,
            lse_t, cut, place, 1, HEADS, SPLIT, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def _follow(
    Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, p_smem, row_smem, empty, p_full,
    q_turns, by, v_scale, q_t, q_h, o_t, o_h, lse_t, tiles,
    HEADS: gl.constexpr, SPLIT: gl.constexpr, FEW: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Add up the outputs' left halves by the other group's weights; load its queries' left halves."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, SPLIT)
    n = 0
    item = 0
    _next_query(q_smem.index(0), Q, STARTS, at, stop, seq, start, q_t, q_h, HEADS)
    while at < stop:
        token0, query_len, _seq_len, _first, count, _full_low, _unmasked, _limit = bounds(
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
        cut = False
        place = 0
        if SPLIT:
            cut, place = part_of(WORK, low, high, 0)
        my_start = start
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, 1, low, high, tile, head, SPLIT
        )
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_turns.index(0))
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        for _i in range(count):
            stage = n % 2
            mbarrier.wait(p_full.index(stage), (n // 2) & 1)
            acc = acc * row_smem.index(stage).load(ROW)[:, None]
            acc = warpgroup_mma(p_smem.index(stage), k_smem.index(2 * stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(3 * stage + LEFT))
            n += 1
        mbarrier.wait(q_turns.index(1), item & 1)
        m = row_smem.index(2).load(ROW)
        l = row_smem.index(3).load(ROW)
        item += 1
        _next_query(q_smem.index(0), Q, STARTS, at, stop, seq, start, q_t, q_h, HEADS)
        _store(
            acc, m, l, by, OUT, LSE, PARTS, PART_LSE, v_scale, token0, query_len, my_start, o_t, o_h,
            lse_t, cut, place, 0, HEADS, SPLIT, HAS_LSE,
        )  # fmt: skip


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
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses + 128 * line], gl.int32,
            False, 1,
        )  # fmt: skip


@gluon.jit
def _produce(
    KV, WIDE, NARROW, BT, SEQ_LENS, STARTS, WORK, k_smem, turned_smem, full, empty, k_b, k_t, table_s,
    tiles, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr, FEW: gl.constexpr,
    FETCH: gl.constexpr,
):  # fmt: skip
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
                NARROW, blocks, key, 0, 2 * HALF, k_b, turned_smem.index(stage),
                full.index(3 * stage + TURNED), empty.index(3 * stage + TURNED), free, ROPE, 64,
                BLOCK_SIZE, True, BOX, LANES,
            )  # fmt: skip
            for half in gl.static_range(2):
                copy_tile(
                    WIDE, blocks, key, 0, half * HALF, k_b, k_smem.index(2 * stage + half),
                    full.index(3 * stage + half), empty.index(3 * stage + half), free, HALF, 64,
                    BLOCK_SIZE, True, BOX, LANES,
                )  # fmt: skip
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
def _produce_narrow(
    KV, BT, SEQ_LENS, STARTS, WORK, k_smem, turned_smem, full, empty, kv_b, kv_t, table_s, tiles,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """As `_produce`, of e4m3, by four warps: loads run ahead, by half a part, of what is widened."""
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


@gluon.jit(do_not_specialize=["lse_t", "table_s", "tiles"])
def latents_kernel(
    Q, KV, OUT, LSE, PARTS, PART_LSE, BT, SEQ_LENS, STARTS, WORK, scale, v_scale,
    q_t, q_h, k_b, k_t, o_t, o_h, WIDE, NARROW, lse_t, table_s, tiles,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr, FEW: gl.constexpr,
    HAS_LSE: gl.constexpr, NARROW_CACHE: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 (token, head) rows over their sequence's latents of 512 and 64.

    Grid: (programs,): `tiles` of them, one each, or (`SPLIT`) stretches that WORK holds, of tiles of 64
    keys. `WIDE`, `NARROW`: descriptors of the cache's rows, a block `k_b` rows after the one before, in
    boxes of 256 and of 64 columns and as many rows as lie together, at most 64. `NARROW_CACHE`: latents
    of e4m3, which have no descriptors; `k_b` and `k_t` are their strides. `FETCH`: rows to come are
    fetched into the L2.
    """
    gl.static_assert(gl.num_warps() == 4)
    if SPLIT:  # let the merge be scheduled while this runs
        gdc_launch_dependents()
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, HALF], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], SHARED)
    turned_smem = gl.allocate_shared_memory(DTYPE, [2, 64, ROPE], SHARED)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, 64, 64], SHARED)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(6):
        mbarrier.init(full.index(part), count=1)
        mbarrier.init(empty.index(part), count=1)
    for group in gl.static_range(2):
        mbarrier.init(p_full.index(group), count=1)
        mbarrier.init(q_turns.index(group), count=1)
    by = scale * LOG2E
    if NARROW_CACHE:
        gl.warp_specialize(
            [
                (
                    _score,
                    (
                        Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, turned_smem,
                        p_smem, row_smem, full, empty, p_full, q_turns, by, v_scale, q_t, q_h, o_t, o_h,
                        lse_t, tiles, HEADS, SPLIT, FEW, HAS_LSE,
                    ),
                ),
                (
                    _follow,
                    (
                        Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, p_smem,
                        row_smem, empty, p_full, q_turns, by, v_scale, q_t, q_h, o_t, o_h, lse_t, tiles,
                        HEADS, SPLIT, FEW, HAS_LSE,
                    ),
                ),
                (
                    _produce_narrow,
                    (
                        KV, BT, SEQ_LENS, STARTS, WORK, k_smem, turned_smem, full, empty, k_b, k_t,
                        table_s, tiles, HEADS, BLOCK_SIZE, SPLIT, FEW,
                    ),
                ),
            ],
            [4, 4],
            [192, 80],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _score,
                    (
                        Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, turned_smem,
                        p_smem, row_smem, full, empty, p_full, q_turns, by, v_scale, q_t, q_h, o_t, o_h,
                        lse_t, tiles, HEADS, SPLIT, FEW, HAS_LSE,
                    ),
                ),
                (
                    _follow,
                    (
                        Q, OUT, LSE, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, p_smem,
                        row_smem, empty, p_full, q_turns, by, v_scale, q_t, q_h, o_t, o_h, lse_t, tiles,
                        HEADS, SPLIT, FEW, HAS_LSE,
                    ),
                ),
                (
                    _produce,
                    (
                        KV, WIDE, NARROW, BT, SEQ_LENS, STARTS, WORK, k_smem, turned_smem, full, empty,
                        k_b, k_t, table_s, tiles, HEADS, BLOCK_SIZE, SPLIT, FEW, FETCH,
                    ),
                ),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
