"""Prefill for Hopper, in Gluon: what does `prefill` compute, with copies and products dealt out by hand?

As FlashAttention-3 (Shah et al., 2024): one warp asks the copy engine (TMA) for tiles of K and V, two
groups of four warps have 64 rows of a tile each. A group issues the scores of its next keys before the
product of these weights with V, and takes the exponentials of the former while the latter runs.
Keys are gone through from the last to the first, so that those that need a mask come first.

Gluon has no interpreter: CI compiles this ahead of time, and the H200 checks its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _tile(
    SEQ_LENS, STARTS, WORK,
    G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A program's tile: sequence, first token, query length, first row, length; its key tiles.

    Of key tiles [0, `count`) those from `full` on need a mask; there is always one.
    """
    seq = gl.load(WORK + gl.program_id(0))
    start = gl.load(WORK + gl.num_programs(0) + gl.program_id(0))
    token0 = gl.load(STARTS + seq)
    query_len = gl.load(STARTS + seq + 1) - token0
    seq_len = gl.load(SEQ_LENS + seq)
    high = seq_len
    full = seq_len // BLOCK_N
    if CAUSAL:
        context = seq_len - query_len
        last = context + (gl.minimum(start + BLOCK_M, query_len * G) - 1) // G
        high = gl.minimum(high, last + 1)
        full = gl.minimum(full, (context + start // G + 1) // BLOCK_N)
    count = gl.maximum(gl.cdiv(high, BLOCK_N), 1)
    full = gl.maximum(gl.minimum(full, count), 0)
    return seq, token0, query_len, start, seq_len, count, full


@gluon.jit
def _rows(
    BT, key, seq_len, first_row, stride_b, outside,
    PAGED: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Where each box of a tile's keys lies in the descriptor's rows; past the length outside of it."""
    rows = ()
    for box in gl.static_range(BOXES):
        at = key + box * BOX
        inside = at < seq_len
        if PAGED:
            block = gl.load(BT + at // BLOCK_SIZE, mask=inside, other=0)
            row = first_row + block * stride_b + at % BLOCK_SIZE
        else:
            row = first_row + at
        rows = rows + (gl.where(inside, row, outside),)  # noqa: RUF005  (no star in a kernel)
    return rows


@gluon.jit
def _produce(
    K, V, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    k_b, k_row, k_col, v_b, v_row, v_col, bt_s,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tile's keys and values, the last first, into stages as these become free."""
    BOX: gl.constexpr = K.block_shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = BLOCK_N * D * 2
    kv_head = gl.program_id(1)
    seq, _token0, _query_len, _start, seq_len, count, _full = _tile(
        SEQ_LENS, STARTS, WORK, G, BLOCK_M, BLOCK_N, CAUSAL
    )
    k_first = kv_head * k_row
    v_first = kv_head * v_row
    if not PAGED:
        key_start = gl.load(KEY_STARTS + seq)
        k_first += key_start
        v_first += key_start
    BT += seq.to(gl.int64) * bt_s
    for i in range(count):
        key = (count - 1 - i) * BLOCK_N
        stage = i % STAGES
        free = (i // STAGES + 1) & 1  # of a stage never used: at once
        k_rows = _rows(
            BT, key, seq_len, k_first, k_b, K.shape[0], PAGED, BLOCK_SIZE, BOX, BOXES
        )  # fmt: skip
        v_rows = _rows(
            BT, key, seq_len, v_first, v_b, V.shape[0], PAGED, BLOCK_SIZE, BOX, BOXES
        )  # fmt: skip
        bar = k_full.index(stage)
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(bar, BYTES)
        for box in gl.static_range(BOXES):
            to = k_smem.index(stage).slice(box * BOX, BOX)
            tma.async_copy_global_to_shared(K, [k_rows[box], kv_head * k_col], bar, to)
        bar = v_full.index(stage)
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(bar, BYTES)
        for box in gl.static_range(BOXES):
            to = v_smem.index(stage).slice(box * BOX, BOX)
            tma.async_copy_global_to_shared(V, [v_rows[box], kv_head * v_col], bar, to)


@gluon.jit
def _clear(v, held, D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero a tile's values from row `held` on: beyond the length there may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, 16):
        if first + 16 > held:
            part = v.slice(first, 16)
            row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            kept = part.load(LAYOUT)
            part.store(gl.where((row < held)[:, None], kept, gl.zeros_like(kept)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _softmax(
    s, m, key, seq_len, row_pos, by, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """From scores to weights: these, the new maximum (unscaled), and what older sums count."""
    LAYOUT: gl.constexpr = s.type.layout
    if MASK:
        key_pos = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        seen = (key_pos < seq_len)[None, :]
        if CAUSAL:
            seen = seen & (key_pos[None, :] <= row_pos[:, None])
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if MASK:
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
    acc, m, l, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, i, count, seq_len,
    row_pos, by, HALF: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The scores of key tile `i`, which is there, while the weights of the one before meet V."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = acc.type.layout
    stage = i % STAGES
    before = (i - 1) % STAGES
    if TURNS:  # one group's products, then the other's: each has its softmax meanwhile
        mbarrier.wait(turns.index(HALF), (i + HALF) & 1)
    s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - HALF))
    s = warpgroup_mma_wait(1, deps=[s])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage))
    key = (count - 1 - i) * BLOCK_N
    weights, m, alpha = _softmax(s, m, key, seq_len, row_pos, by, MASK, CAUSAL, BLOCK_N)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _sums(weights)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))
    weights = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    # The next keys are waited for here: ptxas moves the wait for the product before the softmax
    # unless a branch lies between them.
    i += 1
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1, pred=i < count)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(before))
    return acc * alpha[:, None], m, l, weights


@gluon.jit
def _consume(
    Q, OUT, LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    turns, by, q_t, q_h, o_t, o_h, lse_t,
    HALF: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Attend with one half of the tile's rows."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    kv_head = gl.program_id(1)
    _seq, token0, query_len, start, seq_len, count, full = _tile(
        SEQ_LENS, STARTS, WORK, G, BLOCK_M, BLOCK_N, CAUSAL
    )
    start += HALF * 64

    q = q_smem.index(HALF)
    row_w = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    offs_w = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    held = (row_w < query_len * G)[:, None] & (offs_w < D)[None, :]
    token_w = (token0 + row_w // G).to(gl.int64)
    head_w = kv_head * G + row_w % G
    async_copy.async_copy_global_to_shared(
        q, Q + (token_w * q_t + head_w * q_h)[:, None] + offs_w[None, :], mask=held
    )
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    row_pos = seq_len - query_len + row // G
    key = (count - 1) * BLOCK_N
    mbarrier.wait(k_full.index(0), 0)
    s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0))
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weights, m, _alpha = _softmax(s, m, key, seq_len, row_pos, by, True, CAUSAL, BLOCK_N)
    l = _sums(weights)
    p = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
    acc = gl.zeros([64, D], gl.float32, OUTPUT)
    if key + BLOCK_N > seq_len:
        mbarrier.wait(v_full.index(0), 0)
        _clear(v_smem.index(0), seq_len - key, D, BLOCK_N)
    mbarrier.wait(k_full.index(1 % STAGES), 1 // STAGES & 1, pred=count > 1)

    masked = count - full
    for i in range(1, masked):
        acc, m, l, p = _step(
            acc, m, l, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            turns, i, count, seq_len, row_pos, by, HALF, True, CAUSAL, BLOCK_N, STAGES, TURNS,
        )  # fmt: skip
    for i in range(gl.maximum(masked, 1), count):
        acc, m, l, p = _step(
            acc, m, l, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            turns, i, count, seq_len, row_pos, by, HALF, False, CAUSAL, BLOCK_N, STAGES, TURNS,
        )  # fmt: skip
    last = count - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    l = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
    safe = gl.where(l == 0.0, 1.0, l)
    out = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OUTPUT))[:, None]
    q.store(out.to(DTYPE))  # through shared memory: whole rows leave at once
    gl.thread_barrier()
    gl.store(
        OUT + (token_w * o_t + head_w * o_h)[:, None] + offs_w[None, :],
        q.load(WIDE).to(OUT.dtype.element_ty), mask=held,
    )  # fmt: skip
    if HAS_LSE:
        lse = gl.where(l == 0.0, float("-inf"), (m * by + gl.log2(safe)) * LN2)
        at = (token0 + row // G).to(gl.int64) * lse_t + kv_head * G + row % G
        gl.store(LSE + at, lse, mask=row < query_len * G)


@gluon.jit(do_not_specialize=["lse_t", "bt_s"])
def prefill_hopper_kernel(
    Q, K, V, OUT, LSE, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, scale,
    q_t, q_h, k_b, k_row, k_col, v_b, v_row, v_col, o_t, o_h, lse_t, bt_s,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 (token, head of group) rows of one KV head. Grid: (tiles, KV heads).

    `K`, `V`: descriptors of (rows, columns) in boxes of as many rows as lie together, at most
    `BLOCK_N`; a block begins `k_b` rows after the one before, a head `k_row` rows and `k_col` columns.
    """
    gl.static_assert(gl.num_warps() == 4 and BLOCK_M == 128)
    DTYPE: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, D], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    by = scale * LOG2E
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    Q, OUT, LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, turns, by, q_t, q_h, o_t, o_h, lse_t,
                    0, G, D, BLOCK_M, BLOCK_N, CAUSAL, STAGES, HAS_LSE, TURNS,
                ),
            ),
            (
                _consume,
                (
                    Q, OUT, LSE, SEQ_LENS, STARTS, WORK, q_smem, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty, turns, by, q_t, q_h, o_t, o_h, lse_t,
                    1, G, D, BLOCK_M, BLOCK_N, CAUSAL, STAGES, HAS_LSE, TURNS,
                ),
            ),
            (
                _produce,
                (
                    K, V, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, k_smem, v_smem,
                    k_full, k_empty, v_full, v_empty,
                    k_b, k_row, k_col, v_b, v_row, v_col, bt_s,
                    G, D, BLOCK_M, BLOCK_N, BLOCK_SIZE, PAGED, CAUSAL, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
