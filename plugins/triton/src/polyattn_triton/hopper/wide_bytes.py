"""Decode over latents in e4m3 by many heads for Hopper, in Gluon: as `latent_bytes`, by two groups of warps.

Each group adds up the scores of half of the latents' columns for all 64 (token, head) rows, hands the
other one the sums of 32 rows, weighs the keys of its own 32, and adds up half of the outputs' columns of
all. So each byte is widened once for its score and once for its output, by one group.

Gluon has no interpreter: CI compiles this ahead of time and runs it on the host, over NumPy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from polyattn_triton.hopper.items import advance, begin, part_of
from polyattn_triton.hopper.latent_bytes import (
    OF_KEYS,
    OF_VALUES,
    UNITS,
    load_queries,
    numbers,
    store_columns,
)
from polyattn_triton.hopper.latent_copies import keys_of, produce
from polyattn_triton.hopper.names import barrier
from polyattn_triton.hopper.packed import LEAST, LOG2E, RAISED
from polyattn_triton.hopper.packed_rows import longer
from polyattn_triton.hopper.prefill import clear, kept_below

ROWS, OWN = gl.constexpr(64), gl.constexpr(32)
"""Of a tile of queries, and of those that a group weighs."""
STAGES = gl.constexpr(3)
RATIO, LARGEST, SUM = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What groups tell each other of a row."""


@gluon.jit
def _meet(met, turn):
    """Wait for the other group, and show it what this one wrote."""
    barrier()
    mbarrier.arrive(met.index(0))
    mbarrier.wait(met.index(0), turn & 1)
    return turn + 1


@gluon.jit
def _add_scores(units, first, second, own, other, GROUP: gl.constexpr):
    """Ask for what some units of the keys add to the scores of a group's rows, and to the other's."""
    a, b = numbers(units, OF_KEYS)
    own = warpgroup_mma(a, first.slice(OWN * GROUP, OWN).permute((1, 0)), own, is_async=True)
    mine = first.slice(OWN * (1 - GROUP), OWN).permute((1, 0))
    other = warpgroup_mma(a, mine, other, is_async=True)
    own = warpgroup_mma(b, second.slice(OWN * GROUP, OWN).permute((1, 0)), own, is_async=True)
    mine = second.slice(OWN * (1 - GROUP), OWN).permute((1, 0))
    other = warpgroup_mma(b, mine, other, is_async=True)
    return own, other


@gluon.jit
def _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Attend with the items' rows to their keys, as one of the groups."""
    HEADS: gl.constexpr = FORM[0]
    FEW: gl.constexpr = FORM[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    VALUES: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    EACH: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    MINE: gl.constexpr = OWN * GROUP
    q_smem, k_smem, turned_smem, q_turned, p_smem, x_smem, row_smem = SMEM
    full, empty, met = BARRIERS
    OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale, v_scale = TO
    WORK, tiles = STEP[2], STEP[3]
    key_of = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, 1, 1, True)
    n = 0
    turn = 0
    while at < stop:
        token0, query_len, seq_len, first, count, _full_low, unmasked, limit = keys_of(
            STEP, at, stop, low, high, seq, start, HEADS, FEW, ROWS
        )
        unmasked = gl.minimum(unmasked, limit // 64)  # a piece may have no keys
        cut, place = part_of(WORK, low, high, 0)
        mine = start
        at, low, high, tile, seq, start, head = advance(WORK, tiles, 1, low, high, tile, head, True)
        power = load_queries(
            FROM, q_smem, q_turned, token0, query_len * HEADS, mine + MINE, HEADS, OWN, MINE
        )
        by = gl.convert_layout(power, ROW) * scale
        by = gl.where(by < LEAST, LEAST, by)
        bound = gl.full([OWN], 0, gl.int32, ROW) + limit
        if FEW == 1:
            row_pos = seq_len - query_len + (mine + MINE + gl.arange(0, OWN, layout=ROW)) // HEADS
            bound = gl.minimum(row_pos + 1, limit)
        fence_async_shared()
        turn = _meet(met, turn)

        m = gl.full([OWN], float("-inf"), gl.float32, ROW)
        sums = gl.zeros([64, OWN], gl.float32, SCORES)
        acc = ()
        for _c in gl.static_range(4):
            acc = longer(acc, gl.zeros([64, ROWS], gl.float32, OUTPUT))
        for i in range(count):
            stage = n % STAGES
            phase = (n // STAGES) & 1
            # No compiler knows that it is zero: descriptors that a loop doesn't change are spilled.
            zero = n >> 30
            s = gl.zeros([64, OWN], gl.float32, SCORES)
            other = gl.zeros([64, OWN], gl.float32, SCORES)
            mbarrier.wait(full.index(2 * stage + 1), phase)
            s, other = _add_scores(
                turned_smem.index(stage).slice(16 * GROUP, 16, 1).load(KEYS),
                q_turned.index(zero).slice(16 * GROUP, 16, 1),
                q_turned.index(zero + 1).slice(16 * GROUP, 16, 1),
                s,
                other,
                GROUP,
            )
            mbarrier.wait(full.index(2 * stage), phase)
            k = k_smem.index(stage)
            for c in gl.static_range(4 * GROUP, 4 * GROUP + 4):
                s, other = _add_scores(
                    k.slice(32 * c, 32, 1).load(KEYS),
                    q_smem.index(zero + c // 2 * 2).slice(c % 2 * 32, 32, 1),
                    q_smem.index(zero + c // 2 * 2 + 1).slice(c % 2 * 32, 32, 1),
                    s,
                    other,
                    GROUP,
                )
                s, other = warpgroup_mma_wait(4, deps=[s, other])
            s, other = warpgroup_mma_wait(0, deps=[s, other])
            x_smem.index(1 - GROUP).store(other)
            turn = _meet(met, turn)
            mbarrier.arrive(empty.index(2 * stage + 1))
            s += x_smem.index(GROUP).load(SCORES)
            if first + i >= unmasked:
                key = (first + i) * 64
                s = kept_below(s, (key + key_of)[:, None], bound[None, :], "0fFF800000")
                # Beyond the length there may be NaN, which no weight hides.
                if (key < seq_len) & (key + 64 > seq_len):
                    clear(k.slice(128 * GROUP, 128, 1), seq_len - key, UNITS // 2, 64)
            m_new = gl.maximum(m, gl.max(s, 0) * by)
            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
            ratio = gl.exp2(m - base)
            p = gl.exp2(s * by[None, :] - (base - RAISED)[None, :])
            m = m_new
            row_smem.index(RATIO).slice(MINE, OWN).store(ratio)
            p_smem.slice(MINE, OWN, 1).store(p.to(gl.float16))
            fence_async_shared()
            turn = _meet(met, turn)
            sums = sums * ratio[None, :] + p
            ratios = row_smem.index(RATIO).load(EACH)
            so_far = acc
            acc = ()
            for c in gl.static_range(2):
                a = so_far[2 * c] * ratios[None, :]
                b = so_far[2 * c + 1] * ratios[None, :]
                for half in gl.static_range(2):
                    v = k.slice(64 * (2 * GROUP + c), 64, 1).slice(32 * half, 32)
                    one, two = numbers(v.permute((1, 0)).load(VALUES), OF_VALUES)
                    weights = p_smem.slice(32 * half, 32)
                    a = warpgroup_mma(one, weights, a, is_async=True)
                    b = warpgroup_mma(two, weights, b, is_async=True)
                    a, b = warpgroup_mma_wait(2, deps=[a, b])
                acc = longer(longer(acc, a), b)
            acc = warpgroup_mma_wait(0, deps=acc)
            barrier()
            mbarrier.arrive(empty.index(2 * stage))
            n += 1
        row_smem.index(LARGEST).slice(MINE, OWN).store(m)
        row_smem.index(SUM).slice(MINE, OWN).store(gl.sum(sums, 0))
        turn = _meet(met, turn)
        m = row_smem.index(LARGEST).load(EACH)
        l = row_smem.index(SUM).load(EACH)
        columns = 256 * GROUP
        TO_COLUMNS = (OUT + columns, LSE, PARTS + columns, PART_LSE, o_t, o_h, lse_t, scale, v_scale)
        FORM_HERE: gl.constexpr = (HEADS, FORM[2], GROUP == 0)
        store_columns(acc, m, l, TO_COLUMNS, token0, query_len, mine, cut, place, FORM_HERE)


@gluon.jit
def _left(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM, 0)


@gluon.jit
def _right(FROM, TO, STEP, SMEM, BARRIERS, FORM: gl.constexpr):
    _attend(FROM, TO, STEP, SMEM, BARRIERS, FORM, 1)


@gluon.jit(do_not_specialize=["lse_t", "table_s", "tiles"])
def wide_bytes_kernel(
    Q, OUT, LSE, PARTS, PART_LSE, BT, SEQ_LENS, STARTS, WORK, scale, v_scale,
    q_t, q_h, k_b, o_t, o_h, WIDE, NARROW, lse_t, table_s, tiles,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, FEW: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 (token, head) rows over their sequence's latents. As `latents.latents_kernel`.

    `WIDE`, `NARROW`: descriptors of the cache's rows in units of two bytes, boxes of 256 and of 32.
    """
    gl.static_assert(gl.num_warps() == 4)
    gdc_launch_dependents()  # let the merge be scheduled while this runs
    gdc_wait()  # this was scheduled while what stores ran
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    q_smem = gl.allocate_shared_memory(gl.float16, [8, ROWS, 64], SHARED)
    k_smem = gl.allocate_shared_memory(gl.int16, [STAGES, 64, UNITS], SHARED)
    turned_smem = gl.allocate_shared_memory(gl.int16, [STAGES, 64, 32], HALF)
    q_turned = gl.allocate_shared_memory(gl.float16, [2, ROWS, 32], HALF)
    p_smem = gl.allocate_shared_memory(gl.float16, [64, ROWS], SHARED)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    x_smem = gl.allocate_shared_memory(gl.float32, [2, 64, OWN], SUMS)
    row_smem = gl.allocate_shared_memory(gl.float32, [3, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(part), count=1)
        mbarrier.init(empty.index(part), count=2)
    mbarrier.init(met.index(0), count=2)
    STEP = (SEQ_LENS, STARTS, WORK, tiles)
    FORM: gl.constexpr = (HEADS, FEW, HAS_LSE)
    FROM = (Q, q_t, q_h)
    TO = (OUT, LSE, PARTS, PART_LSE, o_t, o_h, lse_t, scale * LOG2E, v_scale)
    SMEM = (q_smem, k_smem, turned_smem, q_turned, p_smem, x_smem, row_smem)
    PIPE: gl.constexpr = (ROWS, STAGES, 1)
    consuming = (FROM, TO, STEP, SMEM, (full, empty, met), FORM)
    COPIED = (full, empty)
    producing = (WIDE, NARROW, BT, k_b, table_s, STEP, SMEM, COPIED, HEADS, BLOCK_SIZE, FEW, PIPE)
    gl.warp_specialize(
        [(_left, consuming), (_right, consuming), (produce, producing)], [4, 1], [232, 24]
    )
