"""The MLA kernel for Hopper, in Gluon: what `kernels.mla` computes, with the memory laid out by hand.

Triton's own pipeline asks for the next tile only after both products of this one, and has every
warp group compute all scores. Here the next tile's copy is issued before this tile's products, into
the other of two buffers; each warp group computes half of the scores' columns and half of the
output's, and the probabilities pass from one to the other through shared memory. The division of
labour is that of FlashInfer's and FlashMLA's kernels for this chip.

Of e4m3 a tile has half the bytes: two are on their way, and each thread widens what it copied itself.

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

from polyattn_triton.hopper.latent_copies import places
from polyattn_triton.hopper.names import async_load, barrier

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
        slots = gl.load(SLOTS + at, mask=at < length, other=-1)
    elif BLOCK_SIZE % BLOCK_N == 0:
        slots = gl.load(BT + tile * BLOCK_N // BLOCK_SIZE, mask=tile * BLOCK_N < length, other=0)
    else:
        slots = gl.load(BT + at // BLOCK_SIZE, mask=at < length, other=0)
    return slots


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
    async_load(
        to, KV + row[:, None] + offs[None, :], mask=inside[:, None] & (offs < WIDTH)[None, :]
    )


@gluon.jit
def _row_max(s, PAIR: gl.constexpr, ROW: gl.constexpr):
    """Each warp group's maximum of its half of a row, exchanged once: a reduction does it twice."""
    halves = gl.max(s.reshape((s.shape[0], 2, s.shape[1] // 2)), 2)
    return gl.convert_layout(gl.max(gl.convert_layout(halves, PAIR), 1), ROW)


@gluon.jit
def _attend(
    Q, KV, TABLE, PICKED, q_smem, q_rope_smem, k_smem, k_rope_smem, raw_smem, raw_rope_smem, p_smem,
    scale, q_t, q_h, kv_b, kv_t, token0, query_len, length, start, begin, end,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr,
    SPARSE: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Attend with a tile's rows to all its key tiles, or (`SPLIT`) those from `begin` to `end`."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PAIR: gl.constexpr = gl.DistributedLinearLayout(  # SCORES' rows, both groups' halves in each
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[BLOCK_H, 2],
    )
    O_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    # As keys lie in the cache: 16 bytes a thread.
    BYTES: gl.constexpr = KV.dtype.element_ty.is_fp8()
    KEYS: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [8, 1], [1, 0]) if BYTES else WIDE
    TURNED: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]) if BYTES else NARROW
    AHEAD: gl.constexpr = 2 if BYTES else 1
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    NARROW_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    KEYS_ROW: gl.constexpr = gl.SliceLayout(1, KEYS)
    TURNED_ROW: gl.constexpr = gl.SliceLayout(1, TURNED)
    queries = query_len * HEADS

    row_w = start + gl.arange(0, BLOCK_H, layout=WIDE_ROW)
    offs_w = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
    q_w = places(token0, row_w, q_t, q_h, HEADS)
    async_load(
        q_smem,
        Q + q_w[:, None] + offs_w[None, :],
        mask=(row_w < queries)[:, None] & (offs_w < RANK)[None, :],
    )
    row_n = start + gl.arange(0, BLOCK_H, layout=NARROW_ROW)
    offs_n = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
    q_n = places(token0, row_n, q_t, q_h, HEADS)
    async_load(
        q_rope_smem,
        Q + RANK + q_n[:, None] + offs_n[None, :],
        mask=(row_n < queries)[:, None] & (offs_n < ROPE)[None, :],
    )

    high_key = length
    if FEW == 1:
        high_key = length - query_len + (gl.minimum(start + BLOCK_H, queries) - 1) // HEADS + 1
    first = 0
    last = gl.cdiv(high_key, BLOCK_N)
    if SPLIT:
        first = begin
        last = gl.minimum(end, last)

    wide = _blocks(TABLE, PICKED, first, length, KEYS_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
    narrow = _blocks(TABLE, PICKED, first, length, TURNED_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
    for i in gl.static_range(AHEAD):
        if first + i < last:
            _copy(
                raw_smem.index(i), KV, wide, first + i, length, kv_b, kv_t, KEYS, RANK,
                SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
            _copy(
                raw_rope_smem.index(i), KV + RANK, narrow, first + i, length, kv_b, kv_t, TURNED,
                ROPE, SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
        async_copy.commit_group()
        following = first + i + 1
        wide = _blocks(TABLE, PICKED, following, length, KEYS_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
        narrow = _blocks(TABLE, PICKED, following, length, TURNED_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)

    acc = gl.zeros([BLOCK_H, RANK], gl.float32, OUTPUT)
    m = gl.full([BLOCK_H], float("-inf"), gl.float32, S_ROW)
    l = gl.zeros([BLOCK_H], gl.float32, S_ROW)
    by = scale * LOG2E
    for tile in range(first, last):
        here = (tile - first) % 2
        key = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        if SPARSE:
            seen = (gl.load(PICKED + key, mask=key < length, other=-1) >= 0)[None, :]
        elif FEW == 1:
            row_s = start + gl.arange(0, BLOCK_H, layout=S_ROW)
            seen = key[None, :] <= (length - query_len + row_s // HEADS)[:, None]
            seen = seen & (key < length)[None, :]
        else:
            seen = (key < length)[None, :]

        async_copy.wait_group(AHEAD - 1)
        if BYTES:
            k = k_smem.index(0)
            k_rope = k_rope_smem.index(0)
            k.store(raw_smem.index(here).load(KEYS).to(gl.float32).to(DTYPE))
            k_rope.store(raw_rope_smem.index(here).load(TURNED).to(gl.float32).to(DTYPE))
        else:
            k = k_smem.index(here)
            k_rope = k_rope_smem.index(here)
        fence_async_shared()
        if BYTES:
            barrier()
        s = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
        s = warpgroup_mma(q_smem, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope_smem, k_rope.permute((1, 0)), s, is_async=True)

        # While the scores are computed: a later tile's copy, and where the one after it lies.
        ahead = tile + AHEAD
        if ahead < last:
            _copy(
                raw_smem.index((here + AHEAD) % 2), KV, wide, ahead, length, kv_b, kv_t, KEYS, RANK,
                SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
            _copy(
                raw_rope_smem.index((here + AHEAD) % 2), KV + RANK, narrow, ahead, length, kv_b, kv_t,
                TURNED, ROPE, SPARSE, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
        async_copy.commit_group()
        wide = _blocks(TABLE, PICKED, ahead + 1, length, KEYS_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
        narrow = _blocks(TABLE, PICKED, ahead + 1, length, TURNED_ROW, SPARSE, BLOCK_N, BLOCK_SIZE)
        s = warpgroup_mma_wait(0, deps=[s])

        s = gl.where(seen, s * by, float("-inf"))
        m_new = gl.maximum(m, _row_max(s, PAIR, S_ROW))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
        alpha = gl.exp2(m - base)
        p = gl.exp2(s - base[:, None])
        m = m_new
        # To registers by ordinary loads: a fence for the tensor cores' view of shared memory
        # would wait for the copy that is on its way.
        p_smem.store(p.to(DTYPE))
        weights = p_smem.load(gl.DotOperandLayout(0, OUTPUT, 2))
        acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
        acc = warpgroup_mma(weights, k, acc, is_async=True)
        l = l * alpha + gl.sum(p, 1)  # while the product runs: the groups exchange their sums
        acc = warpgroup_mma_wait(0, deps=[acc])

    l = gl.convert_layout(l, O_ROW)
    m = gl.convert_layout(m, O_ROW)
    return acc, m, l


@gluon.jit
def store_whole(
    acc, m, l, OUT, LSE, v_scale, token0, query_len, start, o_t, o_h, lse_t,
    HEADS: gl.constexpr, RANK: gl.constexpr, HAS_LSE: gl.constexpr, STORED: gl.constexpr = None,
):  # fmt: skip
    """Store the outputs and LSE of a tile that only this program computes.

    `STORED`: the layout in which outputs are stored; without it they are as the product left them.
    """
    OUTPUT: gl.constexpr = acc.type.layout
    safe = gl.where(l == 0.0, 1.0, l)
    row = start + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, OUTPUT))
    row_ok = row < query_len * HEADS
    out = (acc * (v_scale / safe)[:, None]).to(OUT.dtype.element_ty)
    LAYOUT: gl.constexpr = OUTPUT if STORED is None else STORED
    out = gl.convert_layout(out, LAYOUT)
    o_row = start + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    offs = gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(
        OUT + places(token0, o_row, o_t, o_h, HEADS)[:, None] + offs[None, :],
        out,
        mask=(o_row < query_len * HEADS)[:, None] & (offs < RANK)[None, :],
    )
    if HAS_LSE:
        lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(safe)) * LN2)
        gl.store(LSE + places(token0, row, lse_t, 1, HEADS), lse, mask=row_ok)


@gluon.jit
def store_part(
    acc, m, l, PARTS, PART_LSE, part, query_len, start,
    HEADS: gl.constexpr, WIDTH: gl.constexpr, RANK: gl.constexpr, BLOCK_H: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Store `WIDTH` columns of a piece of a tile, normalised, with its LSE in base 2."""
    OUTPUT: gl.constexpr = acc.type.layout
    safe = gl.where(l == 0.0, 1.0, l)
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, OUTPUT))
    row_ok = start + row < query_len * HEADS
    offs = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUTPUT))
    at = part * BLOCK_H + row
    gl.store(
        PARTS + part * (BLOCK_H * RANK) + row[:, None] * RANK + offs[None, :],
        acc * (1.0 / safe)[:, None],
        mask=row_ok[:, None] & (offs < WIDTH)[None, :],
    )
    if HAS_LSE:
        gl.store(PART_LSE + at, gl.where(l == 0.0, float("-inf"), m + gl.log2(safe)), mask=row_ok)


@gluon.jit
def _lengths(SEQ_LENS, STARTS, seq, table_s, SPARSE: gl.constexpr, FEW: gl.constexpr):
    """A sequence's first token, its query tokens, and its length."""
    token0 = seq
    query_len = 1
    if FEW:
        token0 = gl.load(STARTS + seq)
        query_len = gl.load(STARTS + seq + 1) - token0
    if SPARSE:
        length = table_s
    else:
        length = gl.load(SEQ_LENS + seq)
    return token0, query_len, length


@gluon.jit(do_not_specialize=["lse_t", "table_s"])
def mla_hopper_kernel(
    Q, KV, OUT, LSE, PARTS, PART_LSE, BT, SLOTS, SEQ_LENS, STARTS, WORK, scale, v_scale,
    q_t, q_h, kv_b, kv_t, o_t, o_h, lse_t, table_s,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr,
    SPARSE: gl.constexpr, FEW: gl.constexpr, HAS_LSE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 (token, head) rows over their sequence's cached rows, by two warp groups.

    Grid and arguments as `kernels.mla.mla_kernel`'s.
    """
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    gl.static_assert(gl.num_warps() == 8)

    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        gdc_launch_dependents()
    q_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, RANK], SHARED)
    q_rope_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, ROPE], SHARED)
    RAW: gl.constexpr = KV.dtype.element_ty
    STAGES: gl.constexpr = 1 if RAW.is_fp8() else 2
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, RANK], SHARED)
    k_rope_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, ROPE], SHARED)
    raw_smem = k_smem
    raw_rope_smem = k_rope_smem
    if RAW.is_fp8():
        BYTES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
        raw_smem = gl.allocate_shared_memory(RAW, [2, BLOCK_N, RANK], BYTES)
        raw_rope_smem = gl.allocate_shared_memory(RAW, [2, BLOCK_N, ROPE], BYTES)
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SHARED)

    # The work, as in `tiles.my_stretch`: a whole tile, or a stretch of tiles.
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SPLIT:
        share = gl.load(WORK)
        item = gl.load(WORK + 2)
        count = gl.load(WORK + 3)
        COLUMN = WORK + 4 + program
        LINE = WORK + 4 + 5 * programs
        at = program * share
        stop = gl.minimum(at + share, gl.load(WORK + 1))
        index = gl.load(COLUMN)
        low = gl.load(COLUMN + programs)
        high = gl.load(COLUMN + 2 * programs)
        seq = gl.load(COLUMN + 3 * programs)
        start = gl.load(COLUMN + 4 * programs)
        while at < stop:
            token0, query_len, length = _lengths(SEQ_LENS, STARTS, seq, table_s, SPARSE, FEW)
            here = seq.to(gl.int64) * table_s
            acc, m, l = _attend(
                Q, KV, BT + here, SLOTS + here, q_smem, q_rope_smem, k_smem, k_rope_smem,
                raw_smem, raw_rope_smem, p_smem, scale, q_t, q_h, kv_b, kv_t,
                token0, query_len, length, start,
                gl.maximum(at - low - item, 0), gl.minimum(stop, high) - low - item,
                HEADS, RANK, ROPE, BLOCK_H, BLOCK_N, BLOCK_SIZE, True, SPARSE, FEW,
            )  # fmt: skip
            begun = low // share
            if (high - 1) // share > begun:
                store_part(
                    acc, m, l, PARTS, PART_LSE, 2 * program + (begun == program).to(gl.int32),
                    query_len, start, HEADS, RANK, RANK, BLOCK_H, True,
                )  # fmt: skip
            else:
                store_whole(
                    acc, m, l, OUT, LSE, v_scale, token0, query_len, start, o_t, o_h, lse_t,
                    HEADS, RANK, HAS_LSE,
                )  # fmt: skip
            # The next tile's copies go where this one's products read: both groups are through.
            async_copy.wait_group(0)
            barrier()
            at = high
            low = high
            index = gl.minimum(index + 1, count - 1)
            high = gl.load(LINE + index + 1)
            seq = gl.load(LINE + count + 1 + index)
            start = gl.load(LINE + 2 * count + 1 + index)
    else:
        seq = gl.load(WORK + program)
        start = gl.load(WORK + programs + program)
        token0, query_len, length = _lengths(SEQ_LENS, STARTS, seq, table_s, SPARSE, FEW)
        here = seq.to(gl.int64) * table_s
        acc, m, l = _attend(
            Q, KV, BT + here, SLOTS + here, q_smem, q_rope_smem, k_smem, k_rope_smem,
            raw_smem, raw_rope_smem, p_smem, scale, q_t, q_h, kv_b, kv_t,
            token0, query_len, length, start, 0, 0,
            HEADS, RANK, ROPE, BLOCK_H, BLOCK_N, BLOCK_SIZE, False, SPARSE, FEW,
        )  # fmt: skip
        store_whole(
            acc, m, l, OUT, LSE, v_scale, token0, query_len, start, o_t, o_h, lse_t,
            HEADS, RANK, HAS_LSE,
        )  # fmt: skip
