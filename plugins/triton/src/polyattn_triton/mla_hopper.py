"""The MLA kernel for Hopper, in Gluon: what `mla_kernels` computes, with the memory laid out by hand.

Triton's own pipeline asks for the next tile only after both products of this one, and has every
warp group compute all scores. Here the next tile's copy is issued before this tile's products, into
the other of two buffers; each warp group computes half of the scores' columns and half of the
output's, and the probabilities pass from one to the other through shared memory. The division of
labour is that of FlashInfer's and FlashMLA's kernels for this chip.

Gluon has no interpreter: CI compiles this ahead of time, and the H200 checks its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _blocks(
    BT, SLOTS, tile, length, LAYOUT: gl.constexpr,
    SPARSE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Return where a tile's rows lie: slots, block numbers, or the one block number of them all."""
    at = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=LAYOUT)
    if SPARSE:
        found = gl.load(SLOTS + at, mask=at < length, other=-1)
    elif BLOCK_SIZE % BLOCK_N == 0:
        found = gl.load(BT + tile * BLOCK_N // BLOCK_SIZE, mask=tile * BLOCK_N < length, other=0)
    else:
        found = gl.load(BT + at // BLOCK_SIZE, mask=at < length, other=0)
    return found


@gluon.jit
def _copy(
    to, KV, blocks, tile, length, kv_b, kv_t, LAYOUT: gl.constexpr, WIDTH: gl.constexpr,
    SPARSE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the rows of a tile into shared memory; rows past the length, or unchosen, as zeros."""
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offs = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=rows)
    if SPARSE:
        inside = blocks >= 0
        slot = gl.maximum(blocks, 0)
        row = (slot // BLOCK_SIZE).to(gl.int64) * kv_b + (slot % BLOCK_SIZE) * kv_t
    else:
        inside = at < length
        row = blocks.to(gl.int64) * kv_b + (at % BLOCK_SIZE) * kv_t
    async_copy.async_copy_global_to_shared(
        to, KV + row[:, None] + offs[None, :], mask=inside[:, None] & (offs < WIDTH)[None, :]
    )


@gluon.jit
def _row_max(s, PAIR: gl.constexpr, ROW: gl.constexpr):
    """Each warp group's maximum of its half of a row, exchanged once: a reduction does it twice."""
    halves = gl.max(s.reshape((s.shape[0], 2, s.shape[1] // 2)), 2)
    return gl.convert_layout(gl.max(gl.convert_layout(halves, PAIR), 1), ROW)


@gluon.jit(do_not_specialize=["lse_t", "table_s", "splits"])
def mla_hopper_kernel(
    Q, KV, OUT, LSE, PARTS, PART_LSE, BT, SLOTS, SEQ_LENS, scale, v_scale,
    q_t, q_h, kv_b, kv_t, o_t, o_h, lse_t, table_s,
    splits,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr,
    SPARSE: gl.constexpr, HAS_LSE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One token, 64 of its heads, all its rows or one split of them, by two warp groups.

    Grid: (tokens, head blocks, splits). `table_s`: the width of the block table, or of SLOTS.
    """
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PAIR: gl.constexpr = gl.DistributedLinearLayout(  # SCORES' rows, both groups' halves in each
        reg_bases=[[0, 1], [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]], block_bases=[], shape=[BLOCK_H, 2],
    )  # fmt: skip
    O_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    NARROW_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    gl.static_assert(gl.num_warps() == 8)

    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        gdc_launch_dependents()
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(2)
    head0 = gl.program_id(1) * BLOCK_H
    if SPARSE:
        length = table_s
        SLOTS += token * table_s
    else:
        length = gl.load(SEQ_LENS + token)
        BT += token * table_s

    q_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, RANK], SHARED)
    q_rope_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, ROPE], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, RANK], SHARED)
    k_rope_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, ROPE], SHARED)
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SHARED)

    head_w = head0 + gl.arange(0, BLOCK_H, layout=WIDE_ROW)
    offs_w = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
    async_copy.async_copy_global_to_shared(
        q_smem, Q + (token * q_t + head_w * q_h)[:, None] + offs_w[None, :],
        mask=(head_w < HEADS)[:, None] & (offs_w < RANK)[None, :],
    )  # fmt: skip
    head_n = head0 + gl.arange(0, BLOCK_H, layout=NARROW_ROW)
    offs_n = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
    async_copy.async_copy_global_to_shared(
        q_rope_smem, Q + RANK + (token * q_t + head_n * q_h)[:, None] + offs_n[None, :],
        mask=(head_n < HEADS)[:, None] & (offs_n < ROPE)[None, :],
    )  # fmt: skip

    first = 0
    last = gl.cdiv(length, BLOCK_N)
    if SPLIT:
        each = gl.cdiv(last, splits)
        first = split * each
        last = gl.minimum(first + each, last)

    wide = _blocks(BT, SLOTS, first, length, WIDE_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
    narrow = _blocks(BT, SLOTS, first, length, NARROW_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
    if first < last:
        _copy(
            k_smem.index(0), KV, wide, first, length, kv_b, kv_t, WIDE, RANK,
            SPARSE, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        _copy(
            k_rope_smem.index(0), KV + RANK, narrow, first, length, kv_b, kv_t, NARROW, ROPE,
            SPARSE, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
    async_copy.commit_group()
    wide = _blocks(BT, SLOTS, first + 1, length, WIDE_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
    narrow = _blocks(BT, SLOTS, first + 1, length, NARROW_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)

    acc = gl.zeros([BLOCK_H, RANK], gl.float32, OUTPUT)
    m = gl.full([BLOCK_H], float("-inf"), gl.float32, S_ROW)
    l = gl.zeros([BLOCK_H], gl.float32, S_ROW)
    by = scale * LOG2E
    for tile in range(first, last):
        here = (tile - first) % 2
        at = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        if SPARSE:
            seen = gl.load(SLOTS + at, mask=at < length, other=-1) >= 0
        else:
            seen = at < length

        async_copy.wait_group(0)
        fence_async_shared()
        k = k_smem.index(here)
        s = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
        s = warpgroup_mma(q_smem, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope_smem, k_rope_smem.index(here).permute((1, 0)), s, is_async=True)

        # While the scores are computed: the next tile's copy, and where the one after it lies.
        if tile + 1 < last:
            _copy(
                k_smem.index(1 - here), KV, wide, tile + 1, length, kv_b, kv_t, WIDE, RANK,
                SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
            _copy(
                k_rope_smem.index(1 - here), KV + RANK, narrow, tile + 1, length, kv_b, kv_t,
                NARROW, ROPE, SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
        async_copy.commit_group()
        wide = _blocks(BT, SLOTS, tile + 2, length, WIDE_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
        narrow = _blocks(BT, SLOTS, tile + 2, length, NARROW_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
        s = warpgroup_mma_wait(0, deps=[s])

        s = gl.where(seen[None, :], s * by, float("-inf"))
        m_new = gl.maximum(m, _row_max(s, PAIR, S_ROW))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
        alpha = gl.exp2(m - base)
        p = gl.exp2(s - base[:, None])
        m = m_new
        # To registers by ordinary loads: a fence for the tensor cores' view of shared memory would
        # wait for the copy that is on its way.
        p_smem.store(p.to(DTYPE))
        weights = p_smem.load(gl.DotOperandLayout(0, OUTPUT, 2))
        acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
        acc = warpgroup_mma(weights, k, acc, is_async=True)
        l = l * alpha + gl.sum(p, 1)  # while the product runs: the groups exchange their sums
        acc = warpgroup_mma_wait(0, deps=[acc])

    l = gl.convert_layout(l, O_ROW)
    m = gl.convert_layout(m, O_ROW)
    safe = gl.where(l == 0.0, 1.0, l)
    head = head0 + gl.arange(0, BLOCK_H, layout=O_ROW)
    head_ok = head < HEADS
    offs = gl.arange(0, RANK, layout=gl.SliceLayout(0, OUTPUT))
    stored = head_ok[:, None] & (offs < RANK)[None, :]
    if SPLIT:
        part = (token * HEADS + head) * splits + split
        gl.store(PARTS + part[:, None] * RANK + offs[None, :], acc / safe[:, None], mask=stored)
        lse = gl.where(l == 0.0, float("-inf"), m + gl.log2(safe))
        gl.store(PART_LSE + part, lse, mask=head_ok)
    else:
        out = acc * (v_scale / safe)[:, None]
        o_row = token * o_t + head * o_h
        gl.store(OUT + o_row[:, None] + offs[None, :], out.to(DTYPE), mask=stored)
        if HAS_LSE:
            lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(safe)) * LN2)
            gl.store(LSE + token * lse_t + head, lse, mask=head_ok)
