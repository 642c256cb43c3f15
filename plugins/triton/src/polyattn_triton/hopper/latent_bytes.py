"""Decode over latents in e4m3 for Hopper, in Gluon: what `kernels.mla` computes over pages, by roles.

Keys are the rows of the first product and values' columns those of the second: both come from shared
memory to registers as bytes, become float16 there, and are first operands. So nothing that is widened
goes back to shared memory, which queries and weights alone fill. A unit of 16 bits holds two numbers of
a key: its first ones and its second ones are an operand each, of which a row, or a column, is every
second number.

Four warps attend with 16 or 32 heads to what another copies (`latent_copies`). Two programs run on a
multiprocessor: more heads than 32 are halves of a plan's tiles of 64 rows, a program each.

Weights are relative to the largest logit of the tiles before. Where one is 2^`GROWN` times as large, a
rare case, the tile's own largest counts, and what was added up so far is less by as much.

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
from polyattn_triton.hopper.latent_copies import clear, keys_of, places, produce, turns
from polyattn_triton.hopper.names import async_load, barrier
from polyattn_triton.hopper.packed import LEAST, LN2, LOG2E
from polyattn_triton.hopper.packed_rows import longer
from polyattn_triton.hopper.prefill import kept_below
from polyattn_triton.hopper.unpacking import BELOW, BESIDE

UNITS = gl.constexpr(256)
"""Of a latent; 32 more are rotated."""
STAGES = gl.constexpr(2)
GROWN, RAISED = gl.constexpr(6), gl.constexpr(9)
"""In powers of two: a weight may be so much larger than 1 before its row's base grows, and weights are so
much larger than they are. Together float16 holds them, and small ones."""
OF_LATENTS = gl.constexpr(gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0]))
OF_TURNED = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
WIDE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
NARROW_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAGS = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0]))
OF_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
OF_SHARED_TURNED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
OF_KEYS, OF_VALUES = gl.constexpr(BESIDE), gl.constexpr(BELOW)


@gluon.constexpr_function
def rows_of_tile(heads):
    """Return the rows of a tile of queries: a sequence's heads, or 32 of them."""
    return 16 if heads <= 16 else 32


@gluon.constexpr_function
def _warps_layout(rows):
    """How a thread holds what four warps tell of the rows whose scores it has."""
    high = [[0, 1 << i] for i in range(3, rows.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], *high], lanes, [[0, 0], [0, 0]], [], [4, rows]
    )


@gluon.jit
def _of_all_warps(x, smem):
    """Return what four warps tell of each row, [4, rows], to all of them.

    A reduction of Triton's own takes three barriers for that. This takes one.
    """
    smem.store(x)
    return smem.load(_warps_layout(x.shape[1]))


@gluon.jit
def _halves(x):
    """Return a tile so that `split` parts the two rows of each eight that a thread has."""
    return x.reshape((4, 2, 8, x.shape[1])).permute((0, 2, 3, 1))


@gluon.jit
def _numbers(units, INSTRUCTIONS: gl.constexpr):
    """Return the two operands, in float16, of a tile of units."""
    return gl.inline_asm_elementwise(
        INSTRUCTIONS, "=r,=r,r", (units,), (gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _copy_columns(
    to, FROM, seq, start, FIRST: gl.constexpr, LAYOUT: gl.constexpr, HEADS: gl.constexpr
):
    """Copy some columns of a tile's queries, of the one token that a sequence has, without waiting."""
    Q, q_t, q_h = FROM
    ROWS: gl.constexpr = to.shape[0]
    COUNT: gl.constexpr = to.shape[1]
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    at = places(seq, row, q_t, q_h, 0)[:, None] + (FIRST + column)[None, :]
    async_load(to, Q + at, mask=(row < HEADS)[:, None] & (column >= 0)[None, :])


@gluon.jit
def _copy_queries(FROM, RAW, at, stop, seq, start, HEADS: gl.constexpr):
    """Copy an item's queries as they are, if there is an item, into shared memory, without waiting."""
    if at < stop:
        mine = start + 32 * gl.program_id(1)  # a half of the plan's 64 rows
        _copy_columns(RAW[0], FROM, seq, mine, 0, WIDE_COPY, HEADS)
        _copy_columns(RAW[1], FROM, seq, mine, 512, NARROW_COPY, HEADS)
        async_copy.commit_group()


@gluon.jit
def _operands(q, less, WIDTH: gl.constexpr):
    """Return numbers over their rows' powers of two: of each WIDTH those of one operand come first."""
    ROWS: gl.constexpr = q.shape[0]
    COUNT: gl.constexpr = q.shape[1]
    q = (q.to(gl.float32) * less[:, None]).to(gl.float16)
    q = q.reshape((ROWS, COUNT // WIDTH, WIDTH // 4, 2, 2)).permute((0, 1, 3, 2, 4))
    return q.reshape((ROWS, COUNT))


@gluon.jit
def _lay_queries(RAW, SMEM):
    """Lay a tile's rows in place as keys' operands meet them, and their powers of two.

    These keep queries inside of float16's range. A warp has whole rows.
    """
    q = RAW[0].load(OF_LATENTS)
    turned = RAW[1].load(OF_TURNED)
    ROW: gl.constexpr = gl.SliceLayout(1, q.type.layout)
    high = gl.convert_layout(gl.max(gl.abs(turned.to(gl.float32)), 1), ROW, True)
    most = gl.maximum(gl.max(gl.abs(q.to(gl.float32)), 1), high)
    power = (most.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.where(
        power == 0.0, 1.0, gl.minimum(power, 2.0**126)
    )  # whose inverse is no subnormal
    less = 1.0 / power
    SMEM[0].index(0).store(_operands(q, less, 128))
    less = gl.convert_layout(less, gl.SliceLayout(1, turned.type.layout), True)
    SMEM[3].index(0).store(_operands(turned, less, 64))
    SMEM[6].store(power)


@gluon.jit
def _store_columns(one, other, TO, token0, start, o_t, o_h, ok):
    """Store 128 columns of a tile's rows: of every second, and of those between."""
    ROWS: gl.constexpr = one.shape[1]
    both = gl.join(one, other).permute((0, 2, 1)).reshape((128, ROWS))
    LAYOUT: gl.constexpr = both.type.layout
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    to = places(token0, row, o_t, o_h, 0)
    ok = gl.convert_layout(ok, gl.SliceLayout(0, LAYOUT))
    gl.store(TO + to[None, :] + column[:, None], both.to(TO.dtype.element_ty), mask=ok[None, :])


@gluon.jit
def _store(acc, m, l, TO, token0, query_len, start, cut, place, FORM: gl.constexpr):
    """Store a tile's outputs, or a part's of it that is merged: parts have room for 64 rows."""
    HEADS: gl.constexpr = FORM[0]
    OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, _by, v_scale = TO
    HEAD: gl.constexpr = m.type.layout
    ROWS: gl.constexpr = m.shape[0]
    safe = gl.where(l == 0.0, 1.0, l)
    lse = gl.where(l == 0.0, float("-inf"), m - RAISED + gl.log2(safe))
    row = gl.arange(0, ROWS, layout=HEAD)
    ok = start + row < query_len * HEADS
    if cut:
        gl.store(PART_LSE + place + row, lse, mask=ok)
    elif FORM[1]:
        at = places(token0, start + row, lse_t, 1, 0)
        gl.store(LSE + at, lse * LN2, mask=ok)
    by = (gl.where(cut, 1.0, v_scale) / safe)[None, :]
    for c in gl.static_range(4):
        one, other = acc[2 * c] * by, acc[2 * c + 1] * by
        if cut:
            _store_columns(one, other, PARTS + 128 * c, place, 0, 512, 512, ok)
        else:
            _store_columns(one, other, OUT + 128 * c, token0, start, o_t, o_h, ok)


@gluon.jit
def _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    """Attend with the items' rows to their keys."""
    HEADS: gl.constexpr = FORM[0]
    ROWS: gl.constexpr = FORM[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    k_smem, turned_smem = SMEM[1], SMEM[2]
    q_smem, q_turned = SMEM[0], SMEM[3]
    p_smem, warps_smem, flags_smem = SMEM[4], SMEM[5], SMEM[7]
    full, empty = BARRIERS
    WORK, tiles = STEP[2], STEP[3]
    key_of = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, True)
    n = 0
    DTYPE: gl.constexpr = FROM[0].dtype.element_ty
    RAW = (
        q_smem.index(0)._reinterpret(DTYPE, [ROWS, 512], OF_SHARED),
        q_turned.index(0)._reinterpret(DTYPE, [ROWS, 64], OF_SHARED_TURNED),
    )
    _copy_queries(FROM, RAW, at, stop, seq, start, HEADS)
    while at < stop:
        mine = start + 32 * gl.program_id(1)  # a half of the plan's 64 rows
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, 0, ROWS
        )
        unmasked = gl.minimum(unmasked, limit // 64)  # a piece may have no keys
        cut, place = part_of(WORK, low, high, 0)
        place = 64 * place + 32 * gl.program_id(1)
        at, low, high, tile, seq, start, head = advance(WORK, tiles, 1, low, high, tile, head, True)
        async_copy.wait_group(0)
        barrier()
        _lay_queries(RAW, SMEM)
        fence_async_shared()
        barrier()
        by = SMEM[6].load(HEAD) * TO[7]
        by = gl.where(by < LEAST, LEAST, by)

        base = gl.zeros([ROWS], gl.float32, HEAD)
        sums, _same = gl.split(_halves(gl.zeros([64, ROWS], gl.float32, SCORES)))
        acc = ()
        for _c in gl.static_range(8):
            acc = longer(acc, gl.zeros([64, ROWS], gl.float32, SCORES))
        for i in range(count):
            stage = n & 1  # of two: as signed divisions these spill registers
            phase = (n >> 1) & 1
            # No compiler knows that it is zero: descriptors that a loop doesn't change are spilled.
            zero = n >> 30
            mbarrier.wait(full.index(stage), phase)
            s = gl.zeros([64, ROWS], gl.float32, SCORES)
            one, other = _numbers(turned_smem.index(stage).load(A), OF_KEYS)
            q = q_turned.index(zero).slice(0, 32, 1).permute((1, 0))
            s = warpgroup_mma(one, q, s, use_acc=False, is_async=True)
            q = q_turned.index(zero).slice(32, 32, 1).permute((1, 0))
            s = warpgroup_mma(other, q, s, is_async=True)
            k = k_smem.index(stage)
            units = k.slice(0, 32, 1).load(A)
            for c in gl.static_range(8):
                one, other = _numbers(units, OF_KEYS)
                if c < 7:  # while products run
                    units = k.slice(32 * c + 32, 32, 1).load(A)
                q = q_smem.index(zero).slice(c // 2 * 128 + c % 2 * 32, 32, 1).permute((1, 0))
                s = warpgroup_mma(one, q, s, is_async=True)
                q = q_smem.index(zero).slice(c // 2 * 128 + c % 2 * 32 + 64, 32, 1).permute((1, 0))
                s = warpgroup_mma(other, q, s, is_async=True)
                s = warpgroup_mma_wait(2, deps=[s])
            s = warpgroup_mma_wait(0, deps=[s])
            if first + i >= unmasked:
                key = (first + i) * 64
                s = kept_below(s, (key + key_of)[:, None], limit, "0fFF800000")
                # Beyond the length there may be NaN, which no weight hides.
                if (key < seq_len) & (key + 64 > seq_len):
                    clear(k, seq_len - key)
            units = k.slice(0, 64, 1).slice(0, 32).permute((1, 0)).load(A)
            p = s * by[None, :] - base[None, :]
            x = p
            larger = i == 0
            if i > 0:
                flags_smem.store(gl.max(x.reshape((4, 16 * ROWS)), 1))
                p = gl.exp2(x + RAISED)
                p_smem.index(0).store(p.to(gl.float16))
                fence_async_shared()
                barrier()
                larger = gl.max(flags_smem.load(gl.SliceLayout(1, FLAGS)), 0) > GROWN
            if larger:
                largest = gl.max(_of_all_warps(gl.max(x.reshape((4, 16, ROWS)), 1), warps_smem), 0)
                more = gl.convert_layout(largest, HEAD)
                more = gl.where(more == float("-inf"), 0.0, more)  # nothing seen yet: no NaN
                if i > 0:
                    more = gl.maximum(more, 0.0)
                    ratio = gl.exp2(-more)
                    OF_SUMS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
                    sums = sums * gl.convert_layout(ratio, OF_SUMS, True)[None, None, :]
                    so_far = acc
                    acc = ()
                    for c in gl.static_range(8):
                        acc = longer(acc, so_far[c] * ratio[None, :])
                base += more
                p = gl.exp2(x - (more - RAISED)[None, :])
                p_smem.index(0).store(p.to(gl.float16))
                fence_async_shared()
                barrier()
            upper, lower = gl.split(_halves(p))
            sums += upper + lower
            so_far = acc
            acc = ()
            for c in gl.static_range(4):
                a = so_far[2 * c]  # type: ignore[var-annotated]
                b = so_far[2 * c + 1]  # type: ignore[var-annotated]
                for half in gl.static_range(2):
                    one, other = _numbers(units, OF_VALUES)
                    if 2 * c + half < 7:
                        v = k.slice(64 * (c + half), 64, 1).slice(32 - 32 * half, 32)
                        units = v.permute((1, 0)).load(A)
                    weights = p_smem.index(zero).slice(32 * half, 32)
                    a = warpgroup_mma(one, weights, a, is_async=True)
                    b = warpgroup_mma(other, weights, b, is_async=True)
                    a, b = warpgroup_mma_wait(2, deps=[a, b])
                acc = longer(longer(acc, a), b)
            acc = warpgroup_mma_wait(0, deps=acc)
            barrier()
            mbarrier.arrive(empty.index(stage))
            n += 1
        _copy_queries(FROM, RAW, at, stop, seq, start, HEADS)
        l = gl.sum(_of_all_warps(gl.sum(sums, 1), warps_smem), 0)
        l = gl.convert_layout(l, HEAD)
        _store(acc, base, l, TO, token0, query_len, mine, cut, place, FORM)
        barrier()


@gluon.jit(do_not_specialize=["lse_t", "table_s", "tiles"])
def latent_bytes_kernel(
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
    """One token's heads over its sequence's latents. Grid: (programs, halves of a tile of 64 rows).

    `WORK` is as in `latents.latents_kernel`.

    `WIDE`, `NARROW`: descriptors of the cache's rows in units of two bytes, boxes of 256 and of 32.
    """
    gl.static_assert(gl.num_warps() == 4)
    gl.static_assert(FEW == 0)
    gdc_launch_dependents()  # let the merge be scheduled while this runs
    gdc_wait()  # this was scheduled while what stores ran
    ROWS: gl.constexpr = rows_of_tile(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    q_smem = gl.allocate_shared_memory(gl.float16, [1, ROWS, 512], SHARED)
    k_smem = gl.allocate_shared_memory(gl.int16, [STAGES, 64, UNITS], SHARED)
    turned_smem = gl.allocate_shared_memory(gl.int16, [STAGES, 64, 32], HALF)
    q_turned = gl.allocate_shared_memory(gl.float16, [1, ROWS, 64], HALF)
    p_smem = gl.allocate_shared_memory(
        gl.float16, [1, 64, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    )
    COLUMNS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    warps_smem = gl.allocate_shared_memory(gl.float32, [4, ROWS], COLUMNS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    powers_smem = gl.allocate_shared_memory(gl.float32, [ROWS], LINE)
    flags_smem = gl.allocate_shared_memory(gl.float32, [4], LINE)
    BARRIERS = turns(STAGES, 2)
    STEP = (SEQ_LENS, STARTS, WORK, tiles)
    FORM: gl.constexpr = (HEADS, HAS_LSE, ROWS)
    FROM = (Q, q_t, q_h)
    TO = (OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale * LOG2E, v_scale)
    SMEM = (q_smem, k_smem, turned_smem, q_turned, p_smem, warps_smem, powers_smem, flags_smem)
    PIPE: gl.constexpr = (ROWS, STAGES, 1, 1)
    consuming = (FROM, TO, STEP, SMEM, BARRIERS, FORM)
    producing = (WIDE, NARROW, BT, k_b, table_s, STEP, SMEM, BARRIERS, HEADS, BLOCK_SIZE, FEW, PIPE)
    gl.warp_specialize([(_attend, consuming), (produce, producing)], [1], [24])
