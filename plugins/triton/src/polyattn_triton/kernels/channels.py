"""Recurrences whose every channel has a decay of its own, in chunks: KDA and RWKV-7.

With G the sum of log decays since the chunk began, a chunk of the rule h = e^g h + b (a' h)' + k v' is
a triangular system in what the tokens write (the WY form of Yang et al., 2024, with a decay per
channel as in Kimi Linear, 2025, and RWKV-7, Peng et al., 2025). `pair_kernel` makes its small matrices,
every chunk by itself; `chunk_kernel` walks a sequence's chunks with the state in registers. No exponent
is positive, and none is the difference of two sums: a token that forgets all costs no precision after
it.
"""

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import sequence_of
from polyattn_triton.kernels.tiles import load_tile


@triton.jit
def _token(Q, K, G, A, B, row, q_t, k_t, g_t, a_t, b_t, ok, DELTA: tl.constexpr):
    """Load a token's channels as they are."""
    q = tl.load(Q + row * q_t, mask=ok, other=0.0)
    k = tl.load(K + row * k_t, mask=ok, other=0.0)
    g = tl.load(G + row * g_t, mask=ok, other=0.0)
    a = q
    b = q
    if not DELTA:
        a = tl.load(A + row * a_t, mask=ok, other=0.0)
        b = tl.load(B + row * b_t, mask=ok, other=0.0)
    return q, k, g, a, b


@triton.jit
def pair_kernel(
    Q, K, G, BETA, A, B, WORK, WHOLE, STARTS, STATE_SLOTS, TILE_SEQ, TILE_START,
    q_t, q_g, k_t, k_g, g_t, g_h, a_t, a_h, b_t, b_h, beta_t, w_t, w_h,
    EACH: tl.constexpr, KS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read of each other, and all that decays. Grid: (chunks, heads).

    WORK (tokens, heads, row): small matrices, then rows of keys' channels. KDA's are (1 + L)^-1
    diag(beta) and q k', then q and k as of the chunk's begin and k as of its end; RWKV-7's (1 - L)^-1
    for L = a b', (1 - L)^-1 a k', r b' and r k', then r and a as of the begin, b and k as of the end.
    Each product has its decays, below the diagonal, the last ones on it, too. WHOLE: `whole_place`.
    Keys in `kept` (keys' channels, tokens) decay as t goes on; a thread has a token's channels, so that
    sums over them stay within it.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(TILE_SEQ + tile)
    if tl.load(STATE_SLOTS + seq) < 0:
        return
    begin = tl.load(STARTS + seq) + tl.load(TILE_START + tile)
    left = tl.load(STARTS + seq + 1) - begin
    base = begin.to(tl.int64)
    group = head // EACH
    kk = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, CHUNK)
    kept = tl.zeros([BLOCK_K, CHUNK], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    solved = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    units = tl.full([CHUNK], 1.0, tl.float32)
    kind: tl.constexpr = WORK.dtype.element_ty
    WORK += head * w_h
    WIDE: tl.constexpr = (2 if DELTA else 4) * CHUNK
    if DELTA:
        beta = tl.load(BETA + (base + rows) * beta_t + head, mask=rows < left, other=0.0)
        beta = beta.to(tl.float32)
    else:
        kept_b = tl.zeros([BLOCK_K, CHUNK], tl.float32)
        solved_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    Q += group * q_g + kk
    K += group * k_g + kk
    G += head * g_h + kk
    A += head * a_h + kk
    B += head * b_h + kk
    following = _token(Q, K, G, A, B, base, q_t, k_t, g_t, a_t, b_t, kk < KS, DELTA)
    for t in range(CHUNK):
        row = base + t
        there = t < left
        ok = (kk < KS) & there
        q, k, g, a, b = following
        more = (kk < KS) & (t + 1 < tl.minimum(left, CHUNK))  # the next token, ahead of its turn
        following = _token(Q, K, G, A, B, row + 1, q_t, k_t, g_t, a_t, b_t, more, DELTA)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        g = g.to(tl.float32)
        decay = tl.exp(g)[:, None]
        before = tl.exp(total)
        total += g
        since = tl.exp(total)
        here = (rows == t)[:, None]
        put = (rows == t)[None, :]
        work = WORK + row * w_t + rows
        wide = WORK + row * w_t + WIDE + kk
        if DELTA:
            unit_q = 1.0
            unit_k = 1.0
            if NORM:
                unit_q = tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
                unit_k = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            kept = kept * decay
            low = tl.sum(kept * k[:, None], 0) * units
            low *= -tl.sum(tl.where(rows == t, beta, 0.0), 0) * unit_k
            line = tl.where(rows == t, 1.0, 0.0) + tl.sum(low[:, None] * solved, 0)
            solved = tl.where(here, line[None, :], solved)
            kept = tl.where(put, k[:, None], kept)
            units = tl.where(rows == t, unit_k, units)
            tl.store(work, (line * beta).to(kind), mask=there)
            pairs = tl.sum(kept * q[:, None], 0) * (units * unit_q)
            tl.store(work + CHUNK, pairs.to(kind), mask=there)
            tl.store(wide, (q * since * unit_q).to(kind), mask=ok)
            tl.store(wide + KS, (k * since * unit_k).to(kind), mask=ok)
        else:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
            low = tl.sum(kept_b * a[:, None], 0)
            low_k = tl.sum(kept * a[:, None], 0)
            line = tl.where(rows == t, 1.0, 0.0) + tl.sum(low[:, None] * solved, 0)
            line_k = low_k + tl.sum(low[:, None] * solved_k, 0)
            solved = tl.where(here, line[None, :], solved)
            solved_k = tl.where(here, line_k[None, :], solved_k)
            kept = tl.where(put, k[:, None], kept * decay)
            kept_b = tl.where(put, b[:, None], kept_b * decay)
            tl.store(work, line.to(kind), mask=there)
            tl.store(work + CHUNK, line_k.to(kind), mask=there)
            tl.store(work + 2 * CHUNK, tl.sum(kept_b * q[:, None], 0).to(kind), mask=there)
            tl.store(work + 3 * CHUNK, tl.sum(kept * q[:, None], 0).to(kind), mask=there)
            tl.store(wide, (q * since).to(kind), mask=ok)
            tl.store(wide + KS, (a * before).to(kind), mask=ok)
    ends = WORK + (base + rows[None, :]) * w_t + WIDE + 2 * KS + kk[:, None]
    within = (kk < KS)[:, None] & (rows < left)[None, :]
    if DELTA:
        tl.store(ends, (kept * units[None, :]).to(kind), mask=within)
    else:
        tl.store(ends, kept_b.to(kind), mask=within)
        tl.store(ends + KS, kept.to(kind), mask=within)
    place = whole_place(seq, begin, head, tl.num_programs(1), KS, CHUNK)
    tl.store(WHOLE + place + kk, tl.exp(total), mask=kk < KS)


@triton.jit
def whole_place(seq, begin, head, heads, KS: tl.constexpr, CHUNK: tl.constexpr):
    """Where WHOLE has what a chunk, from token `begin` on, decays in all: no two have one place."""
    return ((seq + begin // CHUNK).to(tl.int64) * heads + head) * KS


@triton.jit
def chunk_kernel(
    V, WORK, WHOLE, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, scale,
    v_t, v_h, w_t, w_h, o_t, o_h, st_s, st_h,
    KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """A sequence's chunks one after another. Grid: (sequences, heads, value blocks).

    The state is (values, keys), so that what a product gives is the next one's left side where it lies.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun = sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS)
    if count == 0:
        return
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.arange(0, CHUNK)
    k_ok = (kk < KS)[None, :]
    v_ok = (vv < VS)[:, None]
    place = STATE + slot * st_s + head * st_h + kk[None, :] * VS + vv[:, None]
    h = tl.load(place, mask=k_ok & v_ok & begun, other=0.0).to(tl.float32)
    kind: tl.constexpr = V.dtype.element_ty
    WORK += head * w_h
    WIDE: tl.constexpr = (2 if DELTA else 4) * CHUNK
    for first in range(0, count, CHUNK):
        at = first + rows
        ok = at < count
        row = (start + at).to(tl.int64)
        v = tl.trans(load_tile(V + row * v_t + head * v_h, vv, ok, VS))
        work = WORK + row[:, None] * w_t + rows[None, :]
        wide = WORK + row[:, None] * w_t + WIDE + kk[None, :]
        ok = ok[:, None]
        solve = tl.trans(tl.load(work, mask=ok, other=0.0))
        second = tl.trans(tl.load(work + CHUNK, mask=ok, other=0.0))
        since_q = tl.trans(tl.load(wide, mask=ok & k_ok, other=0.0))
        since = tl.trans(tl.load(wide + KS, mask=ok & k_ok, other=0.0))
        until = tl.load(wide + 2 * KS, mask=ok & k_ok, other=0.0)
        of_whole = whole_place(seq, start + first, head, tl.num_programs(1), KS, CHUNK)
        whole = tl.load(WHOLE + of_whole + kk, mask=kk < KS, other=0.0)[None, :]
        held = h.to(kind)
        read = tl.dot(held, since, input_precision="ieee")
        y = tl.dot(held, since_q, input_precision="ieee")
        if DELTA:
            read = (v.to(tl.float32) - read).to(kind)
            fresh = tl.dot(read, solve, input_precision="ieee").to(kind)
            y = tl.dot(fresh, second, y, input_precision="ieee")
            h = tl.dot(fresh, until, h * whole, input_precision="ieee")
        else:
            put = tl.dot(read.to(kind), solve, input_precision="ieee")
            put = tl.dot(v, second, put, input_precision="ieee").to(kind)
            of_b = tl.trans(tl.load(work + 2 * CHUNK, mask=ok, other=0.0))
            of_k = tl.trans(tl.load(work + 3 * CHUNK, mask=ok, other=0.0))
            until_k = tl.load(wide + 3 * KS, mask=ok & k_ok, other=0.0)
            y = tl.dot(put, of_b, y, input_precision="ieee")
            y = tl.dot(v, of_k, y, input_precision="ieee")
            h = tl.dot(put, until, h * whole, input_precision="ieee")
            h = tl.dot(v, until_k, h, input_precision="ieee")
        tl.store(
            OUT + row[None, :] * o_t + head * o_h + vv[:, None],
            (y * scale).to(OUT.dtype.element_ty),
            mask=(at < count)[None, :] & v_ok,
        )
    tl.store(place, h.to(STATE.dtype.element_ty), mask=k_ok & v_ok)
