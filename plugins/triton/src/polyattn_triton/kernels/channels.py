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

from polyattn_triton.kernels.scan import sequence_of, unit


@triton.jit
def _row(X, row, stride, ok, offsets):
    return tl.load(X + row * stride + offsets, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _unit_row(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def pair_kernel(
    Q, K, G, BETA, A, B, WORK, STARTS, STATE_SLOTS, TILE_SEQ, TILE_START,
    q_t, q_g, k_t, k_g, g_t, g_h, a_t, a_h, b_t, b_h, beta_t, w_t, w_h,
    EACH: tl.constexpr, KS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read of each other. Grid: (chunks, heads).

    WORK (tokens, heads, matrices, CHUNK): KDA's are (1 + L)^-1 diag(beta) and q k'; RWKV-7's are
    (1 - L)^-1 for L = a b', (1 - L)^-1 a k', r b' and r k'; each product with its decays, below the
    diagonal, the last ones on it, too. Keys in `kept` (keys' channels, tokens) decay as t goes on; a
    thread has a token's channels, so that sums over them stay within it.
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
    solved = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    if DELTA:
        beta = tl.load(BETA + (base + rows) * beta_t + head, mask=rows < left, other=0.0)
        beta = beta.to(tl.float32)
    else:
        kept_b = tl.zeros([BLOCK_K, CHUNK], tl.float32)
        solved_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    for t in range(CHUNK):
        row = base + t
        ok = (kk < KS) & (t < left)
        q = _row(Q, row, q_t, ok, group * q_g + kk)
        k = _row(K, row, k_t, ok, group * k_g + kk)
        decay = tl.exp(_row(G, row, g_t, ok, head * g_h + kk))[:, None]
        here = (rows == t)[:, None]
        put = (rows == t)[None, :]
        work = WORK + row * w_t + head * w_h + rows
        if DELTA:
            if NORM:
                q = _unit_row(q)
                k = _unit_row(k)
            kept = kept * decay
            low = tl.sum(kept * k[:, None], 0) * -tl.sum(tl.where(rows == t, beta, 0.0), 0)
            line = tl.where(rows == t, 1.0, 0.0) + tl.sum(low[:, None] * solved, 0)
            solved = tl.where(here, line[None, :], solved)
            kept = tl.where(put, k[:, None], kept)
            tl.store(work, (line * beta).to(WORK.dtype.element_ty), mask=t < left)
            pairs = tl.sum(kept * q[:, None], 0).to(WORK.dtype.element_ty)
            tl.store(work + CHUNK, pairs, mask=t < left)
        else:
            a = _row(A, row, a_t, ok, head * a_h + kk)
            b = _row(B, row, b_t, ok, head * b_h + kk)
            low = tl.sum(kept_b * a[:, None], 0)
            low_k = tl.sum(kept * a[:, None], 0)
            line = tl.where(rows == t, 1.0, 0.0) + tl.sum(low[:, None] * solved, 0)
            line_k = low_k + tl.sum(low[:, None] * solved_k, 0)
            solved = tl.where(here, line[None, :], solved)
            solved_k = tl.where(here, line_k[None, :], solved_k)
            kept = tl.where(put, k[:, None], kept * decay)
            kept_b = tl.where(put, b[:, None], kept_b * decay)
            tl.store(work, line.to(WORK.dtype.element_ty), mask=t < left)
            tl.store(work + CHUNK, line_k.to(WORK.dtype.element_ty), mask=t < left)
            pairs = tl.sum(kept_b * q[:, None], 0).to(WORK.dtype.element_ty)
            tl.store(work + 2 * CHUNK, pairs, mask=t < left)
            pairs = tl.sum(kept * q[:, None], 0).to(WORK.dtype.element_ty)
            tl.store(work + 3 * CHUNK, pairs, mask=t < left)


@triton.jit
def _tile(X, row, stride, ok, offsets):
    return tl.load(X + row[:, None] * stride + offsets[None, :], mask=ok, other=0.0)


@triton.jit
def chunk_kernel(
    Q, K, V, G, A, B, WORK, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, scale,
    q_t, q_g, k_t, k_g, v_t, v_h, g_t, g_h, a_t, a_h, b_t, b_h, w_t, w_h, o_t, o_h, st_s, st_h,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A sequence's chunks one after another. Grid: (sequences, heads, value blocks)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun = sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS)
    if count == 0:
        return
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.arange(0, CHUNK)
    k_ok = (kk < KS)[None, :]
    v_ok = (vv < VS)[None, :]
    state_ok = (kk < KS)[:, None] & v_ok
    place = STATE + slot * st_s + head * st_h + kk[:, None] * VS + vv[None, :]
    h = tl.load(place, mask=state_ok & begun, other=0.0).to(tl.float32)
    group = head // EACH
    for first in range(0, count, CHUNK):
        at = first + rows
        ok = (at < count)[:, None]
        row = (start + at).to(tl.int64)
        q = _tile(Q, row, q_t, ok & k_ok, group * q_g + kk)
        k = _tile(K, row, k_t, ok & k_ok, group * k_g + kk)
        v = _tile(V, row, v_t, ok & v_ok, head * v_h + vv)
        kind = v.dtype
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        if NORM:
            q = unit(q)
            k = unit(k)
        g = _tile(G, row, g_t, ok & k_ok, head * g_h + kk).to(tl.float32)
        within = (at + 1 < count) & (rows + 1 < CHUNK)
        after = _tile(G, row + 1, g_t, within[:, None] & k_ok, head * g_h + kk).to(tl.float32)
        since = tl.exp(tl.cumsum(g, 0))
        until = tl.exp(tl.cumsum(after, 0, reverse=True))
        whole = tl.exp(tl.sum(g, 0))
        work = WORK + row[:, None] * w_t + head * w_h + rows[None, :]
        solve = tl.load(work, mask=ok, other=0.0)
        second = tl.load(work + CHUNK, mask=ok, other=0.0)
        held = h.to(kind)
        y = tl.dot((q * since).to(kind), held, input_precision="ieee")
        if DELTA:
            read = tl.dot((k * since).to(kind), held, input_precision="ieee")
            fresh = tl.dot(solve, (v.to(tl.float32) - read).to(kind), input_precision="ieee")
            fresh = fresh.to(kind)
            y = tl.dot(second, fresh, y, input_precision="ieee")
            h = h * whole[:, None]
        else:
            a = _tile(A, row, a_t, ok & k_ok, head * a_h + kk).to(tl.float32)
            b = _tile(B, row, b_t, ok & k_ok, head * b_h + kk).to(tl.float32)
            before = _tile(G, row - 1, g_t, ok & k_ok & (rows > 0)[:, None], head * g_h + kk)
            before = tl.exp(tl.cumsum(before.to(tl.float32), 0))
            read = tl.dot((a * before).to(kind), held, input_precision="ieee").to(kind)
            put = tl.dot(solve, read, input_precision="ieee")
            put = tl.dot(second, v, put, input_precision="ieee").to(kind)
            y = tl.dot(
                tl.load(work + 2 * CHUNK, mask=ok, other=0.0), put, y, input_precision="ieee"
            )
            y = tl.dot(tl.load(work + 3 * CHUNK, mask=ok, other=0.0), v, y, input_precision="ieee")
            h = tl.dot(
                tl.trans((b * until).to(kind)), put, h * whole[:, None], input_precision="ieee"
            )
            fresh = v
        h = tl.dot(tl.trans((k * until).to(kind)), fresh, h, input_precision="ieee")
        tl.store(
            OUT + row[:, None] * o_t + head * o_h + vv[None, :],
            (y * scale).to(OUT.dtype.element_ty),
            mask=ok & v_ok,
        )
    tl.store(place, h.to(STATE.dtype.element_ty), mask=state_ok)
