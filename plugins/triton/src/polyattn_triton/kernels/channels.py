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

from polyattn_triton.kernels.delta import solved
from polyattn_triton.kernels.scan import LEAST, chunk_of, leave, left_place, piece_of, state_of
from polyattn_triton.kernels.tiles import load_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _decays(marks, g, kind: tl.constexpr):
    """Return each token's decay over the tokens that its row of `marks` has.

    Sums of log decays as a product: none is the difference of two sums. Of float32 a layer of 16 bits
    takes two halves of 11 bits each.
    """
    if kind == tl.float32:
        total = tl.dot(marks.to(tl.float32), g.to(tl.float32), input_precision="ieee")
    elif g.dtype == tl.float32:
        marks = marks.to(tl.float16)
        most = g.to(tl.float16)
        total = tl.dot(marks, (g - most.to(tl.float32)).to(tl.float16))
        total = tl.dot(marks, most, total)
    else:
        total = tl.dot(marks.to(g.dtype), g)
    return tl.exp2(total * LOG2_E)


@triton.jit
def _rows(ROWS, columns, held, narrow: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Rows of norm 1 to 2 (normed: 1), and the factors that restore their norms or give them new ones."""
    x = load_tile(ROWS, columns, held, SIZE).to(tl.float32)
    squares = tl.sum(x * x, 1)
    if NORM:
        unit = tl.rsqrt(squares + 1e-6)
        size = tl.zeros_like(unit) + 1.0
    else:
        bits = tl.sqrt(squares).to(tl.int32, bitcast=True) & 0x7F800000
        size = bits.to(tl.float32, bitcast=True)  # a power of two rounds nothing
        unit = tl.where(squares > 0.0, 1.0 / size, 0.0)
    return (x * unit[:, None]).to(narrow), size


@triton.jit
def _times(x, y):
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def _store(PLACE, x, size, factor, ok, NORM: tl.constexpr):
    x = x.to(tl.float32) * factor
    if not NORM:
        x *= size[:, None]
    tl.store(PLACE, x.to(PLACE.dtype.element_ty), mask=ok)


@triton.jit
def pair_kernel(
    Q, K, G, BETA, A, B, WORK, WHOLE, STARTS, STATE_SLOTS, TILE_SEQ, TILE_START,
    q_t, q_g, k_t, k_g, g_t, g_h, a_t, a_h, b_t, b_h, beta_t, w_t, w_h,
    EACH: tl.constexpr, KS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr, NORM: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read of each other, and all that decays. Grid: (chunks, heads).

    WORK (tokens, heads, row): small matrices, then rows of keys' channels. KDA's are (1 + L)^-1
    diag(beta) and q k', then q and k as of the chunk's begin and k as of its end; RWKV-7's (1 - L)^-1
    for L = a b', (1 - L)^-1 a k', r b' and r k', then r and a as of the begin, b and k as of the end.
    Each product has its decays, below the diagonal, the last ones on it, too. WHOLE: `whole_place`.

    A level of `LEVELS` has blocks of two halves of 2^level tokens. A token of the upper half reads one
    of the lower with what decays up to the border between them and from it on: a product of matrices.
    """
    seq, begin, left = chunk_of(TILE_SEQ, TILE_START, STARTS, STATE_SLOTS)
    if left == 0:
        return
    head = tl.program_id(1)
    group = head // EACH
    rows = tl.arange(0, CHUNK)
    there = rows < left
    row = begin.to(tl.int64) + rows
    kind: tl.constexpr = WORK.dtype.element_ty
    narrow: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    kk = tl.arange(0, BLOCK_K)
    g = load_tile(G + row * g_t + head * g_h, kk, there, KS)
    g = tl.where(g < LEAST, LEAST, g).to(G.dtype.element_ty)
    q, size_q = _rows(Q + row * q_t + group * q_g, kk, there, narrow, KS, NORM)
    k, size_k = _rows(K + row * k_t + group * k_g, kk, there, narrow, KS, NORM)
    i = rows[:, None]
    j = rows[None, :]
    apart = i ^ j
    low = tl.zeros([CHUNK, CHUNK], tl.float32)
    pairs = tl.where(apart == 0, _times(q, k), 0.0)
    if not DELTA:
        a, size_a = _rows(A + row * a_t + head * a_h, kk, there, narrow, KS, False)
        b, size_b = _rows(B + row * b_t + head * b_h, kk, there, narrow, KS, False)
        low_k = tl.zeros([CHUNK, CHUNK], tl.float32)
        pairs_b = tl.where(apart == 0, _times(q, b), 0.0)
    for level in range(LEVELS):
        near = (apart >> level) == 0  # in one half of a block of two
        upper = ((i >> level) & 1) == 1
        across = ((apart >> level) == 1) & (i > j)
        decay = _decays(near & ((i >= j) == upper), g, kind).to(narrow)
        columns = k * decay
        pairs += tl.where(across, _times(q * decay, columns), 0.0)
        if DELTA:
            low += tl.where(across, _times(columns, columns), 0.0)
        else:
            before = _decays(near & ((i > j) == upper), g, kind).to(narrow)
            reads = a * before
            low_k += tl.where(across, _times(reads, columns), 0.0)
            columns = b * decay
            low += tl.where(across, _times(reads, columns), 0.0)
            pairs_b += tl.where(across, _times(q * decay, columns), 0.0)
    WORK += head * w_h
    WIDE: tl.constexpr = (2 if DELTA else 4) * CHUNK
    ok = there[:, None]
    wide = WORK + row[:, None] * w_t + WIDE + kk[None, :]
    wide_ok = ok & (kk < KS)[None, :]
    since = _decays(i >= j, g, kind)
    _store(wide, q, size_q, since, wide_ok, NORM)
    if DELTA:
        _store(wide + KS, k, size_k, since, wide_ok, NORM)
    place = WHOLE + whole_place(seq, begin, head, tl.num_programs(1), KS, CHUNK)
    last = (i == CHUNK - 1) & (kk < KS)[None, :]
    tl.store(place + kk[None, :] + tl.zeros_like(i), since, mask=last)
    until = _decays(i < j, g, kind)
    if not DELTA:
        _store(wide + KS, a, size_a, _decays(i > j, g, kind), wide_ok, NORM)
        _store(wide + 2 * KS, b, size_b, until, wide_ok, NORM)
    _store(wide + (2 if DELTA else 3) * KS, k, size_k, until, wide_ok, NORM)
    work = WORK + row[:, None] * w_t + j
    if not NORM:
        pairs *= size_q[:, None] * size_k[None, :]
    if DELTA:
        beta = tl.load(BETA + row * beta_t + head, mask=there, other=0.0).to(tl.float32)
        if not NORM:
            low *= size_k[:, None] * size_k[None, :]
        low *= beta[:, None]
        tl.store(work, (solved(low, rows, CHUNK, narrow) * beta[None, :]).to(kind), mask=ok)
        tl.store(work + CHUNK, pairs.to(kind), mask=ok)
    else:
        low *= -size_a[:, None] * size_b[None, :]
        low_k *= size_a[:, None] * size_k[None, :]
        solve = solved(low, rows, CHUNK, narrow)
        put = tl.dot(solve.to(narrow), low_k.to(narrow), input_precision="ieee")
        pairs_b *= size_q[:, None] * size_b[None, :]
        tl.store(work, solve.to(kind), mask=ok)
        tl.store(work + CHUNK, put.to(kind), mask=ok)
        tl.store(work + 2 * CHUNK, pairs_b.to(kind), mask=ok)
        tl.store(work + 3 * CHUNK, pairs.to(kind), mask=ok)


@triton.jit
def whole_place(seq, begin, head, heads, KS: tl.constexpr, CHUNK: tl.constexpr):
    """The place in WHOLE of the total decay of a chunk from token `begin` on; each chunk has its own."""
    return ((seq + begin // CHUNK).to(tl.int64) * heads + head) * KS


@triton.jit(do_not_specialize=["piece_tokens"])
def chunk_kernel(
    V, WORK, WHOLE, OUT, STATE, LEFT, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, scale,
    v_t, v_h, w_t, w_h, o_t, o_h, st_s, st_h, piece_tokens,
    KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, DELTA: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A sequence's or piece's chunks one after another, as `delta_kernel`. Grid: the same."""
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
    k_ok = (kk < KS)[None, :]
    LEFT += left_place(piece, head, KS, VS, BLOCK_K, BLOCK_V)
    STATE += slot * st_s + head * st_h
    kind: tl.constexpr = V.dtype.element_ty
    place, there, h = state_of(
        STATE, LEFT, kk, vv, begin, begun, piece_tokens, KS, VS, BLOCK_K, BLOCK_V, PART, kind
    )
    seq = piece if PART == "whole" else tl.load(PIECE_SEQ + piece)
    WORK += head * w_h
    WIDE: tl.constexpr = (2 if DELTA else 4) * CHUNK
    for first in range(begin, stop, CHUNK):
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
        if PART != "left":  # whose outputs nobody computes
            tl.store(
                OUT + row[None, :] * o_t + head * o_h + vv[:, None],
                (y * scale).to(OUT.dtype.element_ty),
                mask=(at < count)[None, :] & (vv < VS)[:, None],
            )
    if PART == "left":
        leave(LEFT, h, kk, vv, VS, BLOCK_K, BLOCK_V, kind)
    elif stop == count:
        tl.store(place, h.to(STATE.dtype.element_ty), mask=there)
