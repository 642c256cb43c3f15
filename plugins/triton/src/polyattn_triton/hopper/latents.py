"""Decode over latents for Hopper, in Gluon: what `kernels.mla` computes over pages, by roles.

The division of labour is FlashInfer's for this chip, but for who copies. A latent is read once, for its
key and its value. One group of four warps computes the scores of 64 rows and 64 keys, and their weights;
of the outputs each of two groups has half of the columns, 256. Weights pass from one to the other
through shared memory. A warp asks the copy engine (TMA) for latents, a tile ahead. A tile comes, and
becomes free, in parts.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from polyattn_triton.hopper.items import advance, begin, part_of, side_by_side
from polyattn_triton.hopper.latent_copies import clear, keys_of, places, produce, turns
from polyattn_triton.hopper.mla import store_part, store_whole
from polyattn_triton.hopper.names import async_load, barrier
from polyattn_triton.hopper.prefill import kept_below

HALF = gl.constexpr(256)
"""Columns of a group's outputs."""
ROPE = gl.constexpr(64)
LEFT, RIGHT, TURNED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Parts of a tile: the latents' halves, and the rotated part."""

LOG2E = gl.constexpr(1.4426950408889634)
SECTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
"""Of outputs: four threads have 32 bytes of a row, a sector. As a product leaves them they have 16.

It takes shared memory, for which two programs of `few_heads_kernel` have no room.
"""


@gluon.jit
def _query(
    q,
    FROM,
    STEP,
    at,
    stop,
    seq,
    start,
    COLUMN: gl.constexpr,
    HEADS: gl.constexpr,
    FEW: gl.constexpr,
):
    """Copy an item's half of the columns, if there is an item, into shared memory, without waiting."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    if at < stop:
        Q, q_t, q_h = FROM
        token0 = gl.load(STEP[1] + seq)
        rows = (gl.load(STEP[1] + seq + 1) - token0) * HEADS
        row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        offs = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE))
        rows_at = places(token0, row, q_t, q_h, HEADS if FEW else 0)
        async_load(
            q,
            Q + rows_at[:, None] + offs[None, :],
            mask=(row < rows)[:, None] & (offs >= 0)[None, :],
        )
        async_copy.commit_group()


@gluon.jit
def _turned_query(FROM, token0, query_len, start, HEADS: gl.constexpr, FEW: gl.constexpr):
    """The rotated part of 64 rows, as the first operand of a product: shared memory has no room."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    Q, q_t, q_h = FROM
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))
    offs = 2 * HALF + gl.arange(0, ROPE, layout=gl.SliceLayout(0, OPERAND))
    at = places(token0, row, q_t, q_h, HEADS if FEW else 0)
    return gl.load(
        Q + at[:, None] + offs[None, :],
        mask=(row < query_len * HEADS)[:, None] & (offs >= 0)[None, :],
        other=0.0,
    )


@gluon.jit
def _add_scores(s, q_smem, k_smem, full, n, PART: gl.constexpr):
    """Ask for what one half of a tile's latents adds to its scores, once it is there."""
    stage = n & 1
    mbarrier.wait(full.index(3 * stage + PART), (n >> 1) & 1)
    k = k_smem.index(2 * stage + PART).permute((1, 0))
    return warpgroup_mma(q_smem.index(PART), k, s, is_async=True)


@gluon.jit
def store_half(
    acc,
    m,
    l,
    TO,
    token0,
    query_len,
    start,
    cut,
    place,
    GROUP: gl.constexpr,
    FORM: gl.constexpr,
    STORED: gl.constexpr = None,
):
    """Store a group's half of the outputs, or of a part that is merged. `STORED`: as `store_whole`'s."""
    HEADS: gl.constexpr = FORM[0]
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, by, v_scale = TO
    l = gl.convert_layout(l, ROW)
    m = gl.convert_layout(m * by, ROW)
    if cut:
        store_part(
            acc,
            m,
            l,
            PARTS + GROUP * HALF,
            PART_LSE,
            place,
            query_len,
            start,
            HEADS,
            HALF,
            2 * HALF,
            64,
            GROUP == 0,
        )
    else:
        store_whole(
            acc,
            m,
            l,
            OUT + GROUP * HALF,
            LSE,
            v_scale,
            token0,
            query_len,
            start,
            o_t,
            o_h,
            lse_t,
            HEADS,
            HALF,
            FORM[2] and GROUP == 0,
            STORED,
        )


@gluon.jit
def _score(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    """Weigh the items' keys, and add up the outputs' right halves."""
    HEADS: gl.constexpr = FORM[0]
    FEW: gl.constexpr = FORM[1]
    DTYPE: gl.constexpr = FROM[0].dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem, k_smem, turned_smem, p_smem, row_smem = SMEM
    full, empty, p_full, q_turns = BARRIERS
    WORK, program = STEP[2], STEP[3]
    by = TO[7]
    at, stop, low, high, tile, seq, start, head = begin(WORK, 0, 1, 1, True, program)
    n = 0
    item = 0
    _query(q_smem.index(1), FROM, STEP, at, stop, seq, start, HALF, HEADS, FEW)
    while at < stop:
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, FEW, 64
        )
        unmasked = gl.minimum(unmasked, limit // 64)  # a piece may have no keys
        cut, place = part_of(WORK, low, high, 0, program)
        my_start = start
        at, low, high, tile, seq, start, head = advance(WORK, 0, 1, low, high, tile, head, True)
        turned = _turned_query(FROM, token0, query_len, my_start, HEADS, FEW)
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
            stage = n & 1
            s = gl.zeros([64, 64], gl.float32, SCORES)
            mbarrier.wait(full.index(3 * stage + TURNED), (n >> 1) & 1)
            k = turned_smem.index(stage).permute((1, 0))
            s = warpgroup_mma(turned, k, s, use_acc=False, is_async=True)
            s = _add_scores(s, q_smem, k_smem, full, n, RIGHT)
            s = _add_scores(s, q_smem, k_smem, full, n, LEFT)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()
            mbarrier.arrive(empty.index(3 * stage + TURNED))
            if first + i >= unmasked:
                key = (first + i) * 64
                column = key + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
                s = kept_below(s, column[None, :], bound[:, None], "0fFF800000")
                # Beyond the length there may be NaN, which no weight hides.
                if (key < seq_len) & (key + 64 > seq_len):
                    for half in range(2):
                        clear(k_smem.index(2 * stage + half), seq_len - key)
            m_new = gl.maximum(m, gl.max(s, 1))
            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
            p = gl.exp2(s * by - (base * by)[:, None])
            ratio = gl.exp2((m - base) * by)
            m = m_new
            rounded = p.to(DTYPE)
            acc = acc * gl.convert_layout(ratio, gl.SliceLayout(1, OUTPUT))[:, None]
            weights = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUTPUT, 2))
            acc = warpgroup_mma(weights, k_smem.index(2 * stage + 1), acc, is_async=True)
            row_smem.index(stage).store(ratio)
            p_smem.index(stage).store(rounded)
            fence_async_shared()
            barrier()
            mbarrier.arrive(p_full.index(stage))
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
        _query(q_smem.index(1), FROM, STEP, at, stop, seq, start, HALF, HEADS, FEW)
        store_half(acc, m, l, TO, token0, query_len, my_start, cut, place, 1, FORM, SECTORS)


@gluon.jit
def _follow(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    """Add up the outputs' left halves by the other group's weights; load its queries' left halves."""
    HEADS: gl.constexpr = FORM[0]
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    q_smem, k_smem, _turned_smem, p_smem, row_smem = SMEM
    _full, empty, p_full, q_turns = BARRIERS
    WORK, program = STEP[2], STEP[3]
    at, stop, low, high, tile, seq, start, head = begin(WORK, 0, 1, 1, True, program)
    n = 0
    item = 0
    _query(q_smem.index(0), FROM, STEP, at, stop, seq, start, 0, HEADS, FORM[1])
    while at < stop:
        token0, query_len, _seq_len, _first, count, _full_low, _unmasked, _limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, FORM[1], 64
        )
        cut, place = part_of(WORK, low, high, 0, program)
        my_start = start
        at, low, high, tile, seq, start, head = advance(WORK, 0, 1, low, high, tile, head, True)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_turns.index(0))
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        for _i in range(count):
            stage = n & 1
            mbarrier.wait(p_full.index(stage), (n >> 1) & 1)
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
        _query(q_smem.index(0), FROM, STEP, at, stop, seq, start, 0, HEADS, FORM[1])
        store_half(acc, m, l, TO, token0, query_len, my_start, cut, place, 0, FORM, SECTORS)


@gluon.jit(do_not_specialize=["lse_t", "table_s", "tiles"])
def latents_kernel(
    Q, OUT, LSE, PARTS, PART_LSE, BT, SEQ_LENS, STARTS, WORK, scale, v_scale,
    q_t, q_h, k_b, o_t, o_h, WIDE, NARROW, lse_t, table_s, tiles,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, FEW: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 (token, head) rows over their sequence's latents of 512 and 64.

    Grid: (programs,), each with a stretch that WORK holds, of tiles of 64 keys. `WIDE`, `NARROW`:
    descriptors of the cache's rows, a block `k_b` rows after the one before, in boxes of 256 and of 64
    columns and as many rows as lie together, at most 64.
    """
    gl.static_assert(gl.num_warps() == 4)
    gdc_launch_dependents()  # let the merge be scheduled while this runs
    gdc_wait()  # this was scheduled while what stores ran
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, HALF], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], SHARED)
    turned_smem = gl.allocate_shared_memory(DTYPE, [2, 64, ROPE], SHARED)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, 64, 64], SHARED)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = turns(6)
    p_full, q_turns = turns(2)
    lanes = gl.cdiv(HEADS, 64)
    if FEW:
        lanes = gl.maximum(gl.cdiv((gl.load(STARTS + 1) - gl.load(STARTS)) * HEADS, 64), 1)
    program = side_by_side(WORK, lanes)
    STEP = (SEQ_LENS, STARTS, WORK, program)
    FORM: gl.constexpr = (HEADS, FEW, HAS_LSE)
    FROM = (Q, q_t, q_h)
    TO = (OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale * LOG2E, v_scale)
    SMEM = (q_smem, k_smem, turned_smem, p_smem, row_smem)
    consuming = (FROM, TO, STEP, SMEM, (full, empty, p_full, q_turns), FORM)
    PIPE: gl.constexpr = (64, 2, 2, 3)
    producing = (
        WIDE,
        NARROW,
        BT,
        k_b,
        table_s,
        STEP,
        SMEM,
        (full, empty),
        HEADS,
        BLOCK_SIZE,
        FEW,
        PIPE,
        program,
    )
    gl.warp_specialize(
        [(_score, consuming), (_follow, consuming), (produce, producing)], [4, 1], [232, 24]
    )
