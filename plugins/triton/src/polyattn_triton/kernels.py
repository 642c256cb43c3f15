"""The paged attention kernels: one for prefill and decode, one that merges splits, one that stores.

Online softmax after Milakov and Gimelshein (2018) as in FlashAttention (Dao et al., 2022), split-KV
as in Flash-Decoding. The rows of a tile are (query token, head of its group), so that a KV head's
whole group shares each load of K and V. Logits are kept in base 2; the LSE leaves in base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _logits(
    s, row_pos, key_pos, seq_len, slope, scale, soft_cap,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Scale, cap, bias and mask a tile of scores; base 2."""
    if SOFT_CAP:
        x = s * (scale / soft_cap)
        s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))) * LOG2E
    else:
        s = s * (scale * LOG2E)
    if ALIBI:
        s += (slope * LOG2E)[:, None] * (key_pos[None, :] - row_pos[:, None]).to(tl.float32)
    if MASK:
        seen = (key_pos < seq_len)[None, :]
        if CAUSAL:
            seen = seen & (key_pos[None, :] <= row_pos[:, None])
        if WINDOW > 0:
            near = key_pos[None, :] > row_pos[:, None] - WINDOW
            if not CAUSAL:
                near = near & (key_pos[None, :] < row_pos[:, None] + WINDOW)
            if SINK_TOKENS > 0:
                near = near | (key_pos < SINK_TOKENS)[None, :]
            seen = seen & near
        if CHUNK > 0:
            seen = seen & ((key_pos // CHUNK)[None, :] == (row_pos // CHUNK)[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _tiles(
    acc, m, l, q, K, V, BT, kv_start, first, last, skip_from, skip_by, row_pos, seq_len, slope,
    scale, soft_cap, k_b, k_t, v_b, v_t,
    MASK: tl.constexpr, PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles `first` to `last`; those from `skip_from` on lie `skip_by` further."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for i in range(first, last):
        tile = i
        if SINK_TOKENS > 0:
            tile = tl.where(i >= skip_from, i + skip_by, i)
        key_pos = tile * BLOCK_N + offs_n
        inside = key_pos < seq_len
        if PAGED:
            if MASK:
                block = tl.load(BT + key_pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            else:
                block = tl.load(BT + key_pos // BLOCK_SIZE).to(tl.int64)
            k_row = block * k_b + (key_pos % BLOCK_SIZE) * k_t
            v_row = block * v_b + (key_pos % BLOCK_SIZE) * v_t
        else:
            k_row = (kv_start + key_pos).to(tl.int64) * k_t
            v_row = (kv_start + key_pos).to(tl.int64) * v_t
        k_ptr = K + k_row[:, None] + offs_d[None, :]
        v_ptr = V + v_row[:, None] + offs_dv[None, :]
        # Slots past the length may hold NaN: they are not loaded at all.
        if MASK:
            k = tl.load(k_ptr, mask=inside[:, None] & (offs_d < D)[None, :], other=0.0)
            v = tl.load(v_ptr, mask=inside[:, None] & (offs_dv < DV)[None, :], other=0.0)
        else:
            if D == BLOCK_D:
                k = tl.load(k_ptr)
            else:
                k = tl.load(k_ptr, mask=(offs_d < D)[None, :], other=0.0)
            if DV == BLOCK_DV:
                v = tl.load(v_ptr)
            else:
                v = tl.load(v_ptr, mask=(offs_dv < DV)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        s = _logits(
            s, row_pos, key_pos, seq_len, slope, scale, soft_cap,
            MASK, CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        if MASK:  # a row that has seen nothing yet must not become NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - base[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["lse_t", "bt_s", "splits"])
def attention_kernel(
    Q, K, V, OUT, LSE, PARTS, PART_LSE, BT, SEQ_LENS, STARTS, TILE_SEQ, TILE_START, SINKS, SLOPES,
    scale, v_scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, lse_t, bt_s,
    splits,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one KV head, over all its keys or one split of them.

    Grid: (tiles, KV heads, splits). In decode a tile is a sequence's one token.
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        seq = tl.program_id(0)
        tile_start = 0
        token0 = seq
        query_len = 1
    else:
        seq = tl.load(TILE_SEQ + tl.program_id(0))
        tile_start = tl.load(TILE_START + tl.program_id(0))
        token0 = tl.load(STARTS + seq)
        query_len = tl.load(STARTS + seq + 1) - token0
    seq_len = tl.load(SEQ_LENS + seq)
    context = seq_len - query_len
    BLOCK_Q: tl.constexpr = BLOCK_M // G

    rows = tl.arange(0, BLOCK_M)
    in_query = tile_start + rows // G
    head = kv_head * G + rows % G
    row_ok = (in_query < query_len) & (rows < BLOCK_Q * G)
    row_pos = context + in_query
    first_pos = context + tile_start
    last_pos = context + tl.minimum(tile_start + BLOCK_Q, query_len) - 1

    # Which key tiles: [low, high), of which [full_low, full_high) needs no mask.
    high = seq_len
    low = 0
    if CAUSAL:
        high = tl.minimum(high, last_pos + 1)
    if WINDOW > 0:
        low = tl.maximum(low, first_pos - WINDOW + 1)
        if not CAUSAL:
            high = tl.minimum(high, last_pos + WINDOW)
    if CHUNK > 0:
        low = tl.maximum(low, first_pos // CHUNK * CHUNK)
        high = tl.minimum(high, (last_pos // CHUNK + 1) * CHUNK)
    low_tile = low // BLOCK_N
    high_tile = tl.cdiv(high, BLOCK_N)
    full_low = low_tile
    full_high = high // BLOCK_N
    if CAUSAL:
        full_high = tl.minimum(full_high, (first_pos + 1) // BLOCK_N)
    if WINDOW > 0:
        full_low = tl.maximum(0, tl.cdiv(last_pos - WINDOW + 1, BLOCK_N))
        if not CAUSAL:
            full_high = low_tile
    if CHUNK > 0:
        full_low = tl.maximum(full_low, tl.cdiv(last_pos // CHUNK * CHUNK, BLOCK_N))
        full_high = tl.minimum(full_high, (first_pos // CHUNK + 1) * CHUNK // BLOCK_N)
    skip_from = 0
    skip_by = 0
    if SINK_TOKENS > 0:
        # The first tiles, then those of the window: one range with a gap.
        skip_from = tl.minimum((SINK_TOKENS + BLOCK_N - 1) // BLOCK_N, low_tile)
        skip_by = low_tile - skip_from
        low_tile = 0
        high_tile = high_tile - skip_by
        full_low = high_tile
        full_high = high_tile
    if SPLIT:
        each = tl.cdiv(tl.maximum(high_tile - low_tile, 0), splits)
        low_tile = low_tile + split * each
        high_tile = tl.minimum(low_tile + each, high_tile)
    full_low = tl.minimum(tl.maximum(full_low, low_tile), high_tile)
    full_high = tl.maximum(tl.minimum(full_high, high_tile), full_low)

    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_row = (token0 + in_query).to(tl.int64) * q_t + head * q_h
    q = tl.load(
        Q + q_row[:, None] + offs_d[None, :],
        mask=row_ok[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(SLOPES + head, mask=row_ok, other=0.0)

    K += kv_head * k_h
    V += kv_head * v_h
    BT += seq.to(tl.int64) * bt_s
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW > 0 or CHUNK > 0:
        acc, m, l = _tiles(
            acc, m, l, q, K, V, BT, token0, low_tile, full_low, skip_from, skip_by, row_pos,
            seq_len, slope, scale, soft_cap, k_b, k_t, v_b, v_t,
            True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
            CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI,
        )  # fmt: skip
    if SINK_TOKENS == 0:
        acc, m, l = _tiles(
            acc, m, l, q, K, V, BT, token0, full_low, full_high, skip_from, skip_by, row_pos,
            seq_len, slope, scale, soft_cap, k_b, k_t, v_b, v_t,
            False, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
            CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI,
        )  # fmt: skip
    acc, m, l = _tiles(
        acc, m, l, q, K, V, BT, token0, full_high, high_tile, skip_from, skip_by, row_pos,
        seq_len, slope, scale, soft_cap, k_b, k_t, v_b, v_t,
        True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
        CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI,
    )  # fmt: skip

    if SPLIT:
        part = ((token0 + in_query) * HEADS + head).to(tl.int64) * splits + split
        safe = tl.where(l == 0.0, 1.0, l)
        tl.store(
            PARTS + part[:, None] * DV + offs_dv[None, :],
            acc / safe[:, None],
            mask=row_ok[:, None] & (offs_dv < DV)[None, :],
        )
        tl.store(PART_LSE + part, tl.where(l == 0.0, float("-inf"), m + tl.log2(safe)), mask=row_ok)
    else:
        if HAS_SINKS:
            sink = tl.load(SINKS + head, mask=row_ok, other=0.0) * LOG2E
            top = tl.maximum(m, sink)
            l = l * tl.exp2(m - top) + tl.exp2(sink - top)
            acc = acc * tl.exp2(m - top)[:, None]
            m = top
        safe = tl.where(l == 0.0, 1.0, l)
        out = acc * (v_scale / safe)[:, None]
        o_row = (token0 + in_query).to(tl.int64) * o_t + head * o_h
        tl.store(
            OUT + o_row[:, None] + offs_dv[None, :],
            out.to(OUT.dtype.element_ty),
            mask=row_ok[:, None] & (offs_dv < DV)[None, :],
        )
        if HAS_LSE:
            lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe)) * LN2)
            tl.store(LSE + (token0 + in_query).to(tl.int64) * lse_t + head, lse, mask=row_ok)


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


@triton.jit
def write_kernel(
    KEY, VALUE, K, V, SLOTS, k_inv, v_inv, limit,
    key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values at its slot. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        offs = tl.arange(0, BLOCK)
        head = offs // D
        at = offs % D
        x = tl.load(KEY + token * key_t + head * key_h + at, mask=head < HEADS)
        if QUANTIZED:
            x = tl.minimum(tl.maximum(x.to(tl.float32) * k_inv, -limit), limit)
            if INTEGER:
                x = tl.floor(x + 0.5)
        to = K + block * k_b + offset * k_t + head * k_h + at
        tl.store(to, x.to(K.dtype.element_ty), mask=head < HEADS)
        head = offs // DV
        at = offs % DV
        y = tl.load(VALUE + token * value_t + head * value_h + at, mask=head < HEADS)
        if QUANTIZED:
            y = tl.minimum(tl.maximum(y.to(tl.float32) * v_inv, -limit), limit)
            if INTEGER:
                y = tl.floor(y + 0.5)
        to = V + block * v_b + offset * v_t + head * v_h + at
        tl.store(to, y.to(V.dtype.element_ty), mask=head < HEADS)
