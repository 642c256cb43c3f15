"""The recurrences in chunks: matrix products within a chunk, one state from chunk to chunk.

Each function takes one sequence and a state that it updates in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
GATED_CHUNK = 64
LEAST = -60.0
"""No exponent is smaller: exp(-60) adds nothing, while exp(-inf) takes 15 times as long, and products
of what underflows more."""
FORGOTTEN = -1000.0
"""Of a token's log decay: exp(-1000) is 0 in float64, and -inf has no difference from itself."""
CHANNEL_CHUNK = 16
"""Tokens whose decays are kept for each channel apart: (tokens, tokens, K) numbers a head."""
SEGMENTS = 8
FIRST_ORDER_CHUNK = 512
CHANNELS = 512
"""Channels of Mamba-1 that are scanned together: their chunk of states stays in the cache."""


def _logs(g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return log decays in float64, and their running sums."""
    logs = g.double().clamp(min=FORGOTTEN)
    return logs, logs.cumsum(dim)


def _decay(total: Tensor, out: Tensor | None = None) -> Tensor:
    """Return exp(total_i - total_j) where i >= j, else 0; (heads, tokens, tokens).

    Totals are float64: where a token forgets much they are in the hundreds, and the last bit of 800 in
    float32 is 6e-5 of every weight after it.
    """
    # What lies above the triangle could overflow: it is cut off before the exponential, and after.
    weights = torch.sub(total[:, :, None], total[:, None], out=out).tril_()
    return weights.clamp_(min=LEAST).exp_().tril_()


def gated_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    out: Tensor,
    dt: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Mamba-2's and linear attention's recurrence: state = exp(g) state + k (dt v)'; o = q state.

    `q`, `k` (tokens, groups, K), `v`, `out` (tokens, heads, V), `g`, `dt` (tokens, heads), `skip`
    (heads,), which adds skip v; `state` (groups, K, heads of a group * V), updated in place, in the
    dtype of the arithmetic. Chunks as in Dao and Gu (2024), section 6. The heads of a group share
    each product with q and k, and all that is elementwise stays in the cache.
    """
    tokens, heads, size = v.shape
    groups, each = q.shape[1], heads // q.shape[1]
    # Made once: fresh memory for every chunk would cost more, in page faults, than the arithmetic.
    empty, most = state.new_empty, min(GATED_CHUNK, tokens)
    v_, x_ = empty(most, heads, size), empty(most, heads, size)
    before_ = empty(groups, most, each * size)
    for start in range(0, tokens, GATED_CHUNK):
        rows = slice(start, min(start + GATED_CHUNK, tokens))
        count = rows.stop - start
        if start == 0 or count < most:
            weights_, within_ = empty(heads, count, count), empty(heads, count, size)
            before_ = empty(groups, count, each * size)
        vc, x = v_[:count].copy_(v[rows]), x_[:count]
        qc, kc = (t[rows].to(state.dtype).transpose(0, 1) for t in (q, k))
        _, total = _logs(g[rows], 0)
        last = total[-1]
        # Step sizes and skips go into what is small: (tokens, tokens) rather than (tokens, V).
        weights = _decay(total.T.contiguous(), weights_)
        weights.view(groups, each, count, count).mul_((qc @ kc.transpose(1, 2))[:, None])
        factor = (last - total).clamp_(min=LEAST).exp_().to(state.dtype)
        if dt is not None:
            weights.mul_(dt[rows].T.contiguous()[:, None])
            factor.mul_(dt[rows])
        if skip is not None:
            weights.diagonal(dim1=1, dim2=2).add_(skip[:, None])
        within = torch.bmm(weights, vc.transpose(0, 1), out=within_)
        before = torch.bmm(qc, state, out=before_).view(groups, count, each, size)
        since = total.clamp(min=LEAST).exp_().to(state.dtype)
        before.mul_(since.view(count, groups, each, 1).transpose(0, 1))
        before.add_(within.view(groups, each, count, size).transpose(1, 2))
        out[rows] = before.transpose(0, 1).reshape(count, heads, size)
        torch.mul(vc, factor[..., None], out=x)
        state.view(groups, -1, each, size).mul_(since[-1].view(groups, 1, each, 1))
        state.baddbmm_(kc.transpose(1, 2), x.view(count, groups, -1).transpose(0, 1))


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule: `q`, `k` (heads, tokens, K), `v` (heads, tokens, V), `g`, `beta`
    (heads, tokens), `state` (heads, K, V). Returns (heads, tokens, V).

    Within a chunk the rule is a unit triangular system (Yang et al., 2024).
    """
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], CHUNK):
        rows = slice(start, min(start + CHUNK, v.shape[1]))
        qc, kc, vc, bc = q[:, rows], k[:, rows], v[:, rows], beta[:, rows, None]
        _, total = _logs(g[:, rows], 1)
        decay, since = (t.to(v.dtype) for t in (_decay(total), total.exp()[..., None]))
        system = (bc * (kc @ kc.transpose(1, 2)) * decay).tril(-1)
        system.diagonal(dim1=1, dim2=2).fill_(1.0)
        right = torch.cat([bc * vc, bc * since * kc], dim=2)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        fresh = solved[..., : v.shape[2]] - solved[..., v.shape[2] :] @ state
        within = (qc @ kc.transpose(1, 2)) * decay
        out[:, rows] = within @ fresh + (qc * since) @ state
        last = total[:, -1:]
        keys = kc * (last - total).exp().to(v.dtype)[..., None]
        state.mul_(since[:, -1:]).baddbmm_(keys.transpose(1, 2), fresh)
    return out


def low_rank_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Tensor:
    """Return o = q state of state = (diag(exp(g)) + b a') state + k v': RWKV-7 and, rewritten, KDA.

    `q`, `k`, `g`, `a`, `b` (heads, tokens, K), `v` (heads, tokens, V), `state` (heads, K, V), updated
    in place. Returns (heads, tokens, V). Within a chunk what `a` reads solves a unit triangular system
    (Yang et al., 2024, with a rate for each channel: the Kimi Linear report, section 3).
    """
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], CHANNEL_CHUNK):
        rows = slice(start, min(start + CHANNEL_CHUNK, v.shape[1]))
        qc, kc, vc, ac, bc = (t[:, rows] for t in (q, k, v, a, b))
        gc, total = _logs(g[:, rows], 1)
        before = total - gc
        # (heads, i, j, K), each channel apart: a product of exp(total) and exp(-total) would overflow.
        weights = _channel_decay(total, total, 0)
        earlier = _channel_decay(before, total, -1)
        weights, earlier = weights.to(v.dtype), earlier.to(v.dtype)
        read_b, read_k = (torch.einsum("hik,hjk,hijk->hij", ac, t, earlier) for t in (bc, kc))
        out_b, out_k = (torch.einsum("hik,hjk,hijk->hij", qc, t, weights) for t in (bc, kc))
        read_b.neg_().diagonal(dim1=1, dim2=2).fill_(1.0)
        known = read_k @ vc + (ac * before.exp().to(v.dtype)) @ state
        read = torch.linalg.solve_triangular(read_b, known, upper=False, unitriangular=True)
        out[:, rows] = out_b @ read + out_k @ vc + (qc * total.exp().to(v.dtype)) @ state
        last = total[:, -1:]
        left = (last - total).exp().to(v.dtype)
        state.mul_(last.exp().to(v.dtype).transpose(1, 2))
        state.baddbmm_((bc * left).transpose(1, 2), read).baddbmm_((kc * left).transpose(1, 2), vc)
    return out


def bonus_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """Return o = q (state + diag(u) k v') of the state before; then state = diag(exp(g)) state + k v'.

    Shapes as `low_rank_scan`'s, and `u` (heads, K): RWKV-6.
    """
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], CHANNEL_CHUNK):
        rows = slice(start, min(start + CHANNEL_CHUNK, v.shape[1]))
        qc, kc, vc = (t[:, rows] for t in (q, k, v))
        gc, total = _logs(g[:, rows], 1)
        before = total - gc
        earlier = _channel_decay(before, total, -1).to(v.dtype)
        weights = torch.einsum("hik,hjk,hijk->hij", qc, kc, earlier)
        weights.diagonal(dim1=1, dim2=2).add_((qc * u[:, None] * kc).sum(-1))
        out[:, rows] = weights @ vc + (qc * before.exp().to(v.dtype)) @ state
        last = total[:, -1:]
        left = (last - total).exp().to(v.dtype)
        state.mul_(last.exp().to(v.dtype).transpose(1, 2)).baddbmm_((kc * left).transpose(1, 2), vc)
    return out


def _channel_decay(left: Tensor, right: Tensor, diagonal: int) -> Tensor:
    """Return exp(left_i - right_j) where j <= i + diagonal, else 0; (heads, tokens, tokens, K)."""
    count = left.shape[1]
    seen = left.new_ones(count, count, dtype=torch.bool).tril(diagonal)[..., None]
    exponent = left[:, :, None] - right[:, None]
    return torch.where(seen, exponent.clamp(min=LEAST), -torch.inf).exp()


def first_order(a: Tensor, b: Tensor, h: Tensor) -> None:
    """Turn `b` (tokens, D) into the states of h = a h + b from `h` (D,); `a` is used up."""
    for start in range(0, len(a), FIRST_ORDER_CHUNK):
        rows = slice(start, start + FIRST_ORDER_CHUNK)
        length = len(a[rows])
        size = -(-length // SEGMENTS)
        whole = SEGMENTS * size
        ac, bc = a.new_ones(whole, *a.shape[1:]), b.new_zeros(whole, *b.shape[1:])
        ac[:length], bc[:length] = a[rows], b[rows]
        shape = (SEGMENTS, size, *a.shape[1:])
        _advance(ac.view(shape), bc.view(shape), h)
        b[rows] = bc[:length]
        h = b[rows][-1]


def _advance(a: Tensor, b: Tensor, h: Tensor) -> None:
    """Turn `b` (segments, tokens, …) into the states of h = a h + b: the segments side by side."""
    for at in range(1, a.shape[1]):  # every segment from a state of zero
        b[:, at].addcmul_(a[:, at], b[:, at - 1])
        a[:, at].mul_(a[:, at - 1])
    for segment in range(a.shape[0]):  # then what each starts from
        b[segment].addcmul_(a[segment], h)
        h = b[segment, -1]


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """Mamba-1's recurrence: `x`, `dt` (tokens, D), `A` (D, N), `B`, `C` (tokens, N), `state` (D, N).

    A chunk is `SEGMENTS` segments that advance side by side; then each takes up what came before it.
    """
    tokens, out = x.shape[0], torch.empty_like(x)
    for first in range(0, x.shape[1], CHANNELS):
        channels = slice(first, first + CHANNELS)
        h = state[channels]
        for start in range(0, tokens, CHUNK):
            rows = slice(start, min(start + CHUNK, tokens))
            h = _selective_chunk(
                x[rows, channels], dt[rows, channels], A[channels], B[rows], C[rows], h,
                out[rows, channels],
            )  # fmt: skip
        state[channels] = h
    return out


def _selective_chunk(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, out: Tensor
) -> Tensor:
    length = x.shape[0]
    size = -(-length // SEGMENTS)
    a = torch.ones(SEGMENTS * size, *A.shape, dtype=x.dtype, device=x.device)
    b = torch.zeros_like(a)
    torch.exp(dt[..., None] * A, out=a[:length])
    torch.mul((dt * x)[..., None], B[:, None], out=b[:length])
    a, b = a.view(SEGMENTS, size, *A.shape), b.view(SEGMENTS, size, *A.shape)
    _advance(a, b, h)
    states = b.view(-1, *A.shape)[:length]
    out.copy_(torch.matmul(states, C[..., None])[..., 0])
    return states[-1].clone()
