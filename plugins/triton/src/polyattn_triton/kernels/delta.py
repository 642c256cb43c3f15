"""The gated delta rule in chunks.

A chunk of the rule is a triangular system in what its tokens write (Yang et al., 2024). `system_kernel`
solves every chunk's by itself; `delta_kernel` walks a sequence's chunks with the state in registers.
"""

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import (
    chunk_decays,
    chunk_of,
    leave,
    left_place,
    piece_of,
    state_of,
)
from polyattn_triton.kernels.tiles import load_tile


@triton.jit
def solved(low, rows, CHUNK: tl.constexpr, kind: tl.constexpr):
    """Return (1 + low)^-1, float32: of blocks of the diagonal, then of each two neighbours as one.

    [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]], as stable as a row after another is; of
    single rows a and b are 1. `kind`: what the products are of.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    within = tl.where((rows // 16)[:, None] == (rows // 16)[None, :], low, 0.0)
    small = tl.sum(tl.reshape(within, [BLOCKS, 16, BLOCKS, 16]), 2)
    few = tl.arange(0, 16)
    apart = (few[:, None] ^ few[None, :])[None]
    done = tl.where(apart == 0, 1.0, tl.where(apart == 1, -small, 0.0))
    for level in tl.static_range(1, 4):
        done = _joined(small, done, apart, level, kind)
    blocks = tl.arange(0, BLOCKS)
    same = (blocks[:, None] == blocks[None, :])[:, None, :, None]
    whole = tl.reshape(tl.where(same, done[:, :, None, :], 0.0), [CHUNK, CHUNK])
    for level in tl.static_range(4, 7):
        if (1 << level) < CHUNK:
            whole = _joined(low, whole, rows[:, None] ^ rows[None, :], level, kind)
    return whole


@triton.jit
def _joined(low, done, apart, level: tl.constexpr, kind: tl.constexpr):
    across = tl.where((apart >= (1 << level)) & (apart < (2 << level)), low, 0.0)
    right = done.to(kind)
    across = tl.dot(across.to(kind), right, input_precision="ieee").to(kind)
    return done - tl.dot(right, across, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def system_kernel(
    Q, K, G, BETA, WORK, FACTORS, STARTS, STATE_SLOTS, TILE_SEQ, TILE_START,
    q_t, q_g, k_t, k_g, g_t, b_t, w_t, w_h, tokens,
    EACH: tl.constexpr, KS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read of each other. Grid: (chunks, heads).

    WORK (tokens, heads, 2 CHUNK): a row of (1 + L)^-1 diag(beta), and of q k' with its decays. FACTORS
    (heads, 4, tokens): what a query's and a key's row is multiplied by as of the chunk's begin, a key's
    as of its end, and what the whole chunk decays.
    """
    _, begin, left = chunk_of(TILE_SEQ, TILE_START, STARTS, STATE_SLOTS)
    if left == 0:
        return
    head = tl.program_id(1)
    group = head // EACH
    kk = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, CHUNK)
    ok = rows < left
    row = begin.to(tl.int64) + rows
    kind: tl.constexpr = WORK.dtype.element_ty
    # As many digits as tf32 has; entries are 1 at most where keys have unit norm.
    narrow: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    q = load_tile(Q + row * q_t + group * q_g, kk, ok, KS)
    k = load_tile(K + row * k_t + group * k_g, kk, ok, KS)
    g = tl.load(G + row * g_t + head, mask=ok, other=0.0).to(tl.float32)
    beta = tl.load(BETA + row * b_t + head, mask=ok, other=0.0).to(tl.float32)
    unit_q = tl.full([CHUNK], 1.0, tl.float32)
    unit_k = tl.full([CHUNK], 1.0, tl.float32)
    if NORM:
        unit_q = _unit(q)
        unit_k = _unit(k)
    past = rows[:, None] >= rows[None, :]
    since, decay, until, whole = chunk_decays(g, past, rows, 0, left, CHUNK, kind == tl.float32)
    decay *= unit_k[None, :]
    pairs = tl.dot(q, tl.trans(k), input_precision="ieee") * decay * unit_q[:, None]
    low = tl.dot(k, tl.trans(k), input_precision="ieee") * decay * (beta * unit_k)[:, None]
    low = tl.where(rows[:, None] > rows[None, :], low, 0.0)
    work = WORK + row[:, None] * w_t + head * w_h + rows[None, :]
    tl.store(work + CHUNK, pairs.to(kind), mask=ok[:, None])
    tl.store(work, (solved(low, rows, CHUNK, narrow) * beta[None, :]).to(kind), mask=ok[:, None])
    factors = FACTORS + head.to(tl.int64) * (4 * tokens) + row
    tl.store(factors, unit_q * since, mask=ok)
    tl.store(factors + tokens, unit_k * since, mask=ok)
    tl.store(factors + 2 * tokens, unit_k * until, mask=ok)
    tl.store(factors + 3 * tokens, tl.zeros([CHUNK], tl.float32) + whole, mask=ok)


@triton.jit
def _unit(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit(do_not_specialize=["tokens", "piece_tokens"])
def delta_kernel(
    Q, K, V, WORK, FACTORS, OUT, STATE, LEFT, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START,
    scale, q_t, q_g, k_t, k_g, v_t, v_h, w_t, w_h, o_t, o_h, st_s, st_h, tokens, piece_tokens,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A sequence's or piece's chunks one after another. Grid: (sequences or pieces, heads, blocks).

    Blocks are of values; of "left" then of keys, too. The state is (values, keys), so that a product's
    result is the next one's left side in place.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun, begin, stop = piece_of(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # the last one's rest is unused
        return
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if PART == "left" and begin == 0 and tl.program_id(2) * BLOCK_V >= VS:
        return  # nothing comes before the first one
    rows = tl.arange(0, CHUNK)
    LEFT += left_place(piece, head, KS, VS, BLOCK_K, BLOCK_V)
    STATE += slot * st_s + head * st_h
    kind: tl.constexpr = V.dtype.element_ty
    place, there, h = state_of(
        STATE, LEFT, kk, vv, begin, begun, piece_tokens, KS, VS, BLOCK_K, BLOCK_V, PART, kind
    )
    group = head // EACH
    WORK += head * w_h
    FACTORS += head.to(tl.int64) * (4 * tokens)
    for first in range(begin, stop, CHUNK):
        at = first + rows
        ok = at < count
        row = (start + at).to(tl.int64)
        k = load_tile(K + row * k_t + group * k_g, kk, ok, KS)
        v = tl.trans(load_tile(V + row * v_t + head * v_h, vv, ok, VS))
        work = WORK + row[:, None] * w_t + rows[None, :]
        solve = tl.load(work, mask=ok[:, None], other=0.0)
        since = tl.load(FACTORS + tokens + row, mask=ok, other=0.0)
        until = tl.load(FACTORS + 2 * tokens + row, mask=ok, other=0.0)
        whole = tl.load(FACTORS + 3 * tokens + start + first)
        held = h.to(kind)
        read = tl.dot(held, tl.trans(k), input_precision="ieee") * since[None, :]
        read = (v.to(tl.float32) - read).to(kind)
        fresh = tl.dot(read, tl.trans(solve), input_precision="ieee")
        if PART != "left":
            q = load_tile(Q + row * q_t + group * q_g, kk, ok, KS)
            pairs = tl.load(work + CHUNK, mask=ok[:, None], other=0.0)
            since_q = tl.load(FACTORS + row, mask=ok, other=0.0)
            y = tl.dot(held, tl.trans(q), input_precision="ieee") * since_q[None, :]
            y = tl.dot(fresh.to(kind), tl.trans(pairs), y, input_precision="ieee")
            tl.store(
                OUT + row[None, :] * o_t + head * o_h + vv[:, None],
                (y * scale).to(OUT.dtype.element_ty),
                mask=(at < count)[None, :] & (vv < VS)[:, None],
            )
        h = tl.dot((fresh * until[None, :]).to(kind), k, h * whole, input_precision="ieee")
    if PART == "left":
        leave(LEFT, h, kk, vv, VS, BLOCK_K, BLOCK_V, kind)
    elif stop == count:
        tl.store(place, h.to(STATE.dtype.element_ty), mask=there)
