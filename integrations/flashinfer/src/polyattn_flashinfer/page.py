"""FlashInfer's paged cache: where appended tokens go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn_flashinfer.calls import checked_layout, pages

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return each sequence's tokens, int32 (num_seqs,)."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each new token's sequence and position, int32 (nnz,); -1 and 0 for rows of padding."""
    indptr, lens = append_indptr.long(), seq_lens.long()
    token = torch.arange(nnz, device=indptr.device)
    row = torch.searchsorted(indptr, token, right=True) - 1
    inside = row < len(lens)
    at = row.clamp(max=len(lens) - 1)
    place = token - indptr[at + 1] + lens[at]
    pairs = (row.masked_fill(~inside, -1).int(), place.masked_fill(~inside, 0).int())
    if batch_indices is None or positions is None:
        return pairs
    return batch_indices.copy_(pairs[0]), positions.copy_(pairs[1])


def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor,
    paged_kv_cache: Any, kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write new tokens (tokens, heads, size) to their pages."""
    cache = pages(paged_kv_cache, checked_layout(kv_layout))
    _append(
        ((cache.key, append_key), (cache.value, append_value)),
        batch_indices,
        positions,
        kv_indices,
        kv_indptr,
    )


def append_paged_mla_kv_cache(
    append_ckv: Tensor, append_kpe: Tensor, batch_indices: Tensor, positions: Tensor,
    ckv_cache: Tensor, kpe_cache: Tensor, kv_indices: Tensor, kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:  # fmt: skip
    """Write new latents (tokens, size) to their pages (pages, page size, size)."""
    _append(
        ((ckv_cache, append_ckv), (kpe_cache, append_kpe)),
        batch_indices,
        positions,
        kv_indices,
        kv_indptr,
    )


def _append(
    parts: tuple[tuple[Tensor, Tensor], ...],
    rows: Tensor,
    positions: Tensor,
    indices: Tensor,
    indptr: Tensor,
) -> None:
    size = parts[0][0].shape[1]
    real = rows >= 0
    seq, place = rows[real].long(), positions[real].long()
    page = indices[indptr[seq].long() + place // size].long()
    for cache, tokens in parts:
        cache[page, place % size] = tokens[real].to(cache.dtype)
