"""Recurrences a token at a time: decodes, and drafts whose states are all kept.

A program owns a part of a sequence's state, in registers from the step's first token to its last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import _softplus, draft_place, gated, sequence_of


@triton.jit
def conv_drafts_kernel(
    X, OUT, STATE, WEIGHT, BIAS, STARTS, SEQ_LENS, STATE_SLOTS, TARGETS,
    x_t, o_t, st_s, targets_t,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A few tokens of a sequence, whose states go to the slots of TARGETS. Grid: (sequences, blocks).

    The old state is in registers before anything is written: one of the slots may be its own.
    """
    seq = tl.program_id(0)
    slot = tl.load(STATE_SLOTS + seq)
    if slot < 0:
        return
    start = tl.load(STARTS + seq)
    count = tl.load(STARTS + seq + 1) - start
    begun = tl.load(SEQ_LENS + seq) > count
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.arange(0, BLOCK_W)
    c_ok = c < CHANNELS
    columns = c[:, None] * (WIDTH - 1) + w[None, :]
    mask = c_ok[:, None] & (w < WIDTH - 1)[None, :]
    old = tl.load(STATE + slot * st_s + columns, mask=mask & begun, other=0.0).to(tl.float32)
    tl.debug_barrier()
    x_row = X + start.to(tl.int64) * x_t + c
    for t in range(count):
        # The window of token t: its column w is token t - (WIDTH - 1) + w, the old state's before 0.
        window = tl.zeros([BLOCK_C, BLOCK_W], tl.float32)
        y = tl.zeros([BLOCK_C], tl.float32)  # summed in `conv_kernel`'s order
        if HAS_BIAS:
            y += tl.load(BIAS + c, mask=c_ok, other=0.0)
        for i in tl.static_range(WIDTH):
            at = t - (WIDTH - 1) + i
            new = tl.load(x_row + at * x_t, mask=c_ok & (at >= 0), other=0.0).to(tl.float32)
            held = tl.sum(tl.where((w == at + WIDTH - 1)[None, :] & (at < 0), old, 0.0), 1)
            window = tl.where((w == i)[None, :], (new + held)[:, None], window)
            y += (new + held) * tl.load(WEIGHT + c * WIDTH + i, mask=c_ok, other=0.0)
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(OUT + (start + t).to(tl.int64) * o_t + c, y.to(OUT.dtype.element_ty), mask=c_ok)
        to = draft_place(TARGETS, targets_t, seq, t)
        tl.store(
            STATE + to * st_s + columns - 1,
            window.to(STATE.dtype.element_ty),
            mask=c_ok[:, None] & (w > 0)[None, :] & (w < WIDTH)[None, :] & (to >= 0),
        )


@triton.jit
def mamba1_kernel(
    X, DT, A, B, C, D, DT_BIAS, Z, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, TARGETS,
    x_t, dt_t, b_t, b_g, c_t, c_g, z_t, o_t, st_s, targets_t,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, GATED: tl.constexpr,
    EACH: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """One sequence and some channels, token by token. Grid: (sequences, channel blocks).

    `EACH` neighbouring channels share B and C. `DRAFTS`: the state after each token goes to its own
    slot of TARGETS; which slot the sequence came from makes no difference, it was read before.
    """
    seq = tl.program_id(0)
    slot, start, count, begun = sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS)
    if count == 0:
        return
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    ok = (d < CHANNELS)[:, None] & (n < N)[None, :]
    a = tl.load(A + d[:, None] * N + n[None, :], mask=ok, other=0.0)
    inner = d[:, None] * N + n[None, :]
    h = tl.load(STATE + slot * st_s + inner, mask=ok & begun, other=0.0).to(tl.float32)
    group = (d // EACH)[:, None]
    skip = tl.zeros([BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if HAS_D:
        skip = tl.load(D + d, mask=d < CHANNELS, other=0.0)
    if HAS_BIAS:
        bias = tl.load(DT_BIAS + d, mask=d < CHANNELS, other=0.0)
    for t in range(count):
        row = (start + t).to(tl.int64)
        x = tl.load(X + row * x_t + d, mask=d < CHANNELS, other=0.0).to(tl.float32)
        dt = tl.load(DT + row * dt_t + d, mask=d < CHANNELS, other=0.0).to(tl.float32) + bias
        if SOFTPLUS:
            dt = _softplus(dt)
        if EACH < CHANNELS:
            b = tl.load(B + row * b_t + group * b_g + n[None, :], mask=ok, other=0.0)
            c = tl.load(C + row * c_t + group * c_g + n[None, :], mask=ok, other=0.0)
        else:
            b = tl.load(B + row * b_t + n, mask=n < N, other=0.0)[None, :]
            c = tl.load(C + row * c_t + n, mask=n < N, other=0.0)[None, :]
        h = tl.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b.to(tl.float32)
        y = tl.sum(h * c.to(tl.float32), 1) + skip * x
        if GATED:
            y = gated(y, Z, row * z_t + d, d < CHANNELS)
        tl.store(OUT + row * o_t + d, y.to(OUT.dtype.element_ty), mask=d < CHANNELS)
        if DRAFTS:
            to = draft_place(TARGETS, targets_t, seq, t)
            tl.store(STATE + to * st_s + inner, h.to(STATE.dtype.element_ty), mask=ok & (to >= 0))
    if not DRAFTS:
        tl.store(STATE + slot * st_s + inner, h.to(STATE.dtype.element_ty), mask=ok)


@triton.jit
def _token(
    h, row, head, kk, vv, k_ok, v_ok, Q, K, V, DT, G, BETA, A, D, DT_BIAS, Z, OUT, scale,
    q_t, q_g, k_t, k_g, v_t, v_h, dt_t, g_t, b_t, z_t, z_h, o_t, o_h,
    EACH: tl.constexpr, MAMBA: tl.constexpr, DELTA: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Take one token of Mamba-2, linear attention or the delta rule; returns the state after it."""
    group = head // EACH
    # All loads start before the first use: a layout change waits for its load.
    q = tl.load(Q + row * q_t + group * q_g + kk, mask=k_ok, other=0.0)
    k = tl.load(K + row * k_t + group * k_g + kk, mask=k_ok, other=0.0)
    x = tl.load(V + row * v_t + head * v_h + vv, mask=v_ok, other=0.0)
    if MAMBA:
        dt = tl.load(DT + row * dt_t + head)
    if DELTA:
        g = tl.load(G + row * g_t + head)
        beta = tl.load(BETA + row * b_t + head)
    else:
        g = tl.load(A + head)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    x = x.to(tl.float32)
    v = x
    if MAMBA:
        dt = dt.to(tl.float32)
        if HAS_BIAS:
            dt += tl.load(DT_BIAS + head)
        if SOFTPLUS:
            dt = _softplus(dt)
        g = dt * g
        v = x * dt
    h = h * tl.exp(g.to(tl.float32))
    if DELTA:
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        v = beta.to(tl.float32) * (v - tl.sum(h * k[:, None], 0))
    h += k[:, None] * v[None, :]
    y = tl.sum(h * q[:, None], 0) * scale
    if HAS_D:
        y += tl.load(D + head) * x
    if GATED:
        y = gated(y, Z, row * z_t + head * z_h + vv, v_ok)
    tl.store(OUT + row * o_t + head * o_h + vv, y.to(OUT.dtype.element_ty), mask=v_ok)
    return h


@triton.jit
def step_kernel(
    Q, K, V, DT, G, BETA, A, D, DT_BIAS, Z, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, TARGETS, scale,
    q_t, q_g, k_t, k_g, v_t, v_h, dt_t, g_t, b_t, z_t, z_h, o_t, o_h, st_s, st_h, targets_t, st_k, st_v,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, MAMBA: tl.constexpr, DELTA: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ANY: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """One token of Mamba-2, linear attention or the delta rule; the state is updated in place.

    Grid: (sequences, heads, value blocks). `ANY`: any number of tokens. `DRAFTS`: so too, and their
    states go to the slots of TARGETS.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(STATE_SLOTS + seq)
    if slot < 0:
        return
    count = 1
    row = seq.to(tl.int64)
    if ANY:
        row = tl.load(STARTS + seq).to(tl.int64)
        count = tl.load(STARTS + seq + 1) - row.to(tl.int32)
        if count == 0:
            return
    begun = tl.load(SEQ_LENS + seq) > count
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok = kk < KS
    v_ok = vv < VS
    ok = k_ok[:, None] & v_ok[None, :]
    inner = head * st_h + kk[:, None] * st_k + vv[None, :] * st_v
    h = tl.load(STATE + slot * st_s + inner, mask=ok & begun, other=0.0).to(tl.float32)
    if ANY:
        for t in range(count):
            h = _token(
                h, row + t, head, kk, vv, k_ok, v_ok, Q, K, V, DT, G, BETA, A, D, DT_BIAS, Z, OUT,
                scale, q_t, q_g, k_t, k_g, v_t, v_h, dt_t, g_t, b_t, z_t, z_h, o_t, o_h,
                EACH, MAMBA, DELTA, SOFTPLUS, HAS_D, HAS_BIAS, NORM, GATED,
            )  # fmt: skip
            if DRAFTS:
                to = draft_place(TARGETS, targets_t, seq, t)
                kept = ok & (to >= 0)
                tl.store(STATE + to * st_s + inner, h.to(STATE.dtype.element_ty), mask=kept)
    else:
        h = _token(
            h, row, head, kk, vv, k_ok, v_ok, Q, K, V, DT, G, BETA, A, D, DT_BIAS, Z, OUT,
            scale, q_t, q_g, k_t, k_g, v_t, v_h, dt_t, g_t, b_t, z_t, z_h, o_t, o_h,
            EACH, MAMBA, DELTA, SOFTPLUS, HAS_D, HAS_BIAS, NORM, GATED,
        )  # fmt: skip
    if not DRAFTS:
        tl.store(STATE + slot * st_s + inner, h.to(STATE.dtype.element_ty), mask=ok)
