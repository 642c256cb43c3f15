"""Attention whose bits are specified: `docs/invariance.md`, "Bits on any machine".

Compiled with `enable_fp_fusion=False`: each product is rounded before it is added to anything. Nothing is
summed along a dimension but what has one number beside zeros, since the order would follow the layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.tiles import keys_seen, load_tile, store_tile

BLOCK = tl.constexpr(32)
SEGMENT = tl.constexpr(8)  # blocks
INF = tl.constexpr(float("inf"))
LN2_HIGH = tl.constexpr(float.fromhex("0x1.63p-1"))
LN2_LOW = tl.constexpr(float.fromhex("-0x1.bd0106p-13"))
ROUNDER = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(float.fromhex("0x1.715476p+0"))
E6 = tl.constexpr(float.fromhex("0x1.6a23cep-10"))
E5 = tl.constexpr(float.fromhex("0x1.123a2p-7"))
E4 = tl.constexpr(float.fromhex("0x1.5558f2p-5"))
E3 = tl.constexpr(float.fromhex("0x1.555492p-3"))
E2 = tl.constexpr(float.fromhex("0x1.fffffcp-2"))
L9 = tl.constexpr(float.fromhex("0x1.c71c72p-3"))
L7 = tl.constexpr(float.fromhex("0x1.24924ap-2"))
L5 = tl.constexpr(float.fromhex("0x1.99999ap-2"))
L3 = tl.constexpr(float.fromhex("0x1.555556p-1"))


@triton.jit
def exponential(x):
    """e^x for x <= 0."""
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = ((((E6 * r + E5) * r + E4) * r + E3) * r + E2) * r + 1.0
    y = y * r + 1.0
    power = y.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x >= -86.0, power.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def logarithm(x):
    """ln(x) for x >= 1."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    t = tl.div_rn(f - 1.0, f + 1.0)
    z = t * t
    series = t * ((((L9 * z + L7) * z + L5) * z + L3) * z) + (t + t)
    n = exponent.to(tl.float32)
    return n * LN2_HIGH + (n * LN2_LOW + series)


@triton.jit
def nothing(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The state of rows that have seen no key: the maximum, the sum of weights, the weighted values."""
    m = tl.full((BLOCK_M,), -INF, tl.float32)
    return m, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, WIDTH), tl.float32)


@triton.jit
def joined(m, l, o, its_m, its_l, its_o):
    """The state of the keys of both; where one has seen no key, the other's."""
    top = tl.maximum(m, its_m)
    base = tl.where(top > -INF, top, 0.0)
    by = exponential(m - base)
    its = exponential(its_m - base)
    first = m == -INF
    none = its_m == -INF
    total = l * by + its_l * its
    sums = o * by[:, None] + its_o * its[:, None]
    l = tl.where(first, its_l, tl.where(none, l, total))
    o = tl.where(first[:, None], its_o, tl.where(none[:, None], o, sums))
    return top, l, o


@triton.jit
def tile_at(
    TILES,
    STARTS,
    LENS,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
):
    """A program's tile of rows: its sequence and where that one's keys begin; its rows.

    Of these it returns the tokens and positions, and whether they exist; then the sequence's length, and
    the ranges of keys that some row sees.
    """
    TILE = TILES + 3 * tl.program_id(0)
    seq = tl.load(TILE)
    token = tl.load(TILE + 1)
    start = tl.load(STARTS + seq)
    length = tl.load(LENS + seq)
    count = tl.load(STARTS + seq + 1) - start
    rows = tl.arange(0, BLOCK_M)
    behind = length - count
    last = tl.minimum(token + BLOCK_M // G, count) - 1
    low, kept, near, high = keys_seen(
        behind + token, behind + last, length, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    own = token + rows // G
    held = (rows < BLOCK_M // G * G) & (own < count)
    return seq, tl.load(TILE + 2), start + own, behind + own, held, length, low, kept, near, high


@triton.jit
def segments_of(low, kept, near, high):
    """The blocks [first, end) that a tile sees, and its segments likewise."""
    first = tl.where(kept > low, low, near) // BLOCK
    end = tl.cdiv(high, BLOCK)
    return first, end, first // SEGMENT, tl.cdiv(end, SEGMENT)


@triton.jit
def state_at(kv_head, segments, BLOCK_M: tl.constexpr):
    """The row where the states of a tile's first segment begin."""
    return ((tl.program_id(0) * tl.num_programs(1) + kv_head) * segments).to(tl.int64) * BLOCK_M


@triton.jit(do_not_specialize=["table_s", "segments"])
def exact_kernel(
    Q, K, V, SLOPES, TILES, TABLE, STARTS, LENS, PARTS, STATS, scale,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, table_s, segments,
    G: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of rows, and write their states. Grid: (tiles, KV heads, `segments`).

    With several segments each program has one of them, with one all. BLOCK_SIZE 0: keys lie packed.
    """
    kv_head = tl.program_id(1)
    seq, key_start, token, position, held, length, low, kept, near, high = tile_at(
        TILES, STARTS, LENS, G, BLOCK_M, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    rows = tl.arange(0, BLOCK_M)
    head = kv_head * G + rows % G
    its_low, its_kept, its_near, its_high = keys_seen(
        position, position, position * 0 + length, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    ROWS = Q + token.to(tl.int64) * q_t + head.to(tl.int64) * q_h
    part_of_4 = tl.arange(0, 4)
    columns = tl.arange(0, WIDTH)
    i = tl.arange(0, BLOCK)
    m, l, o = nothing(BLOCK_M, WIDTH)
    first, end, segment, last = segments_of(low, kept, near, high)
    if segments > 1:
        segment = tl.maximum(segment, tl.program_id(2))
        last = tl.minimum(last, tl.program_id(2) + 1)
    while segment < last:
        part_m, part_l, part_o = nothing(BLOCK_M, WIDTH)
        block = tl.maximum(first, segment * SEGMENT)
        while block < tl.minimum(end, (segment + 1) * SEGMENT):
            key = block * BLOCK + i
            there = ((key >= low) & (key < kept)) | ((key >= near) & (key < high))
            if BLOCK_SIZE > 0:
                ENTRIES = TABLE + seq.to(tl.int64) * table_s + key // BLOCK_SIZE
                page = tl.load(ENTRIES, mask=there, other=0).to(tl.int64)
                at = page * k_b + key % BLOCK_SIZE * k_t
                v_at = page * v_b + key % BLOCK_SIZE * v_t
            else:
                at = (key_start + key).to(tl.int64) * k_t
                v_at = (key_start + key).to(tl.int64) * v_t
            KEYS = K + at + kv_head.to(tl.int64) * k_h
            sums = tl.zeros((BLOCK_M, BLOCK, 4), tl.float32)
            for d in range(0, D, 4):
                q = load_tile(ROWS, d + part_of_4, held, D)
                k = load_tile(KEYS, d + part_of_4, there, D)
                sums = sums + q[:, None, :] * k[None, :, :]
            even, odd = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK, 2, 2)))
            a, b = tl.split(even + odd)
            s = (a + b) * scale
            if ALIBI:
                distance = (key[None, :] - position[:, None]).to(tl.float32)
                s = s + tl.load(SLOPES + head)[:, None] * distance
            seen = (key[None, :] >= its_near[:, None]) & (key[None, :] < its_high[:, None])
            if SINK_TOKENS > 0:
                seen |= (key[None, :] >= its_low[:, None]) & (key[None, :] < its_kept[:, None])
            seen = seen & held[:, None]
            s = tl.where(seen, s, -INF)
            most = tl.max(s, 1)
            some = most > -INF
            top = tl.where(some, tl.maximum(part_m, most), 0.0)
            shrink = exponential(part_m - top)
            weights = tl.where(seen, exponential(s - top[:, None]), -1.0)  # -1: it isn't seen
            total = part_l * shrink
            weighted = part_o * shrink[:, None]
            for j in range(BLOCK):
                weight = tl.sum(tl.where(i[None, :] == j, weights, 0.0), 1)
                place = tl.sum(tl.where(i == j, v_at, 0), 0)
                has = tl.sum(tl.where(i == j, there.to(tl.int32), 0), 0) > 0
                v = tl.load(
                    V + place + kv_head.to(tl.int64) * v_h + columns,
                    mask=(columns < DV) & has,
                    other=0.0,
                )
                total = total + tl.maximum(weight, 0.0)
                product = weight[:, None] * v[None, :]
                weighted = weighted + tl.where(weight[:, None] >= 0.0, product, 0.0)
            part_m = tl.where(some, top, part_m)
            part_l = tl.where(some, total, part_l)
            part_o = tl.where(some[:, None], weighted, part_o)
            block += 1
        m, l, o = joined(m, l, o, part_m, part_l, part_o)
        segment += 1
    at = state_at(kv_head, segments, BLOCK_M) + tl.program_id(2) * BLOCK_M + rows
    tl.store(STATS + 2 * at, m)
    tl.store(STATS + 2 * at + 1, l)
    tl.store(PARTS + at[:, None] * WIDTH + columns[None, :], o)


@triton.jit(do_not_specialize=["segments"])
def exact_join_kernel(
    OUT, LSE, SINKS, TILES, STARTS, LENS, PARTS, STATS, out_t, out_h, lse_t, lse_h, segments,
    G: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Join a tile's states in order, and a learned sink; write the results. Grid: (tiles, KV heads)."""
    kv_head = tl.program_id(1)
    _, _, token, _, held, _, low, kept, near, high = tile_at(
        TILES, STARTS, LENS, G, BLOCK_M, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    m, l, o = nothing(BLOCK_M, WIDTH)
    _, _, first, last = segments_of(low, kept, near, high)
    segment = tl.where(segments > 1, first, 0)
    last = tl.where(segments > 1, last, 1)
    while segment < last:
        at = state_at(kv_head, segments, BLOCK_M) + segment * BLOCK_M + rows
        its_o = tl.load(PARTS + at[:, None] * WIDTH + columns[None, :])
        m, l, o = joined(m, l, o, tl.load(STATS + 2 * at), tl.load(STATS + 2 * at + 1), its_o)
        segment += 1
    blind = m == -INF
    head = kv_head * G + rows % G
    if HAS_SINKS:
        sink = tl.where(blind, -INF, tl.load(SINKS + head))
        m, l, o = joined(m, l, o, sink, l * 0.0 + 1.0, o * 0.0)
    l = tl.where(blind, 1.0, l)
    out = tl.where(blind[:, None], 0.0, tl.div_rn(o, tl.broadcast_to(l[:, None], o.shape)))
    store_tile(OUT + token.to(tl.int64) * out_t + head.to(tl.int64) * out_h, out, columns, held, DV)
    if HAS_LSE:
        tl.store(LSE + token.to(tl.int64) * lse_t + head * lse_h, m + logarithm(l), mask=held)
