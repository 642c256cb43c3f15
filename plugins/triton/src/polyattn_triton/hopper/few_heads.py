"""Decode over latents of 16 bits by few heads for Hopper, in Gluon: as `latents`, on its side.

An instruction of the tensor cores has 64 rows, which few heads don't fill. Here keys are the rows of the
first product and the values' columns those of the second; heads are columns, 16 or 32. So the outputs
take few registers: two programs run on a multiprocessor, and one computes while the other's latents come.

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

from polyattn_triton.hopper.items import advance, begin, part_of
from polyattn_triton.hopper.latent_bytes import rows_of_tile
from polyattn_triton.hopper.latent_copies import clear, keys_of, places, produce, turns
from polyattn_triton.hopper.latents import HALF, LEFT, LOG2E, RIGHT, ROPE, TURNED, store_half
from polyattn_triton.hopper.names import async_load, barrier
from polyattn_triton.hopper.prefill import kept_below

OF_HALF = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
OF_TURNED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _copy_columns(to, FROM, token0, rows, start, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
    """Copy some columns of a tile's queries into shared memory, without waiting."""
    Q, q_t, q_h = FROM
    row = start + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    offs = COLUMN + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = places(token0, row, q_t, q_h, 0)
    async_load(
        to, Q + at[:, None] + offs[None, :], mask=(row < rows)[:, None] & (offs >= 0)[None, :]
    )


@gluon.jit
def _copy_queries(FROM, SMEM, STEP, at, stop, seq, start, HEADS: gl.constexpr):
    """Copy an item's queries, if there is an item, into shared memory, without waiting."""
    if at < stop:
        token0 = gl.load(STEP[1] + seq)
        rows = (gl.load(STEP[1] + seq + 1) - token0) * HEADS
        for half in gl.static_range(2):
            _copy_columns(SMEM[0].index(half), FROM, token0, rows, start, half * HALF, OF_HALF)
        _copy_columns(SMEM[3].index(0), FROM, token0, rows, start, 2 * HALF, OF_TURNED)
        async_copy.commit_group()


@gluon.jit
def _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    """Attend with the items' rows to their keys."""
    HEADS: gl.constexpr = FORM[0]
    ROWS: gl.constexpr = FORM[3]
    DTYPE: gl.constexpr = FROM[0].dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    q_smem, k_smem, turned_smem, q_turned, p_smem = SMEM
    full, empty = BARRIERS
    WORK, tiles = STEP[2], STEP[3]
    by = TO[7]
    key_of = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, True)
    n = 0
    _copy_queries(FROM, SMEM, STEP, at, stop, seq, start, HEADS)
    while at < stop:
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, 0, ROWS
        )
        unmasked = gl.minimum(unmasked, limit // 64)  # a piece may have no keys
        cut, place = part_of(WORK, low, high, 0)
        mine = start
        at, low, high, tile, seq, start, head = advance(WORK, tiles, 1, low, high, tile, head, True)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()

        m = gl.full([ROWS], float("-inf"), gl.float32, HEAD)
        sums = gl.zeros([64, ROWS], gl.float32, SCORES)
        left = gl.zeros([HALF, ROWS], gl.float32, SCORES)
        right = gl.zeros([HALF, ROWS], gl.float32, SCORES)
        for i in range(count):
            phase = n & 1
            # No compiler knows that it is zero: descriptors that a loop doesn't change are spilled.
            zero = n >> 30
            s = gl.zeros([64, ROWS], gl.float32, SCORES)
            mbarrier.wait(full.index(TURNED), phase)
            q = q_turned.index(zero).permute((1, 0))
            s = warpgroup_mma(turned_smem.index(zero), q, s, use_acc=False, is_async=True)
            for half in gl.static_range(RIGHT, LEFT - 1, -1):
                mbarrier.wait(full.index(half), phase)
                q = q_smem.index(zero + half).permute((1, 0))
                s = warpgroup_mma(k_smem.index(zero + half), q, s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()
            mbarrier.arrive(empty.index(TURNED))
            if first + i >= unmasked:
                key = (first + i) * 64
                s = kept_below(s, (key + key_of)[:, None], limit, "0fFF800000")
                # Beyond the length there may be NaN, which no weight hides.
                if (key < seq_len) & (key + 64 > seq_len):
                    for part in range(2):
                        clear(k_smem.index(part), seq_len - key)
            m_new = gl.maximum(m, gl.max(s, 0))
            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
            p = gl.exp2(s * by - (base * by)[None, :])
            ratio = gl.exp2((m - base) * by)
            m = m_new
            p_smem.index(0).store(p.to(DTYPE))
            fence_async_shared()
            barrier()
            sums = sums * ratio[None, :] + p
            right = right * ratio[None, :]
            left = left * ratio[None, :]
            weights = p_smem.index(zero)
            v = k_smem.index(zero + RIGHT).permute((1, 0))
            right = warpgroup_mma(v, weights, right, is_async=True)
            v = k_smem.index(zero + LEFT).permute((1, 0))
            left = warpgroup_mma(v, weights, left, is_async=True)
            left, right = warpgroup_mma_wait(1, deps=[left, right])
            barrier()
            mbarrier.arrive(empty.index(RIGHT))
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            barrier()
            mbarrier.arrive(empty.index(LEFT))
            n += 1
        _copy_queries(FROM, SMEM, STEP, at, stop, seq, start, HEADS)
        l = gl.sum(sums, 0)
        store_half(left.permute((1, 0)), m, l, TO, token0, query_len, mine, cut, place, 0, FORM)
        store_half(right.permute((1, 0)), m, l, TO, token0, query_len, mine, cut, place, 1, FORM)


@gluon.jit(do_not_specialize=["lse_t", "table_s", "tiles"])
def few_heads_kernel(
    Q,
    OUT,
    LSE,
    PARTS,
    PART_LSE,
    BT,
    SEQ_LENS,
    STARTS,
    WORK,
    scale,
    v_scale,
    q_t,
    q_h,
    k_b,
    o_t,
    o_h,
    WIDE,
    NARROW,
    lse_t,
    table_s,
    tiles,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    FEW: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """One token's heads, at most 32, over its sequence's latents. As `latents.latents_kernel`."""
    gl.static_assert(gl.num_warps() == 4)
    gl.static_assert(FEW == 0)
    gdc_launch_dependents()  # let the merge be scheduled while this runs
    gdc_wait()  # this was scheduled while what stores ran
    DTYPE: gl.constexpr = Q.dtype.element_ty
    ROWS: gl.constexpr = rows_of_tile(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, 64, HALF], SHARED)
    turned_smem = gl.allocate_shared_memory(DTYPE, [1, 64, ROPE], SHARED)
    q_turned = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SHARED)
    TURNED_WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    p_smem = gl.allocate_shared_memory(DTYPE, [1, 64, ROWS], TURNED_WEIGHTS)
    BARRIERS = turns(3)
    STEP = (SEQ_LENS, STARTS, WORK, tiles)
    FORM: gl.constexpr = (HEADS, FEW, HAS_LSE, ROWS)
    FROM = (Q, q_t, q_h)
    TO = (OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale * LOG2E, v_scale)
    SMEM = (q_smem, k_smem, turned_smem, q_turned, p_smem)
    PIPE: gl.constexpr = (ROWS, 1, 2, 3)
    consuming = (FROM, TO, STEP, SMEM, BARRIERS, FORM)
    producing = (WIDE, NARROW, BT, k_b, table_s, STEP, SMEM, BARRIERS, HEADS, BLOCK_SIZE, FEW, PIPE)
    gl.warp_specialize([(_attend, consuming), (produce, producing)], [1], [24])
