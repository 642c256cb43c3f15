"""Random weights and choices of an MLA layer that look like a model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.spec.layer import LayerSpec


def latent_weights(spec: LayerSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return W_UK and W_UV of an MLA layer, scaled so that keys and values have unit size."""
    assert spec.latent is not None
    dtype, rank = STORAGE_DTYPES[spec.dtype], spec.latent.rank
    nope = spec.head_size - spec.latent.rope_head_size
    w_uk = torch.randn(spec.num_heads, nope, rank, generator=generator) / math.sqrt(rank)
    w_uv = torch.randn(spec.num_heads, rank, spec.v_head_size, generator=generator)
    return w_uk.to(dtype), (w_uv / math.sqrt(rank)).to(dtype)


def chosen_positions(
    lens: list[int], queries: list[int], topk: int, generator: torch.Generator
) -> Tensor:
    """Return int32 (tokens, topk): for each token distinct positions that it sees, -1 past them."""
    rows = []
    for length, count in zip(lens, queries, strict=True):
        for at in range(length - count, length):
            row = torch.full((topk,), -1, dtype=torch.int32)
            seen = torch.randperm(max(at + 1, 0), generator=generator)[:topk]
            row[: len(seen)] = seen.int()
            rows.append(row)
    return torch.stack(rows) if rows else torch.empty(0, topk, dtype=torch.int32)
