"""Attention as it is defined, of one sequence in float64, without any of polyattn's code."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    scale: float | None = None, cap: float | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (queries, heads, size) and the LSE (heads, queries).

    `query`, `key`, `value`: (tokens, heads, size). `mask`: what a query sees, bool (queries, keys); all
    by default. `bias`: added to capped scores. A query that sees nothing has output 0 and LSE -inf.
    """
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores = scores * (query.shape[2] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * (scores / cap).tanh()
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights[..., : len(key)], value), lse


def distances(queries: int, keys: int) -> Tensor:
    """Return how far each key lies behind each query's own, int64 (queries, keys)."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def in_window(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Return which keys each query sees: so many before and behind its own, -1 for all."""
    behind = distances(queries, keys)
    mask = torch.ones_like(behind, dtype=torch.bool)
    mask = mask & (behind <= left) if left >= 0 else mask
    return mask & (behind >= -right) if right >= 0 else mask
