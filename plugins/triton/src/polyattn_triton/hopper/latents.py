"""Decode over latents for Hopper, in Gluon: what `kernels.mla` computes over pages, by roles.

Two groups of four warps have half of the outputs' columns each, 256, of 64 rows. They take turns at tiles
of 64 keys: one computes a tile's scores and weights, which pass to the other through shared memory. So
while one weighs, the other multiplies. A latent is read once, for its key and its value. A warp asks the
copy engine (TMA) for latents, a tile ahead. A tile comes, and becomes free, in parts.

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
from polyattn_triton.hopper.latent_copies import (
    HALF,
    LEFT,
    RIGHT,
    ROPE,
    TURNED,
    keys_of,
    produce,
)
from polyattn_triton.hopper.mla import store_part, store_whole
from polyattn_triton.hopper.prefill import clear, kept_below
from polyattn_triton.hopper.rows import barrier

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _query(q, FROM, STEP, at, stop, seq, start, COLUMN: gl.constexpr, HEADS: gl.constexpr):
    """Copy an item's half of the columns, if there is an item, into shared memory, without waiting."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    if at < stop:
        Q, q_t, q_h = FROM
        token0 = gl.load(STEP[1] + seq)
        rows = (gl.load(STEP[1] + seq + 1) - token0) * HEADS
        row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        offs = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE))
        places = (token0 + row // HEADS).to(gl.int64) * q_t + row % HEADS * q_h
        async_copy.async_copy_global_to_shared(
            q,
            Q + places[:, None] + offs[None, :],
            mask=(row < rows)[:, None] & (offs >= 0)[None, :],
        )
        async_copy.commit_group()


@gluon.jit
def _turned_query(FROM, token0, query_len, start, HEADS: gl.constexpr):
    """The rotated part of 64 rows, as the first operand of a product: shared memory has no room."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    Q, q_t, q_h = FROM
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
    # `n >> 30` is zero, which no compiler knows: descriptors that a loop doesn't change are spilled.
    return warpgroup_mma(q_smem.index(PART + (n >> 30)), k, s, is_async=True)


@gluon.jit
def _follow(acc, l, n, SMEM, BARRIERS, GROUP: gl.constexpr):
    """Ask for what tile `n`, which the other group weighs, adds to the outputs: these, sums, maxima."""
    ROW: gl.constexpr = l.type.layout
    stage = n % 2
    mbarrier.wait(BARRIERS[2].index(stage), (n // 2) & 1)
    ratio = SMEM[4].index(2 * stage).load(ROW)
    m = SMEM[4].index(2 * stage + 1).load(ROW)
    acc = acc * gl.convert_layout(ratio, gl.SliceLayout(1, acc.type.layout))[:, None]
    acc = warpgroup_mma(SMEM[3].index(stage), SMEM[1].index(2 * stage + GROUP), acc, is_async=True)
    return acc, l * ratio, m


@gluon.jit
def _weigh(
    acc, m, l, turned, n, key, unmasked, bound, seq_len, by, SMEM, BARRIERS,
    FOLLOWS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Weigh tile `n`, and add up a half of its outputs; `FOLLOWS`: of the tile's before, too."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUT: gl.constexpr = acc.type.layout
    q_smem, k_smem, turned_smem, p_smem, row_smem = SMEM
    full, empty, p_full, _q_ready, _q_done = BARRIERS
    stage = n % 2
    if FOLLOWS:
        acc, l, m = _follow(acc, l, n - 1, SMEM, BARRIERS, GROUP)
    s = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(full.index(3 * stage + TURNED), (n // 2) & 1)
    k = turned_smem.index(stage).permute((1, 0))
    s = warpgroup_mma(turned, k, s, use_acc=False, is_async=True)
    s = _add_scores(s, q_smem, k_smem, full, n, RIGHT)
    s = _add_scores(s, q_smem, k_smem, full, n, LEFT)
    if FOLLOWS:
        acc, s = warpgroup_mma_wait(3, deps=[acc, s])
        barrier()
        mbarrier.arrive(empty.index(3 * (1 - stage) + GROUP))
    s = warpgroup_mma_wait(0, deps=[s])
    barrier()
    mbarrier.arrive(empty.index(3 * stage + TURNED))
    if key >= unmasked:
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
    rounded = p.to(p_smem.dtype)
    row_smem.index(2 * stage).store(ratio)
    row_smem.index(2 * stage + 1).store(m_new)
    p_smem.index(stage).store(rounded)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(stage))
    acc = acc * gl.convert_layout(ratio, gl.SliceLayout(1, OUTPUT))[:, None]
    weights = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUTPUT, 2))
    acc = warpgroup_mma(weights, k_smem.index(2 * stage + GROUP), acc, is_async=True)
    l = l * ratio + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(empty.index(3 * stage + GROUP))
    return acc, m_new, l


@gluon.jit
def _store(
    acc, m, l, TO, token0, query_len, start, cut, place, GROUP: gl.constexpr, FORM: gl.constexpr
):
    """Store a group's half of the outputs, or of a part that is merged."""
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
            64,
            FORM[2] and GROUP == 0,
        )


@gluon.jit
def _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    """Add up one half of the items' outputs, and weigh every second tile of their keys."""
    HEADS: gl.constexpr = FORM[0]
    FEW: gl.constexpr = FORM[1]
    GROUP: gl.constexpr = FORM[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem, row_smem = SMEM[0], SMEM[4]
    _full, empty, _p_full, q_ready, q_done = BARRIERS
    WORK, tiles = STEP[2], STEP[3]
    by = TO[7]
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, True)
    n = 0
    item = 0
    _query(q_smem.index(GROUP), FROM, STEP, at, stop, seq, start, GROUP * HALF, HEADS)
    while at < stop:
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, FEW, 64
        )
        unmasked = gl.minimum(unmasked, limit // 64) * 64  # a piece may have no keys
        cut, place = part_of(WORK, low, high, 0)
        my_start = start
        at, low, high, tile, seq, start, head = advance(WORK, tiles, 1, low, high, tile, head, True)
        turned = _turned_query(FROM, token0, query_len, my_start, HEADS)
        bound = gl.full([64], 0, gl.int32, ROW) + limit
        if FEW == 1:
            row_pos = seq_len - query_len + (my_start + gl.arange(0, 64, layout=ROW)) // HEADS
            bound = gl.minimum(row_pos + 1, limit)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_ready.index(0))
        mbarrier.wait(q_ready.index(0), item & 1)

        m = gl.full([64], float("-inf"), gl.float32, ROW)
        l = gl.zeros([64], gl.float32, ROW)
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        end = n + count
        key = first * 64
        if n % 2 == GROUP:
            acc, m, l = _weigh(
                acc,
                m,
                l,
                turned,
                n,
                key,
                unmasked,
                bound,
                seq_len,
                by,
                SMEM,
                BARRIERS,
                False,
                GROUP,
            )
            n += 1
            key += 64
        while n + 1 < end:
            acc, m, l = _weigh(
                acc, m, l, turned, n + 1, key + 64, unmasked, bound, seq_len, by, SMEM, BARRIERS, True,
                GROUP,
            )  # fmt: skip
            n += 2
            key += 128
        if n < end:
            acc, l, m = _follow(acc, l, n, SMEM, BARRIERS, GROUP)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(3 * (n % 2) + GROUP))
            n += 1
        row_smem.index(4 + GROUP).store(l)
        barrier()
        mbarrier.arrive(q_done.index(0))
        mbarrier.wait(q_done.index(0), item & 1)
        l += row_smem.index(5 - GROUP).load(ROW)
        item += 1
        _query(q_smem.index(GROUP), FROM, STEP, at, stop, seq, start, GROUP * HALF, HEADS)
        _store(acc, m, l, TO, token0, query_len, my_start, cut, place, GROUP, FORM)


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
    gdc_wait()
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, HALF], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], SHARED)
    turned_smem = gl.allocate_shared_memory(DTYPE, [2, 64, ROPE], SHARED)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, 64, 64], SHARED)
    row_smem = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(6):
        mbarrier.init(full.index(part), count=1)
        mbarrier.init(empty.index(part), count=1)
    for group in gl.static_range(2):
        mbarrier.init(p_full.index(group), count=1)
    mbarrier.init(q_ready.index(0), count=2)
    mbarrier.init(q_done.index(0), count=2)
    STEP = (SEQ_LENS, STARTS, WORK, tiles)
    LEFTS: gl.constexpr = (HEADS, FEW, HAS_LSE, 0)
    RIGHTS: gl.constexpr = (HEADS, FEW, HAS_LSE, 1)
    FROM = (Q, q_t, q_h)
    TO = (OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale * LOG2E, v_scale)
    SMEM = (q_smem, k_smem, turned_smem, p_smem, row_smem)
    BARRIERS = (full, empty, p_full, q_ready, q_done)
    lefts = (FROM, TO, STEP, SMEM, BARRIERS, LEFTS)
    rights = (FROM, TO, STEP, SMEM, BARRIERS, RIGHTS)
    PIPE: gl.constexpr = (64, 2, 2)
    producing = (
        WIDE, NARROW, BT, k_b, table_s, STEP, SMEM, (full, empty), HEADS, BLOCK_SIZE, FEW, PIPE,
    )  # fmt: skip
    gl.warp_specialize(
        [(_attend, lefts), (_attend, rights), (produce, producing)], [4, 1], [232, 24]
    )
