"""How do an MLA layer's two forms come about? Queries absorbed, latents projected, keys expanded."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache, raw
from polyattn.runtime.cache.rows import decoded
from polyattn.runtime.program import LayerParams

Weights = tuple[Tensor, Tensor]
"""W_UK (num_heads, nope size, rank) and W_UV (num_heads, rank, v_head_size)."""


def absorb(query: Tensor, w_uk: Tensor) -> Tensor:
    """Return `[q_nope W_UK, q_rope]`, (tokens, heads, rank + rope), of (tokens, heads, nope + rope)."""
    nope, rank = w_uk.shape[1], w_uk.shape[2]
    rope = query.shape[2] - nope
    found = query.new_empty(*query.shape[:2], rank + rope)
    found[..., :rank] = torch.bmm(query[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    found[..., rank:] = query[..., nope:]
    return found


def project(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Return `latent W_UV`: (tokens, heads, rank) to (tokens, heads, v_head_size)."""
    return torch.bmm(latent.transpose(0, 1), w_uv).transpose(0, 1)


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
    cache: KVCache, slots: Tensor, weights: Weights, params: LayerParams, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make keys and values, (tokens, heads, size) each, of the latents cached at `slots`."""
    rows, rank = cached_rows(cache, slots, params, dtype), weights[1].shape[1]
    latent, rope = rows[:, :rank], rows[:, rank:]
    heads, nope = weights[0].shape[:2]
    key = rows.new_empty(len(rows), heads, nope + rope.shape[1])
    key[..., :nope] = torch.einsum("tr,hnr->thn", latent, weights[0])
    key[..., nope:] = rope[:, None]
    return key, torch.einsum("tr,hrv->thv", latent, weights[1]).contiguous()
