"""How do an MLA layer's two forms come about? Queries absorbed, latents projected, keys expanded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache, raw
from polyattn.runtime.cache.rows import decoded
from polyattn.runtime.program import LayerParams, by_request

Weights = tuple[Tensor, Tensor]
"""W_UK (num_heads, nope size, rank) and W_UV (num_heads, rank, v_head_size)."""


def _products(rows: Tensor, weights: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return (tokens, heads, a) times (heads, a, b): (tokens, heads, b).

    `counts`: the tokens of each request, whose product is then a call of its own. The order of a
    product's sums follows from the number of rows, and may follow from where they begin.
    """
    if counts is None:
        return torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1)
    products = rows.new_empty(*rows.shape[:2], weights.shape[2])
    for some, into in by_request(counts, rows, products):
        into.copy_(torch.bmm(some.transpose(0, 1).clone(), weights).transpose(0, 1))
    return products


def absorb(query: Tensor, w_uk: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Return `[q_nope W_UK, q_rope]`, (tokens, heads, rank + rope), of (tokens, heads, nope + rope)."""
    nope, rank = w_uk.shape[1], w_uk.shape[2]
    rope = query.shape[2] - nope
    absorbed = query.new_empty(*query.shape[:2], rank + rope)
    absorbed[..., :rank] = _products(query[..., :nope], w_uk, counts)
    absorbed[..., rank:] = query[..., nope:]
    return absorbed


def project(latent: Tensor, w_uv: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Return `latent W_UV`: (tokens, heads, rank) to (tokens, heads, v_head_size)."""
    return _products(latent, w_uv, counts)


def cached_rows(cache: KVCache, slots: Tensor, params: LayerParams, dtype: torch.dtype) -> Tensor:
    """Return the latents cached at `slots`, (tokens, rank + rope), as the numbers they stand for."""
    stored = cache.key
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    rows, form = raw(stored)[blocks, offsets, 0].view(stored.dtype), cache.format
    if form.rows is not None:
        rows = decoded(rows, form.rows[0], form.head_size)
    rows = rows.to(dtype)
    return rows * params.k_scale if stored.dtype.itemsize == 1 else rows


def expand_rows(
    cache: KVCache,
    slots: Tensor,
    weights: Weights,
    params: LayerParams,
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Make keys and values, (tokens, heads, size) each, of the latents cached at `slots`.

    `counts`: as of `_products`.
    """
    rows, rank = cached_rows(cache, slots, params, dtype), weights[1].shape[1]
    latent, rope = rows[:, :rank], rows[:, rank:]
    heads, nope = weights[0].shape[:2]
    key = rows.new_empty(len(rows), heads, nope + rope.shape[1])
    key[..., nope:] = rope[:, None]
    value = rows.new_empty(len(rows), heads, weights[1].shape[2])
    for each, keys, values in by_request(counts, latent, key, value):
        each = each if counts is None else each.clone()
        keys[..., :nope] = torch.einsum("tr,hnr->thn", each, weights[0])
        values.copy_(torch.einsum("tr,hrv->thv", each, weights[1]))
    return key, value
