"""The decode kernel: one query token a sequence over its pages, by splits; and what merges splits.

Split-KV as in Flash-Decoding (Dao et al., 2023). The rows of a tile are the heads of one group.
Written for latency: one loop, whose step reads nothing that it must wait for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.softmax import LN2, LOG2E, finish, logits
from polyattn_triton.tiles import blocks_in_table, load_held_rows, tile_at


@triton.jit
def _power_below(x):
    """The largest power of two that is no larger than a float32 x; 1 for zero."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
def _merged(
    PARTS, PART_LSE, first, splits, row_ok,
    ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of `ROWS` heads, whose parts begin at `first`: output, maximum, sum."""
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_s = tl.arange(0, AT_ONCE)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, splits, AT_ONCE):
        # Other programs wrote these a moment ago: loaded past the L1.
        lse = tl.load(
            PART_LSE + first[:, None] + start + offs_s[None, :],
            mask=row_ok[:, None] & (start + offs_s < splits)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(tl.exp2(lse - base[:, None]), 1)
        acc = acc * alpha[:, None]
        for i in tl.static_range(AT_ONCE):  # unrolled, so that all these loads are in flight
            part = first + start + i
            ok = row_ok & (start + i < splits)
            x = tl.load(
                PARTS + part[:, None] * DV + offs_dv[None, :],
                mask=ok[:, None] & (offs_dv < DV)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            one = tl.load(PART_LSE + part, mask=ok, other=float("-inf"), cache_modifier=".cg")
            acc += x * tl.exp2(one - base)[:, None]
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["lse_t", "bt_s", "bt_end", "splits"])
def decode_kernel(
    Q, K, V, OUT, LSE, SINKS, SLOPES, PARTS, PART_LSE, DONE, BT, SEQ_LENS,
    scale, v_scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, lse_t, bt_s, bt_end, splits,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """One sequence and KV head, over all its keys or one split of them.

    Grid: (sequences, KV heads, splits). With `AT_ONCE` the split that ends last merges them, so
    many at once; without, `merge_kernel` does. `ALIKE`: V has K's strides. `bt_end`: a block table's
    last column.
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(SEQ_LENS + seq)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    head = kv_head * G + rows
    row_ok = rows < G
    row_pos = seq_len - 1 + rows * 0
    q = tl.load(
        Q + (seq.to(tl.int64) * q_t + head * q_h)[:, None] + offs_d[None, :],
        mask=row_ok[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )
    # An 8-bit float becomes float16 in one instruction and bfloat16 in several. Powers of two keep
    # queries and weights inside of float16's range: the weights' is not undone, since it is in their
    # sum too.
    BY_HALF: tl.constexpr = K.dtype.element_ty.is_fp8() and Q.dtype.element_ty == tl.bfloat16
    RAISED: tl.constexpr = 15 if BY_HALF else 0
    if BY_HALF:
        unit = _power_below(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
        scale = scale * unit[:, None]
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(SLOPES + head, mask=row_ok, other=0.0)

    # Which keys: [low, seq_len), in tiles [first, last).
    low = 0
    if WINDOW > 0:
        low = tl.maximum(low, seq_len - WINDOW)
    if CHUNK > 0:
        low = tl.maximum(low, (seq_len - 1) // CHUNK * CHUNK)
    first = low // BLOCK_N
    last = tl.cdiv(seq_len, BLOCK_N)
    skip_from = 0
    skip_by = 0
    if SINK_TOKENS > 0:
        # The first tiles, then those of the window: one range with a gap.
        skip_from = tl.minimum((SINK_TOKENS + BLOCK_N - 1) // BLOCK_N, first)
        skip_by = first - skip_from
        low = 0
        first = 0
        last -= skip_by
    # The splits take the tiles in turn: which one is a split's first depends on no length (without a
    # window), so its blocks are asked for together with the length.
    step = 1
    if SPLIT:
        first += split
        step = splits

    K += kv_head * k_h
    V += kv_head * v_h
    BT += seq.to(tl.int64) * bt_s
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up across once, after the loop
    tile = tile_at(first, skip_from, skip_by, SINK_TOKENS)
    block = blocks_in_table(BT, tile * BLOCK_N + offs_n, bt_end, BLOCK_SIZE)
    for i in range(first, last, step):
        key_pos = tile * BLOCK_N + offs_n
        offset = key_pos % BLOCK_SIZE
        row = block.to(tl.int64)
        k_row = row * k_b + offset * k_t
        v_row = k_row
        if not ALIKE:
            v_row = row * v_b + offset * v_t
        tile = tile_at(i + step, skip_from, skip_by, SINK_TOKENS)
        # The next tile's blocks, a step ahead: keys that wait for a load of their own step are not
        # put in flight early (Triton 3.6).
        block = blocks_in_table(BT, tile * BLOCK_N + offs_n, bt_end, BLOCK_SIZE)
        held = key_pos < seq_len
        if WINDOW > 0 or CHUNK > 0:
            held = held & (key_pos >= low)
        k = load_held_rows(K + k_row[:, None] + offs_d[None, :], held, offs_d, D, BLOCK_D)
        v = load_held_rows(V + v_row[:, None] + offs_dv[None, :], held, offs_dv, DV, BLOCK_DV)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        s = logits(
            s, row_pos, key_pos, seq_len, slope, scale, soft_cap,
            True, False, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if SINK_TOKENS > 0:  # the first tiles may lie outside of the chunk: nothing is seen there
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - (base - RAISED)[:, None])
        sums = sums * alpha[:, None] + p
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    l = tl.sum(sums, 1)
    m -= RAISED

    token = seq.to(tl.int64)
    if SPLIT:
        part = (token * HEADS + head) * splits + split
        safe = tl.where(l == 0.0, 1.0, l)
        tl.store(
            PARTS + part[:, None] * DV + offs_dv[None, :],
            acc / safe[:, None],
            mask=row_ok[:, None] & (offs_dv < DV)[None, :],
        )
        tl.store(PART_LSE + part, tl.where(l == 0.0, float("-inf"), m + tl.log2(safe)), mask=row_ok)
        if AT_ONCE > 0:
            tl.debug_barrier()  # all of this program's part is stored before it is counted
            counter = DONE + seq * tl.num_programs(1) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                group = tl.arange(0, ROWS)
                heads = kv_head * G + group
                merged, top, total = _merged(
                    PARTS, PART_LSE, (token * HEADS + heads) * splits, splits, group < G,
                    ROWS, DV, BLOCK_DV, AT_ONCE,
                )  # fmt: skip
                finish(
                    merged, top, total, OUT, LSE, SINKS, v_scale, token, heads, group < G,
                    o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
    else:
        finish(
            acc, m, l, OUT, LSE, SINKS, v_scale, token, head, row_ok, o_t, o_h, lse_t,
            DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lse_t", "splits"])
def merge_kernel(
    PARTS, PART_LSE, OUT, LSE, SINKS, v_scale, o_t, o_h, lse_t, splits,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge up to BLOCK_S splits of one (token, head). Grid: (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    part = (token * HEADS + head) * splits + offs_s
    if EARLY:  # the parts are complete from here on
        tl.extra.cuda.gdc_wait()
    lse = tl.load(PART_LSE + part, mask=offs_s < splits, other=float("-inf"))
    parts = tl.load(  # asked for before the weights are known: one wait instead of two
        PARTS + part[:, None] * DV + offs_dv[None, :],
        mask=(offs_s < splits)[:, None] & (offs_dv < DV)[None, :],
        other=0.0,
    )
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(SINKS + head) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - base)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    safe = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(parts * weight[:, None], 0) * (v_scale / safe)
    tl.store(
        OUT + token * o_t + head * o_h + offs_dv, out.to(OUT.dtype.element_ty), mask=offs_dv < DV
    )
    if HAS_LSE:
        value = tl.where(total == 0.0, float("-inf"), (base + tl.log2(safe)) * LN2)
        tl.store(LSE + token * lse_t + head, value)
