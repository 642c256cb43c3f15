"""The recurrences in chunks: matrix products within a chunk, one state from chunk to chunk.

Each function takes one sequence, heads first, and a state that it updates in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
SEGMENTS = 8
CHANNELS = 512
"""Channels of Mamba-1 that are scanned together: their chunk of states stays in the cache."""


def _decay(total: Tensor) -> Tensor:
    """Return exp(total_i - total_j) where i >= j, else 0; (heads, tokens, tokens)."""
    size = total.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    return (total[:, :, None] - total[:, None]).masked_fill(~seen, -torch.inf).exp()


def gated_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Mamba-2's and linear attention's recurrence: state = exp(g) state + k v'; o = q state.

    `q`, `k` (groups, tokens, K), `v` (heads, tokens, V), `g` (heads, tokens), `state` (heads, K, V).
    Returns (heads, tokens, V). Chunks as in Dao and Gu (2024), section 6.
    """
    heads, tokens = v.shape[:2]
    each = heads // q.shape[0]
    out = torch.empty_like(v)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, min(start + CHUNK, tokens))
        qc, kc, vc = q[:, rows], k[:, rows], v[:, rows]
        total = g[:, rows].cumsum(1)
        scores = qc @ kc.transpose(1, 2)
        weights = _decay(total) * scores.repeat_interleave(each, 0)
        queries = qc.repeat_interleave(each, 0) * total.exp()[..., None]
        out[:, rows] = torch.baddbmm(queries @ state, weights, vc)
        last = total[:, -1:]
        keys = kc.repeat_interleave(each, 0) * (last - total).exp()[..., None]
        state.mul_(last.exp()[..., None]).baddbmm_(keys.transpose(1, 2), vc)
    return out


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule; shapes as `gated_scan`'s, `q` and `k` (heads, …), `beta` like `g`.

    Within a chunk the rule is a unit triangular system (Yang et al., 2024).
    """
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], CHUNK):
        rows = slice(start, min(start + CHUNK, v.shape[1]))
        qc, kc, vc, bc = q[:, rows], k[:, rows], v[:, rows], beta[:, rows, None]
        total = g[:, rows].cumsum(1)
        decay = _decay(total)
        system = (bc * (kc @ kc.transpose(1, 2)) * decay).tril(-1)
        system.diagonal(dim1=1, dim2=2).fill_(1.0)
        right = torch.cat([bc * vc, bc * total.exp()[..., None] * kc], dim=2)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        fresh = solved[..., : v.shape[2]] - solved[..., v.shape[2] :] @ state
        within = (qc @ kc.transpose(1, 2)) * decay
        out[:, rows] = within @ fresh + (qc * total.exp()[..., None]) @ state
        last = total[:, -1:]
        keys = kc * (last - total).exp()[..., None]
        state.mul_(last.exp()[..., None]).baddbmm_(keys.transpose(1, 2), fresh)
    return out


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
    for at in range(1, size):  # every segment from a state of zero
        b[:, at].addcmul_(a[:, at], b[:, at - 1])
        a[:, at].mul_(a[:, at - 1])
    for segment in range(SEGMENTS):  # then what each starts from
        b[segment].addcmul_(a[segment], h)
        h = b[segment, -1]
    states = b.view(-1, *A.shape)[:length]
    out.copy_(torch.matmul(states, C[..., None])[..., 0])
    return states[-1].clone()
