"""Mamba-1's prefill: sequences, or pieces of them side by side.

A piece's tokens take a state h to exp(A sum dt) h + e, where e is what the piece leaves of no state: so
one launch finds every piece's e and sum of dt, and a second starts each piece with what those before
it leave. The operator is associative (Blelloch, 1990; Gu and Dao, 2023, section 3.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.scan_kernels import _softplus, gated

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tokens(
    X, DT, B, C, start, at, end, d, n, d_ok, n_ok, group, x_t, dt_t, b_t, b_g, c_t, c_g,
    BLOCK_T: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Load the next tokens as they are, before the ones at hand are computed."""
    states = n[:, None]
    held = n_ok[:, None]
    if GROUPED:
        held = held & d_ok[None, :]
    rows = ()
    for i in tl.static_range(BLOCK_T):
        row = (start + at + i).to(tl.int64)
        live = at + i < end
        rows = rows + (  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no starred tuple
            tl.load(X + row * x_t + d, mask=d_ok & live, other=0.0),
            tl.load(DT + row * dt_t + d, mask=d_ok & live, other=0.0),
            tl.load(B + row * b_t + group * b_g + states, mask=held & live, other=0.0),
            tl.load(C + row * c_t + group * c_g + states, mask=held & live, other=0.0),
        )
    return rows


@triton.jit(do_not_specialize=["piece_tokens"])
def selective_kernel(
    X, DT, A, B, C, D, DT_BIAS, Z, OUT, STATE, LEFT, STEPS, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ,
    PIECE_START, x_t, dt_t, b_t, b_g, c_t, c_g, z_t, o_t, st_s, piece_tokens,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    GATED: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Some channels of a sequence, token by token. Grid: (sequences or pieces, channel blocks).

    `PART`: "whole"; or of `piece_tokens` tokens "left", which writes what a piece leaves to the next
    one's row of `LEFT` (pieces, N, channels), the first one's own row being the sequence's state, and
    its sum of dt times log2(e) to `STEPS` (pieces, channels); or "out", which starts from these.
    """
    piece = tl.program_id(0)
    seq = piece
    first = 0
    if PART != "whole":
        seq = tl.load(PIECE_SEQ + piece)
        first = tl.load(PIECE_START + piece)
    slot = tl.load(STATE_SLOTS + seq)
    if slot < 0:
        return
    start = tl.load(STARTS + seq)
    count = tl.load(STARTS + seq + 1) - start
    if count == 0:
        return
    end = count
    if PART != "whole":
        end = tl.minimum(first + piece_tokens, count)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    d_ok = d < CHANNELS
    n_ok = n < N
    ok = n_ok[:, None] & d_ok[None, :]
    a = tl.load(A + d[None, :] * N + n[:, None], mask=ok, other=0.0)
    state = STATE + slot * st_s + d[None, :] * N + n[:, None]
    row = piece.to(tl.int64)
    left = LEFT + n[:, None] * CHANNELS + d[None, :]
    if PART == "out":
        before = first // piece_tokens
        row -= before
        h = tl.load(left + (row + tl.minimum(before, 1)) * (N * CHANNELS), mask=ok, other=0.0)
        for at in range(1, before):
            taken = tl.load(STEPS + (row + at) * CHANNELS + d, mask=d_ok, other=0.0)
            e = tl.load(left + (row + at + 1) * (N * CHANNELS), mask=ok, other=0.0)
            h = tl.exp2(a * taken[None, :]) * h + e
    else:
        fresh = (tl.load(SEQ_LENS + seq) <= count) | (first > 0)
        h = tl.load(state, mask=ok & (fresh == 0), other=0.0).to(tl.float32)
    if PART == "left":
        if first == 0:
            tl.store(left + row * (N * CHANNELS), h, mask=ok)
        if end == count:
            return
    skip = tl.zeros([BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    steps = tl.zeros([BLOCK_D], tl.float32)
    if HAS_D:
        skip = tl.load(D + d, mask=d_ok, other=0.0)
    if HAS_BIAS:
        bias = tl.load(DT_BIAS + d, mask=d_ok, other=0.0)
    GROUPED: tl.constexpr = EACH < CHANNELS
    group = tl.zeros([1, 1], tl.int32)
    if GROUPED:
        group = (d // EACH)[None, :]
    rows = _tokens(
        X, DT, B, C, start, first, end, d, n, d_ok, n_ok, group, x_t, dt_t, b_t, b_g, c_t, c_g,
        BLOCK_T, GROUPED,
    )  # fmt: skip
    for at in range(first, end, BLOCK_T):
        here = rows
        rows = _tokens(
            X, DT, B, C, start, at + BLOCK_T, end, d, n, d_ok, n_ok, group, x_t, dt_t, b_t, b_g, c_t,
            c_g, BLOCK_T, GROUPED,
        )  # fmt: skip
        for i in tl.static_range(BLOCK_T):
            x = here[4 * i].to(tl.float32)
            dt = here[4 * i + 1].to(tl.float32) + bias
            if SOFTPLUS:
                dt = _softplus(dt)
            live = at + i < end
            dt = tl.where(live, dt, 0.0)  # beyond the end a token leaves the state as it is
            gain = dt * x
            dt = dt * LOG2_E
            h = tl.exp2(dt[None, :] * a) * h + gain[None, :] * here[4 * i + 2].to(tl.float32)
            if PART == "left":
                steps += dt
            else:
                y = tl.sum(h * here[4 * i + 3].to(tl.float32), 0) + skip * x
                if GATED:
                    y = gated(y, Z, (start + at + i).to(tl.int64) * z_t + d, d_ok & live)
                place = OUT + (start + at + i).to(tl.int64) * o_t + d
                tl.store(place, y.to(OUT.dtype.element_ty), mask=d_ok & live)
    if PART == "left":
        tl.store(left + (row + 1) * (N * CHANNELS), h, mask=ok)
        tl.store(STEPS + row * CHANNELS + d, steps, mask=d_ok)
    elif end == count:
        tl.store(state, h.to(STATE.dtype.element_ty), mask=ok)
