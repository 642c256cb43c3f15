"""Prefill for Hopper, in Gluon: what does `prefill` compute, with copies and products dealt out by hand?

As FlashAttention-3 (Shah et al., 2024): one warp asks the copy engine (TMA) for tiles of K and V, two
groups of four warps have 64 rows of a tile each. A group issues the scores of its next keys before the
product of these weights with V, and takes the exponentials of the former while the latter runs.
Keys are gone through from the last to the first, so that those that need a mask come first. A program
has several tiles, or pieces of them: while the groups store one, the next one's copies arrive.

Gluon has no interpreter: CI compiles this ahead of time, and the H200 checks its values.
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

from polyattn_triton.hopper.copies import produce
from polyattn_triton.hopper.items import advance, begin, bounds, part_of
from polyattn_triton.hopper.names import barrier
from polyattn_triton.hopper.rows import load_query, store_part, store_rows

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def clear(v, held, D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero a tile's values from row `held` on: beyond the length there may be NaN.

    Both groups do so to the same values, and neither waits for the other: racecheck tells of it. An
    element gets what it has already (a row before `held`) or zero, whichever comes first; so a load finds
    what is kept, or what is thrown away. A group multiplies after its own stores, and what the other one
    still stores then is the same. The next copy into the tile waits for both, at `v_empty`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, 16):
        if first + 16 > held:
            part = v.slice(first, 16)
            row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            kept = part.load(LAYOUT)
            part.store(gl.where((row < held)[:, None], kept, gl.zeros_like(kept)))
    fence_async_shared()
    barrier()


@gluon.jit
def _in_pairs(weights, DTYPE: gl.constexpr):
    """Round weights to 16 bits, two columns to an int32.

    What a loop hands on in 16 bits ptxas takes apart and joins again, an instruction an element.
    """
    rows: gl.constexpr = weights.shape[0]
    even, odd = gl.split(weights.reshape([rows, weights.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + ROUND + ".f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
    )


@gluon.jit
def _of_pairs(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of `_in_pairs`, as the first operand of a product: no instruction."""
    even = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    weights = gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(weights, LAYOUT)


@gluon.jit
def kept_below(s, place, bound, HIDDEN: gl.constexpr):
    """Scores where `place` is below `bound`, elsewhere 0 or -inf (`HIDDEN`, in hexadecimals).

    Compared where it is used: of all comparisons before, ptxas packs the answers into registers, and
    takes them out again.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, " + HIDDEN + ", p; }",
        "=f,f,r,r",
        [s, place, bound],
        gl.float32,
        True,
        1,
    )


@gluon.jit
def _softmax(
    s, m, key, bound, row_pos, by, scale, rows, masked, MASK: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, CHANGE: gl.constexpr, FUNCTIONS: gl.constexpr,
):  # fmt: skip
    """From scores to weights: these, the new maximum (unscaled), and what older sums count.

    `bound`: a row's first place that it doesn't see. `masked`: whether that is asked, where there is a
    mask at all. `FUNCTIONS`: 1, `CHANGE` is what a variant does to scores; 2, what it returns are the
    weights.
    """
    LAYOUT: gl.constexpr = s.type.layout
    if FUNCTIONS > 0:
        place = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        s = CHANGE(s * scale, rows, place)
    if MASK:
        key_pos = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        HIDDEN: gl.constexpr = "0f00000000" if FUNCTIONS == 2 else "0fFF800000"
        if masked:
            s = kept_below(s, key_pos[None, :], bound[:, None], HIDDEN)
            if WINDOW > 0:
                s = kept_below(s, (row_pos - WINDOW)[:, None], key_pos[None, :], HIDDEN)
    if FUNCTIONS == 2:
        p = s
        m_new = m
        alpha = m
    else:
        m_new = gl.maximum(m, gl.max(s, 1))
        base = m_new
        if MASK or FUNCTIONS > 0:
            base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no NaN
        alpha = gl.exp2((m - base) * by)
        p = gl.exp2(s * by - (base * by)[:, None])
    return p, m_new, alpha


@gluon.jit
def _sums(weights):
    """Sums of a row's weights, one for each column that a thread holds of eight: no exchange yet."""
    rows: gl.constexpr = weights.shape[0]
    return gl.sum(weights.reshape([rows, weights.shape[1] // 8, 8]), 1)


@gluon.jit
def _step(
    acc, m, l, pairs, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, n, turn, more, key,
    bound, row_pos, by, scale, rows, masked,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, MASK: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    CHANGE: gl.constexpr, FUNCTIONS: gl.constexpr,
):  # fmt: skip
    """The scores of the `n`-th key tile, which is there, while the weights of the one before meet V."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = q.dtype
    stage = n % STAGES
    before = (n - 1) % STAGES
    if TURNS:  # one group's products, then the next one's: each has its softmax meanwhile
        mbarrier.wait(turns.index(GROUP), (turn + (GROUP == 0)) & 1)
    s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
    p = _of_pairs(pairs, DTYPE, gl.DotOperandLayout(0, OUTPUT, 2))
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))
    s = warpgroup_mma_wait(1, deps=[s])
    barrier()
    mbarrier.arrive(k_empty.index(stage))
    weights, m, alpha = _softmax(
        s, m, key, bound, row_pos, by, scale, rows, masked, MASK, WINDOW, BLOCK_N, CHANGE, FUNCTIONS
    )
    if FUNCTIONS != 2:
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _sums(weights)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))
    # The next keys are waited for here: ptxas moves the wait for the product before the softmax
    # unless a branch lies between them.
    n += 1
    mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1, pred=more)
    acc, pairs = warpgroup_mma_wait(0, deps=[acc, pairs])
    barrier()
    mbarrier.arrive(v_empty.index(before))
    if FUNCTIONS != 2:
        acc = acc * alpha[:, None]
    return acc, m, l, _in_pairs(weights, DTYPE)


@gluon.jit
def _consume(
    Q, OUT, LSE, INPUTS, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem,
    k_full, k_empty, v_full, v_empty, turns, by, scale, v_scale, q_t, q_h, o_t, o_h, lse_t, tiles,
    at_once, GROUP: gl.constexpr, GROUPS: gl.constexpr, G: gl.constexpr, KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr, TURNS: gl.constexpr,
    QUERIES: gl.constexpr, ROWS_OF: gl.constexpr, CHANGE: gl.constexpr, FUNCTIONS: gl.constexpr,
):  # fmt: skip
    """Attend with a group's 64 of the items' rows."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, at_once, KV_HEADS, SPLIT)
    n = 0
    item = 0
    if at < stop:
        token0 = gl.load(STARTS + seq)
        load_query(
            q_smem.index(GROUP), Q, token0, gl.load(STARTS + seq + 1) - token0, start + GROUP * 64, head,
            q_t, q_h, G, D,
        )  # fmt: skip
    while at < stop:
        token0, query_len, seq_len, first, count, full_low, full, limit = bounds(
            SEQ_LENS, STARTS, WORK, at, stop, low, high, seq, start,
            G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SPLIT,
        )  # fmt: skip
        if SPLIT:
            cut, place = part_of(WORK, low, high, head)
        my_start = start + GROUP * 64
        my_head = head
        my_seq = seq
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, at_once, low, high, tile, head, SPLIT
        )
        next_token0 = gl.load(STARTS + seq)
        next_query_len = gl.load(STARTS + seq + 1) - next_token0
        q = q_smem.index(GROUPS * (item % QUERIES) + GROUP)
        row_pos = seq_len - query_len + (my_start + gl.arange(0, 64, layout=ROW)) // G
        bound = gl.full([64], 0, gl.int32, ROW) + limit
        if CAUSAL:
            bound = gl.minimum(row_pos + 1, limit)
        rows = (0,)
        if FUNCTIONS > 0:
            my_rows = my_start + gl.arange(0, 64, layout=ROW)
            rows = ROWS_OF(INPUTS, my_seq, my_head * G + my_rows % G, row_pos)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()

        key = (first + count - 1) * BLOCK_N
        mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1)
        s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
        k = k_smem.index(n % STAGES).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        barrier()
        mbarrier.arrive(k_empty.index(n % STAGES))
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        weights, m, _alpha = _softmax(
            s, m, key, bound, row_pos, by, scale, rows, True, True, WINDOW, BLOCK_N, CHANGE, FUNCTIONS,
        )  # fmt: skip
        l = _sums(weights)
        pairs = _in_pairs(weights, DTYPE)
        acc = gl.zeros([64, D], gl.float32, OUTPUT)
        if key + BLOCK_N > seq_len:
            mbarrier.wait(v_full.index(n % STAGES), (n // STAGES) & 1)
            clear(v_smem.index(n % STAGES), seq_len - key, D, BLOCK_N)
        mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=count > 1)

        # Key tiles from the last on: with a mask, without, and with one again where a window begins.
        masked = first + count - full
        kept = first + count - full_low
        turn = n - item
        if FUNCTIONS > 0:  # one loop: a tenth less to compile, for each variant anew
            for i in range(1, count):
                acc, m, l, pairs = _step(
                    acc, m, l, pairs, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                    n + i, turn + i - 1, i + 1 < count, key - i * BLOCK_N, bound, row_pos, by, scale,
                    rows, (i < masked) | (i >= kept), GROUP, GROUPS, True, WINDOW, BLOCK_N, STAGES,
                    TURNS, CHANGE, FUNCTIONS,
                )  # fmt: skip
        else:
            for i in range(1, masked):
                acc, m, l, pairs = _step(
                    acc, m, l, pairs, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                    n + i, turn + i - 1, i + 1 < count, key - i * BLOCK_N, bound, row_pos, by, scale,
                    rows, True, GROUP, GROUPS, True, WINDOW, BLOCK_N, STAGES, TURNS, CHANGE, FUNCTIONS,
                )  # fmt: skip
            for i in range(gl.maximum(masked, 1), kept):
                acc, m, l, pairs = _step(
                    acc, m, l, pairs, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                    n + i, turn + i - 1, i + 1 < count, key - i * BLOCK_N, bound, row_pos, by, scale,
                    rows, True, GROUP, GROUPS, False, WINDOW, BLOCK_N, STAGES, TURNS, CHANGE, FUNCTIONS,
                )  # fmt: skip
            if WINDOW > 0:
                for i in range(gl.maximum(kept, 1), count):
                    acc, m, l, pairs = _step(
                        acc, m, l, pairs, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                        n + i, turn + i - 1, i + 1 < count, key - i * BLOCK_N, bound, row_pos, by,
                        scale, rows, True, GROUP, GROUPS, True, WINDOW, BLOCK_N, STAGES, TURNS, CHANGE,
                        FUNCTIONS,
                    )  # fmt: skip
        n += count
        item += 1
        last = (n - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((n - 1) // STAGES) & 1)
        p = _of_pairs(pairs, DTYPE, WEIGHTS)
        acc = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
        if QUERIES > 1 and at < stop:  # while this item's last product runs and is stored
            load_query(
                q_smem.index(GROUPS * (item % QUERIES) + GROUP), Q, next_token0, next_query_len,
                start + GROUP * 64, head, q_t, q_h, G, D,
            )  # fmt: skip
        l = gl.convert_layout(gl.sum(l, 1), ROW)
        if FUNCTIONS == 2:  # sums of values as they are, those of pieces too
            l = gl.full([64], 1.0, gl.float32, ROW)
            m = gl.full([64], 0.0, gl.float32, ROW)
        acc, pairs = warpgroup_mma_wait(0, deps=[acc, pairs])
        barrier()
        mbarrier.arrive(v_empty.index(last))
        if SPLIT:
            if cut:
                store_part(
                    acc, m, l, by, PARTS, PART_LSE, place * BLOCK_M + GROUP * 64,
                    query_len * G - my_start, D,
                )  # fmt: skip
            else:
                store_rows(
                    acc, m, l, by, v_scale, OUT, LSE, q, token0, query_len, my_start, my_head,
                    o_t, o_h, lse_t, G, D, HAS_LSE,
                )  # fmt: skip
        else:
            store_rows(
                acc, m, l, by, v_scale, OUT, LSE, q, token0, query_len, my_start, my_head,
                o_t, o_h, lse_t, G, D, HAS_LSE,
            )  # fmt: skip
        if QUERIES == 1 and at < stop:
            barrier()
            load_query(q, Q, next_token0, next_query_len, start + GROUP * 64, head, q_t, q_h, G, D)


@gluon.jit(do_not_specialize=["lse_t", "bt_s", "tiles", "at_once"])
def prefill_hopper_kernel(
    Q, OUT, LSE, INPUTS, PARTS, PART_LSE, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, scale, v_scale,
    q_t, q_h, k_b, k_row, k_col, v_b, v_row, v_col, o_t, o_h, K, V, lse_t, bt_s, tiles, at_once,
    G: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, QUERIES: gl.constexpr, ROWS_OF: gl.constexpr, CHANGE: gl.constexpr,
    FUNCTIONS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 (token, head of group) rows of one KV head, whole or in pieces.

    Grid: (programs,), `tiles` of them, longest first, dealt out with all KV heads, `at_once` of these
    at a time; `SPLIT`: (programs, KV heads), whose stretches WORK holds, and `merge_kernel` merges. `K`,
    `V`: descriptors of (rows, columns) in boxes of as many rows as lie together, at most `BLOCK_N`; a
    block begins `k_b` rows after the one before, a head `k_row` rows and `k_col` columns
    (`descriptors`).
    """
    GROUPS: gl.constexpr = BLOCK_M // 64
    gl.static_assert(gl.num_warps() == 4 and GROUPS == 2)
    gl.static_assert(CAUSAL or WINDOW == 0)
    gl.static_assert(BLOCK_N // K.block_shape[0] <= 32)
    if SPLIT:  # let the merge be scheduled while this runs
        gdc_launch_dependents()
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * QUERIES, 64, D], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    by = scale * LOG2E
    if FUNCTIONS > 0:  # scores are scaled before they are changed
        by = LOG2E + 0.0 * scale
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    Q, OUT, LSE, INPUTS, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, turns, by, scale, v_scale, q_t, q_h, o_t, o_h,
                    lse_t, tiles, at_once, 0, GROUPS, G, KV_HEADS, D, BLOCK_M, BLOCK_N, CAUSAL,
                    WINDOW, SPLIT, STAGES, HAS_LSE, TURNS, QUERIES, ROWS_OF, CHANGE, FUNCTIONS,
                ),
            ),
            (
                _consume,
                (
                    Q, OUT, LSE, INPUTS, PARTS, PART_LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, turns, by, scale, v_scale, q_t, q_h, o_t, o_h,
                    lse_t, tiles, at_once, 1, GROUPS, G, KV_HEADS, D, BLOCK_M, BLOCK_N, CAUSAL,
                    WINDOW, SPLIT, STAGES, HAS_LSE, TURNS, QUERIES, ROWS_OF, CHANGE, FUNCTIONS,
                ),
            ),
            (
                produce,
                (
                    K, V, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, k_smem, v_smem, k_full, k_empty,
                    v_full, v_empty, k_b, k_row, k_col, v_b, v_row, v_col, bt_s, tiles, at_once,
                    G, KV_HEADS, D, BLOCK_M, BLOCK_N, BLOCK_SIZE, PAGED, CAUSAL, WINDOW, SPLIT, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
