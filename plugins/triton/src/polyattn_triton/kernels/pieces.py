"""Prompts of RG-LRU and of linear attention with a normaliser, in pieces side by side.

Few long sequences are cut: a first launch ("left") finds what every piece leaves of no state, a second
("out") starts each piece with what those before it leave, as `kernels.selective` does it. Others run
"whole", in one launch.
"""

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import _softplus, piece_of

LOG2_E = tl.constexpr(1.4426950408889634)
AT_ONCE = tl.constexpr(8)
"""Pieces before a piece that are loaded at once."""


@triton.jit
def _sigmoid(x):
    """As a square: an inverse root takes two instructions, a division seven."""
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * x))
    return root * root


@triton.jit
def _rows(X, I, R, at, stop, x_t, i_t, r_t, ok, AHEAD: tl.constexpr):
    """Load the next tokens, before the ones at hand are computed; beyond the last one that one again."""
    rows = ()
    for j in tl.static_range(AHEAD):
        row = tl.minimum(at + j, stop - 1).to(tl.int64)
        rows = rows + (  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no starred tuple
            tl.load(X + row * x_t, mask=ok),
            tl.load(I + row * i_t, mask=ok),
            tl.load(R + row * r_t, mask=ok),
        )
    return rows


@triton.jit(do_not_specialize=["piece_tokens"])
def unit_pieces_kernel(
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
    AHEAD: tl.constexpr,
    PART: tl.constexpr,
):
    """RG-LRU, a channel's tokens one after another in one lane. Grid: (sequences or pieces, blocks).

    LEFT (pieces, 2, channels): the sum of a piece's log decays, and the state that it leaves. `AHEAD`:
    tokens that are loaded before their turn.
    """
    piece = tl.program_id(0)
    slot, start, count, begun, first, stop = piece_of(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # the last one's rest is unused
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < CHANNELS
    own = LEFT + piece.to(tl.int64) * (2 * CHANNELS) + c
    h = tl.load(STATE + slot * st_s + c, mask=ok & begun & (first == 0), other=0.0).to(tl.float32)
    if PART == "out":
        for back in range(first // piece_tokens, 0, -AT_ONCE):
            logs = ()
            left = ()
            for j in tl.static_range(AT_ONCE):
                there = ok & (back > j)
                before = own - (back - j) * (2 * CHANNELS)
                logs = logs + (tl.load(before, mask=there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
                left = left + (tl.load(before + CHANNELS, mask=there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
            for j in tl.static_range(AT_ONCE):
                h = tl.exp2(logs[j]) * h + left[j]
    rate = -8.0 * LOG2_E * _softplus(tl.load(LAMBDA + c, mask=ok, other=0.0))
    logs_sum = tl.zeros([BLOCK], tl.float32)
    origin = start.to(tl.int64)
    X += origin * x_t + c
    INPUT_GATE += origin * i_t + c
    RECURRENT_GATE += origin * r_t + c
    OUT += origin * o_t + c
    rows = _rows(X, INPUT_GATE, RECURRENT_GATE, first, stop, x_t, i_t, r_t, ok, AHEAD)
    for at in range(first, stop, AHEAD):
        here = rows
        rows = _rows(X, INPUT_GATE, RECURRENT_GATE, at + AHEAD, stop, x_t, i_t, r_t, ok, AHEAD)
        for j in tl.static_range(AHEAD):
            t = at + j
            live = t < stop
            log_a = rate * _sigmoid(here[3 * j + 2].to(tl.float32))
            # 1 - exp(2 log a) loses its digits where a is near 1: there its series serves.
            twice = (2.0 / LOG2_E) * log_a
            series = -twice * (1.0 + twice * (0.5 + twice * (1.0 / 6.0 + twice / 24.0)))
            a = tl.exp2(log_a)
            root = tl.sqrt(tl.where(twice > -0.05, series, 1.0 - a * a))
            root = tl.where((t == 0) & (begun == 0), 1.0, root)
            fresh = root * _sigmoid(here[3 * j + 1].to(tl.float32)) * here[3 * j].to(tl.float32)
            h = tl.where(live, a * h + fresh, h)
            if PART == "left":
                logs_sum += tl.where(live, log_a, 0.0)
            else:
                place = OUT + t.to(tl.int64) * o_t
                tl.store(place, h.to(OUT.dtype.element_ty), mask=ok & live)
    if PART == "left":
        tl.store(own, logs_sum, mask=ok)
        tl.store(own + CHANNELS, h, mask=ok)
    elif stop == count:
        tl.store(STATE + slot * st_s + c, h.to(STATE.dtype.element_ty), mask=ok)


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
    slot, start, count, begun, first, stop = piece_of(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # the last one's rest is unused
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
