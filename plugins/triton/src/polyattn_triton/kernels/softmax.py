"""What the attention kernels share: from scores to logits, and from sums to outputs.

Online softmax after Milakov and Gimelshein (2018) as in FlashAttention (Dao et al., 2022). Logits
are kept in base 2; the LSE leaves in base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.tiles import floored, store_tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logits(
    s, row_pos, key_pos, seq_len, slope, scale, soft_cap, changed,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    CHANGE: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Scale, cap, bias and mask a tile of scores; base 2.

    `WAY` 1: a variant's or a mask's function `CHANGE` is applied before the mask, `changed` being its
    values of the rows; 2: what it returns are the weights themselves, 0 where hidden.
    """
    HIDDEN: tl.constexpr = 0.0 if WAY == 2 else float("-inf")
    UNIT: tl.constexpr = LOG2E if WAY == 0 else 1.0  # functions take base e
    if SOFT_CAP:
        x = s * (scale / soft_cap)
        s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))) * UNIT
    else:
        s = s * (scale * UNIT)
    if ALIBI:
        s += (slope * UNIT)[:, None] * (key_pos[None, :] - row_pos[:, None]).to(tl.float32)
    if WAY > 0:
        s = CHANGE(s, changed, key_pos)
        if WAY == 1:
            s = s * LOG2E
    if MASK:
        seen = (key_pos < seq_len)[None, :]
        if CAUSAL:
            seen = seen & (key_pos[None, :] <= row_pos[:, None])
        if WINDOW > 0:
            near = key_pos[None, :] > row_pos[:, None] - WINDOW
            if not CAUSAL:
                near = near & (key_pos[None, :] < row_pos[:, None] + WINDOW)
            if SINK_TOKENS > 0:
                near = near | (key_pos < SINK_TOKENS)[None, :]
            seen = seen & near
        if CHUNK > 0:
            seen = seen & ((key_pos // CHUNK)[None, :] == floored(row_pos, CHUNK)[:, None])
        s = tl.where(seen, s, HIDDEN)
    return s


@triton.jit
def logit_scale(scale, Q_SCALE, K_SCALE, kv_head, SCALES: tl.constexpr):
    """A KV head's scale of logits: a number, times what tensors hold of it.

    `SCALES`: 0, there are none; 1, each holds one number; 2, one a KV head.
    """
    if SCALES > 0:
        at = kv_head * (SCALES - 1)
        scale = scale * tl.load(Q_SCALE + at) * tl.load(K_SCALE + at)
    return scale


@triton.jit
def value_scale(v_scale, V_SCALE, OUT_SCALE, kv_head, SCALES: tl.constexpr):
    """A KV head's scale of outputs, likewise; the output's own is one number for all heads."""
    if SCALES > 0:
        v_scale = v_scale * tl.load(V_SCALE + kv_head * (SCALES - 1)) / tl.load(OUT_SCALE)
    return v_scale


@triton.jit
def finish(
    acc, m, l, OUT, LSE, SINKS, v_scale, token, head, row_ok, o_t, o_h, lse_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    first=True,
):  # fmt: skip
    """Add the sinks, normalise and store rows' outputs and LSE.

    A row that saw no key has no state, so its sinks don't count either. An output in e4m3 saturates.
    `first`: of programs that have a row's columns, it is the one that stores the LSE.
    """
    offs_dv = tl.arange(0, BLOCK_DV)
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=row_ok, other=0.0) * LOG2E
        sink = tl.where(m == float("-inf"), m, sink)
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        l = l * tl.exp2(m - base) + tl.exp2(sink - base)
        acc = acc * tl.exp2(m - base)[:, None]
        m = top
    safe = tl.where(l == 0.0, 1.0, l)
    out = acc * (v_scale / safe)[:, None]
    if OUT.dtype.element_ty.is_fp8():
        out = tl.where(out > 448.0, 448.0, tl.where(out < -448.0, -448.0, out))  # NaN stays NaN
    store_tile(OUT + (token * o_t + head.to(tl.int64) * o_h), out, offs_dv, row_ok, DV)
    if HAS_LSE:
        lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe)) * LN2)
        tl.store(LSE + token * lse_t + head, lse, mask=row_ok & first)
