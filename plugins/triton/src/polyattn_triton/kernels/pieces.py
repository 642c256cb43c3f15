"""Prompts of RG-LRU and of linear attention with a normaliser: tiles of tokens at once, in pieces.

Few long sequences are cut: a first launch ("left") finds what every piece leaves of no state, a second
("out") starts each piece with what those before it leave, as `kernels.selective` does it. Others run
"whole", in one launch.
"""

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import _softplus


@triton.jit
def _piece(
    piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART: tl.constexpr
):
    """A piece's slot, its sequence's first token and number of tokens (0: nothing to do), whether the
    state began, and the piece's own first token and end in the sequence.
    """
    seq = piece
    first = 0
    if PART != "whole":
        seq = tl.load(PIECE_SEQ + piece)
        first = tl.load(PIECE_START + piece)
    slot = tl.load(STATE_SLOTS + seq)
    start = tl.load(STARTS + seq)
    count = tl.where(slot < 0, 0, tl.load(STARTS + seq + 1) - start)
    end = count
    if PART != "whole":
        end = tl.minimum(first + piece_tokens, count)
    return slot, start, count, tl.load(SEQ_LENS + seq) > count, first, end


@triton.jit
def _after(a, b, next_a, next_b):
    return a * next_a, b * next_a + next_b


@triton.jit(do_not_specialize=["piece_tokens"])
def unit_tiles_kernel(
    X,
    INPUT_GATE,
    RECURRENT_GATE,
    LAMBDA,
    OUT,
    STATE,
    LEFT,
    STARTS,
    SEQ_LENS,
    STATE_SLOTS,
    PIECE_SEQ,
    PIECE_START,
    x_t,
    i_t,
    r_t,
    o_t,
    st_s,
    piece_tokens,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
):
    """RG-LRU. Grid: (sequences or pieces, blocks of channels).

    LEFT (pieces, 2, channels): the product of a piece's decays, and the state that it leaves.
    """
    piece = tl.program_id(0)
    slot, start, count, begun, first, stop = _piece(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # nobody asks what the last one leaves
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c_ok = c < CHANNELS
    rate = -8.0 * _softplus(tl.load(LAMBDA + c, mask=c_ok, other=0.0))
    own = LEFT + piece.to(tl.int64) * (2 * CHANNELS) + c
    h = tl.load(STATE + slot * st_s + c, mask=c_ok & begun & (first == 0), other=0.0).to(tl.float32)
    through = tl.full([BLOCK], 1.0, tl.float32)
    if PART == "out":
        for back in range(first // piece_tokens, 0, -1):
            before = own - back * (2 * CHANNELS)
            decay = tl.load(before, mask=c_ok, other=0.0)
            h = decay * h + tl.load(before + CHANNELS, mask=c_ok, other=0.0)
    rows = tl.arange(0, TOKENS)
    origin = start.to(tl.int64)
    ok = (first + rows < stop)[:, None] & c_ok[None, :]
    row = origin + first + rows[:, None]
    x = tl.load(X + row * x_t + c[None, :], mask=ok, other=0.0)
    i = tl.load(INPUT_GATE + row * i_t + c[None, :], mask=ok, other=0.0)
    r = tl.load(RECURRENT_GATE + row * r_t + c[None, :], mask=ok, other=0.0)
    for at in range(first, stop, TOKENS):
        here, here_ok = row, ok
        here_x, here_i, here_r = x.to(tl.float32), i.to(tl.float32), r.to(tl.float32)
        ok = (at + TOKENS + rows < stop)[:, None] & c_ok[
            None, :
        ]  # the next tile, ahead of its turn
        row += TOKENS
        x = tl.load(X + row * x_t + c[None, :], mask=ok, other=0.0)
        i = tl.load(INPUT_GATE + row * i_t + c[None, :], mask=ok, other=0.0)
        r = tl.load(RECURRENT_GATE + row * r_t + c[None, :], mask=ok, other=0.0)
        log_a = rate[None, :] * tl.sigmoid(here_r)
        # 1 - exp(2 log a) loses its digits where a is near 1: there its series serves.
        twice = 2.0 * log_a
        series = -twice * (1.0 + twice * (0.5 + twice * (1.0 / 6.0 + twice / 24.0)))
        a = tl.exp(log_a)
        root = tl.sqrt(tl.where(twice > -0.05, series, 1.0 - a * a))
        fresh = (at + rows == 0)[:, None] & (begun == 0)
        b = tl.where(fresh, 1.0, root) * tl.sigmoid(here_i) * here_x
        a = tl.where(here_ok, a, 1.0)  # beyond the end a token leaves the state as it is
        b = tl.where(here_ok, b, 0.0)
        a, b = tl.associative_scan((a, b), 0, _after)
        y = a * h[None, :] + b
        last = (rows == TOKENS - 1)[:, None]
        h = tl.sum(tl.where(last, y, 0.0), 0)
        if PART == "left":
            through *= tl.sum(tl.where(last, a, 0.0), 0)
        else:
            tl.store(OUT + here * o_t + c[None, :], y.to(OUT.dtype.element_ty), mask=here_ok)
    if PART == "left":
        tl.store(own, through, mask=c_ok)
        tl.store(own + CHANNELS, h, mask=c_ok)
    elif stop == count:
        tl.store(STATE + slot * st_s + c, h.to(STATE.dtype.element_ty), mask=c_ok)


@triton.jit
def _features(X, row, stride, ok, offsets, PHI: tl.constexpr, kind: tl.constexpr):
    x = tl.load(X + row[:, None] * stride + offsets[None, :], mask=ok, other=0.0).to(tl.float32)
    return tl.where(ok, PHI(x), 0.0).to(kind)


@triton.jit(do_not_specialize=["piece_tokens"])
def phi_kernel(
    Q, K, V, OUT, STATE, LEFT, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START,
    q_t, q_g, k_t, k_g, v_t, v_h, o_t, o_h, st_s, st_h, piece_tokens,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PHI: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Linear attention with a normaliser. Grid: (sequences or pieces, heads).

    `VS` counts the normaliser's column, the last one. LEFT (pieces, heads, KS, VS): what a piece adds to
    the state. Nothing decays, so float16 might not hold a state: its products are of float32.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun, first, stop = _piece(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # nobody asks what the last one leaves
        return
    kind: tl.constexpr = tl.bfloat16 if V.dtype.element_ty == tl.bfloat16 else tl.float32
    precision: tl.constexpr = "tf32" if V.dtype.element_ty == tl.float16 else "ieee"
    kk = tl.arange(0, BLOCK_K)
    vv = tl.arange(0, BLOCK_V)
    k_ok = kk < KS
    v_ok = vv < VS - 1
    held = k_ok[:, None] & v_ok[None, :]
    inner = kk[:, None] * VS + vv[None, :]
    column = kk * VS + VS - 1
    from_state = begun & (first == 0)
    state = STATE + slot * st_s + head * st_h
    size: tl.constexpr = KS * VS
    own = LEFT + (piece.to(tl.int64) * tl.num_programs(1) + head) * size
    h = tl.load(state + inner, mask=held & from_state, other=0.0).to(tl.float32)
    z = tl.load(state + column, mask=k_ok & from_state, other=0.0).to(tl.float32)
    if PART == "out":
        for back in range(first // piece_tokens, 0, -1):
            before = LEFT + ((piece - back).to(tl.int64) * tl.num_programs(1) + head) * size
            h += tl.load(before + inner, mask=held, other=0.0)
            z += tl.load(before + column, mask=k_ok, other=0.0)
    group = head // EACH
    rows = tl.arange(0, CHUNK)
    past = rows[:, None] >= rows[None, :]
    for at in range(first, stop, CHUNK):
        ok = (at + rows < stop)[:, None]
        row = (start + at + rows).to(tl.int64)
        k = _features(K, row, k_t, ok & k_ok[None, :], group * k_g + kk, PHI, kind)
        place = V + row[:, None] * v_t + head * v_h + vv[None, :]
        v = tl.load(place, mask=ok & v_ok[None, :], other=0.0).to(kind)
        if PART != "left":
            q = _features(Q, row, q_t, ok & k_ok[None, :], group * q_g + kk, PHI, kind)
            s = tl.where(past, tl.dot(q, tl.trans(k), input_precision=precision), 0.0)
            y = tl.dot(q, h.to(kind), input_precision=precision)
            y = tl.dot(s.to(kind), v, y, input_precision=precision)
            norm = tl.sum(s, 1) + tl.sum(q.to(tl.float32) * z[None, :], 1)
            y = y / (norm + 1e-6)[:, None]
            place = OUT + row[:, None] * o_t + head * o_h + vv[None, :]
            tl.store(place, y.to(OUT.dtype.element_ty), mask=ok & v_ok[None, :])
        h = tl.dot(tl.trans(k), v, h, input_precision=precision)
        z += tl.sum(k.to(tl.float32), 0)
    if PART == "left":
        tl.store(own + inner, h, mask=held)
        tl.store(own + column, z, mask=k_ok)
    elif stop == count:
        tl.store(state + inner, h.to(STATE.dtype.element_ty), mask=held)
        tl.store(state + column, z.to(STATE.dtype.element_ty), mask=k_ok)
