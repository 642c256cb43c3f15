"""Recurrences a token at a time: RWKV-6, linear attention with a normaliser, RG-LRU, and decodes of KDA
and RWKV-7.

A program keeps its part of a sequence's state in registers from the first token of the step to the
last.
"""

import triton
import triton.language as tl

from polyattn_triton.kernels.scan import _softplus, draft_place, sequence_of


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def elu_plus_one(x):
    return tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def channel_kernel(
    Q, K, V, G, BETA, A, B, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, TARGETS, scale,
    q_t, q_g, k_t, k_g, v_t, v_h, g_t, g_h, a_t, a_h, b_t, b_h, beta_t, o_t, o_h, st_s, st_h, targets_t,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, PHI: tl.constexpr, NORM: tl.constexpr,
    DRAFTS: tl.constexpr, BONUS: tl.constexpr,
):  # fmt: skip
    """KDA where `DELTA`, linear attention with a normaliser where it has a `PHI`, RWKV-6 where `BONUS`
    (A is its u), else RWKV-7.

    Grid: (sequences, heads, value blocks). `VS` counts a normaliser's column, which is one block with
    the values. `DRAFTS`: the state after each token goes to its own slot of TARGETS.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun = sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS)
    if count == 0:
        return
    group = head // EACH
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok = kk < KS
    v_ok = vv < VS
    given = v_ok
    if PHI is not None:
        given = vv < VS - 1
    inner = head * st_h + kk[:, None] * VS + vv[None, :]
    ok = k_ok[:, None] & v_ok[None, :]
    h = tl.load(STATE + slot * st_s + inner, mask=ok & begun, other=0.0).to(tl.float32)
    for t in range(count):
        row = (start + t).to(tl.int64)
        # All loads start before the first use: a layout change waits for its load.
        q = tl.load(Q + row * q_t + group * q_g + kk, mask=k_ok, other=0.0)
        k = tl.load(K + row * k_t + group * k_g + kk, mask=k_ok, other=0.0)
        v = tl.load(V + row * v_t + head * v_h + vv, mask=given, other=0.0)
        if PHI is None:
            g = tl.load(G + row * g_t + head * g_h + kk, mask=k_ok, other=0.0)
            if DELTA:
                beta = tl.load(BETA + row * beta_t + head)
            else:
                a = tl.load(A + row * a_t + head * a_h + kk, mask=k_ok, other=0.0)
                if not BONUS:
                    b = tl.load(B + row * b_t + head * b_h + kk, mask=k_ok, other=0.0)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        if PHI is not None:
            q = tl.where(k_ok, PHI(q), 0.0)
            k = tl.where(k_ok, PHI(k), 0.0)
            v = tl.where(vv == VS - 1, 1.0, v)
        else:
            decay = tl.exp(g.to(tl.float32))[:, None]
            if DELTA:
                if NORM:
                    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
                    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                h = h * decay
                v = beta.to(tl.float32) * (v - tl.sum(h * k[:, None], 0))
            elif BONUS:
                y = tl.sum(h * q[:, None], 0) + tl.sum(q * a.to(tl.float32) * k, 0) * v
                h = h * decay
            else:
                read = tl.sum(h * a.to(tl.float32)[:, None], 0)
                h = h * decay + b.to(tl.float32)[:, None] * read[None, :]
        h += k[:, None] * v[None, :]
        if not BONUS:
            y = tl.sum(h * q[:, None], 0)
        if PHI is not None:
            y = y / (tl.sum(tl.where(vv == VS - 1, y, 0.0), 0) + 1e-6)
        else:
            y = y * scale
        tl.store(OUT + row * o_t + head * o_h + vv, y.to(OUT.dtype.element_ty), mask=given)
        if DRAFTS:
            to = draft_place(TARGETS, targets_t, seq, t)
            tl.store(STATE + to * st_s + inner, h.to(STATE.dtype.element_ty), mask=ok & (to >= 0))
    if not DRAFTS:
        tl.store(STATE + slot * st_s + inner, h.to(STATE.dtype.element_ty), mask=ok)


@triton.jit
def unit_kernel(
    X, INPUT_GATE, RECURRENT_GATE, LAMBDA, OUT, STATE, STARTS, SEQ_LENS, STATE_SLOTS, TARGETS,
    x_t, i_t, r_t, o_t, st_s, targets_t,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """RG-LRU. Grid: (sequences, blocks of channels). `DRAFTS` as above."""
    seq = tl.program_id(0)
    slot, start, count, begun = sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS)
    if count == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < CHANNELS
    rate = -8.0 * _softplus(tl.load(LAMBDA + c, mask=ok, other=0.0))
    h = tl.load(STATE + slot * st_s + c, mask=ok & begun, other=0.0).to(tl.float32)
    for t in range(count):
        row = (start + t).to(tl.int64)
        x = tl.load(X + row * x_t + c, mask=ok, other=0.0).to(tl.float32)
        i = tl.load(INPUT_GATE + row * i_t + c, mask=ok, other=0.0).to(tl.float32)
        r = tl.load(RECURRENT_GATE + row * r_t + c, mask=ok, other=0.0).to(tl.float32)
        log_a = rate * tl.sigmoid(r)
        # 1 - exp(2 log a) loses its digits where a is near 1: there its series serves.
        twice = 2.0 * log_a
        series = -twice * (1.0 + twice * (0.5 + twice * (1.0 / 6.0 + twice / 24.0)))
        root = tl.sqrt(tl.where(twice > -0.05, series, 1.0 - tl.exp(twice)))
        first = (t == 0) & (begun == 0)
        h = tl.exp(log_a) * h + tl.where(first, 1.0, root) * tl.sigmoid(i) * x
        tl.store(OUT + row * o_t + c, h.to(OUT.dtype.element_ty), mask=ok)
        if DRAFTS:
            to = draft_place(TARGETS, targets_t, seq, t)
            tl.store(STATE + to * st_s + c, h.to(STATE.dtype.element_ty), mask=ok & (to >= 0))
    if not DRAFTS:
        tl.store(STATE + slot * st_s + c, h.to(STATE.dtype.element_ty), mask=ok)
