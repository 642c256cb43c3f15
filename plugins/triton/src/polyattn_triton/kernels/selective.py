"""Mamba-1's prefill: sequences, or pieces of them side by side.

A piece's tokens take a state h to exp(A sum dt) h + e, where e is what the piece leaves of no state: so
one launch finds every piece's e and sum of dt, and a second starts each piece with what those before
it leave. The operator is associative (Blelloch, 1990; Gu and Dao, 2023, section 3.3).

An exponential for every token, channel and state bounds it, 16 a clock on a multiprocessor of
NVIDIA's: so every lane holds its channels' states in registers of their own (a tuple, one tensor a
state), and what is not a state's (loads, step sizes, addresses) is shared by as many as possible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import _softplus, gated, piece_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _over(channels, GROUPS: tl.constexpr):
    """Return channels' values for every group of states; of one group they are as they were."""
    return channels if GROUPS == 1 else channels[None, :]


@triton.jit
def _each(groups, GROUPS: tl.constexpr):
    """Return groups' values for every channel."""
    return groups if GROUPS == 1 else groups[:, None]


@triton.jit
def _words(P, group, PER: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr):
    """Load a token's B or C for every group of `PER` states: words of `PACK` elements."""
    words = ()
    for j in tl.static_range(PER // PACK):
        at = group * (PER // PACK) + j
        if PACK > 1:
            word = tl.load(P.to(tl.pointer_type(tl.int64)) + at)
        elif N % PER == 0:
            word = tl.load(P + at)
        else:
            word = tl.load(P + at, mask=at < N, other=0.0)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no starred tuple
    return words


@triton.jit
def _values(words, dtype: tl.constexpr, PACK: tl.constexpr):
    """Return the elements of words as float32."""
    values = ()
    for j in tl.static_range(len(words)):
        if PACK == 1:
            values = values + (words[j].to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            for half in tl.static_range(2):
                pair = (words[j] >> (32 * half)).to(tl.int32)
                if PACK == 2:
                    values = values + (pair.to(tl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
                elif dtype == tl.bfloat16:  # the upper half of a float32
                    values = values + (  # type: ignore[assignment]  # noqa: RUF005
                        (pair << 16).to(tl.float32, bitcast=True),
                        (pair & -65536).to(tl.float32, bitcast=True),
                    )
                else:
                    values = values + (  # type: ignore[assignment]  # noqa: RUF005
                        pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32),
                        (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32),
                    )
    return values


@triton.jit
def _tokens(
    X, DT, B, C, at, end, group, d_ok, x_t, dt_t, b_t, c_t,
    N: tl.constexpr, PER: tl.constexpr, PACK: tl.constexpr, BLOCK_T: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load the next tokens as they are, before the ones at hand are computed.

    Beyond the last token it is loaded again.
    """
    rows = ()
    for i in tl.static_range(BLOCK_T):
        row = tl.minimum(at + i, end - 1).to(tl.int64)
        rows = rows + (  # type: ignore[assignment]  # noqa: RUF005
            tl.load(X + row * x_t, mask=d_ok if MASKED else None),
            tl.load(DT + row * dt_t, mask=d_ok if MASKED else None),
            _words(B + row * b_t, group, PER, N, PACK),
            _words(C + row * c_t, group, PER, N, PACK),
        )
    return rows


@triton.jit(do_not_specialize=["piece_tokens"])
def selective_kernel(
    X, DT, A, B, C, D, DT_BIAS, Z, OUT, STATE, LEFT, STEPS, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ,
    PIECE_START, x_t, dt_t, b_t, b_g, c_t, c_g, z_t, o_t, st_s, piece_tokens,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, PACK: tl.constexpr, BLOCK_T: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, GATED: tl.constexpr, EACH: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Some channels of a sequence, token by token. Grid: (sequences or pieces, channel blocks).

    `EACH` neighbouring channels share B and C, and a program's are of one such group. A channel's states
    are in `GROUPS` lanes, `PER` in each. `PACK`: elements of B and C in a word of 8
    bytes, 1 where they aren't aligned to one. `PART`: "whole"; or of `piece_tokens` tokens "left",
    which writes what a piece leaves to the next one's row of `LEFT` (pieces, N, channels), the first
    one's own row being the sequence's state, and its sum of dt times log2(e) to `STEPS` (pieces,
    channels); or "out", which starts from these.
    """
    piece = tl.program_id(0)
    slot, start, count, begun, first, end = piece_of(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0:
        return
    blocks = tl.cdiv(EACH, BLOCK_D)
    of_bc = tl.program_id(1) // blocks
    d = of_bc * EACH + tl.program_id(1) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    group = 0 if GROUPS == 1 else tl.arange(0, GROUPS)
    d_ok = d < (of_bc + 1) * EACH
    n = 0 if GROUPS == 1 else group[:, None] * PER  # type: ignore[index]
    held_ok = _over(d_ok, GROUPS)
    state = STATE + slot * st_s + _over(d, GROUPS) * N + n
    rates = A + _over(d, GROUPS) * N + n
    row = piece.to(tl.int64)
    left = LEFT + n * CHANNELS + _over(d, GROUPS)
    before = first // piece_tokens if PART == "out" else 0
    from_state = begun & (first == 0)
    a = ()
    h = ()
    for j in tl.static_range(PER):
        ok = held_ok & (n + j < N)
        a = a + (tl.load(rates + j, mask=ok, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if PART == "out":
            at_first = left + j * CHANNELS + (row - before + tl.minimum(before, 1)) * (N * CHANNELS)
            s = tl.load(at_first, mask=ok, other=0.0)
        else:
            s = tl.load(state + j, mask=ok & from_state, other=0.0).to(tl.float32)
        if PART == "left":
            tl.store(left + j * CHANNELS + row * (N * CHANNELS), s, mask=ok & (first == 0))
        h = h + (s,)  # type: ignore[assignment]  # noqa: RUF005
    if PART == "out":
        for at in range(1, before):
            own = row - before + at
            taken = _over(tl.load(STEPS + own * CHANNELS + d, mask=d_ok, other=0.0), GROUPS)
            through = ()
            for j in tl.static_range(PER):
                ok = held_ok & (n + j < N)
                e = tl.load(left + j * CHANNELS + (own + 1) * (N * CHANNELS), mask=ok, other=0.0)
                through = through + (tl.exp2(a[j] * taken) * h[j] + e,)  # type: ignore[assignment]  # noqa: RUF005
            h = through
    if PART == "left" and end == count:
        return
    skip = _over(tl.zeros([BLOCK_D], tl.float32), GROUPS)
    bias = tl.zeros([BLOCK_D], tl.float32)
    steps = tl.zeros([BLOCK_D], tl.float32)
    if HAS_D:
        skip = tl.where(n == 0, _over(tl.load(D + d, mask=d_ok, other=0.0), GROUPS), 0.0)
    if HAS_BIAS:
        bias = tl.load(DT_BIAS + d, mask=d_ok, other=0.0)
    origin = start.to(tl.int64)
    X += origin * x_t + d
    DT += origin * dt_t + d
    B += origin * b_t + of_bc * b_g
    C += origin * c_t + of_bc * c_g
    OUT += d
    MASKED: tl.constexpr = EACH % BLOCK_D != 0
    rows = _tokens(
        X, DT, B, C, first, end, group, d_ok, x_t, dt_t, b_t, c_t, N, PER, PACK, BLOCK_T, MASKED
    )
    for at in range(first, end, BLOCK_T):
        here = rows
        rows = _tokens(
            X, DT, B, C, at + BLOCK_T, end, group, d_ok, x_t, dt_t, b_t, c_t, N, PER, PACK, BLOCK_T,
            MASKED,
        )  # fmt: skip
        for i in tl.static_range(BLOCK_T):
            x = here[4 * i].to(tl.float32)
            dt = here[4 * i + 1].to(tl.float32) + bias
            if SOFTPLUS:
                dt = _softplus(dt)
            live = at + i < end
            dt = tl.where(live, dt, 0.0)  # beyond the end a token leaves the state as it is
            gain = _over(dt * x, GROUPS)
            dt = dt * LOG2_E
            step = _over(dt, GROUPS)
            b = _values(here[4 * i + 2], B.dtype.element_ty, PACK)
            c = _values(here[4 * i + 3], C.dtype.element_ty, PACK)
            y = skip * _over(x, GROUPS)
            after = ()
            for j in tl.static_range(PER):
                s = tl.exp2(step * a[j]) * h[j] + gain * _each(b[j], GROUPS)
                y += s * _each(c[j], GROUPS)
                after = after + (s,)  # type: ignore[assignment]  # noqa: RUF005
            h = after
            if PART == "left":
                steps += dt
            else:
                out = y if GROUPS == 1 else tl.sum(y, 0)
                if GATED:
                    out = gated(out, Z, (origin + at + i) * z_t + d, d_ok & live)
                place = OUT + (origin + at + i) * o_t
                tl.store(place, out.to(OUT.dtype.element_ty), mask=d_ok & live)
    for j in tl.static_range(PER):
        ok = held_ok & (n + j < N)
        if PART == "left":
            tl.store(left + j * CHANNELS + (row + 1) * (N * CHANNELS), h[j], mask=ok)
        elif end == count:
            tl.store(state + j, h[j].to(STATE.dtype.element_ty), mask=ok)
    if PART == "left":
        tl.store(STEPS + row * CHANNELS + d, steps, mask=d_ok)
