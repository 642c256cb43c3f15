"""How do index keys lie in a cache? In pages of keys; those of 8 bits may have their scales behind."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import E4M3_MAX
from polyattn.runtime.cache.huge_pages import on_huge_pages
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize, raw
from polyattn.runtime.store import scatter
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import IndexerSpec

SMALLEST = 1e-4
"""What a key's largest element counts as at least, so that a key of zeros has a scale."""


def index_cache_form(spec: LayerSpec) -> tuple[int, torch.dtype]:
    """Return the last size of a layer's cache of index keys, and its dtype."""
    indexer = spec.indexer
    assert indexer is not None
    if indexer.cache_dtype == "fp8_scaled":
        return indexer.key_bytes(spec.dtype), torch.uint8
    stored = spec.dtype if indexer.cache_dtype == "auto" else indexer.cache_dtype
    return indexer.head_size, STORAGE_DTYPES[stored]


def zeroed_index_cache(
    spec: LayerSpec, num_blocks: int, block_size: int, device: torch.device
) -> Tensor:
    """Return a layer's cache of index keys, (num_blocks, block_size, last size), all zeros."""
    size, dtype = index_cache_form(spec)
    cache = torch.empty(num_blocks, block_size, size, dtype=dtype, device=device)
    return on_huge_pages(cache).zero_()


def keys_and_scales(pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of pages of `fp8_scaled`, (n, block_size, size + 4) bytes: of keys, of scales."""
    block, flat = pages.shape[1], pages.flatten(1)
    keys, scales = flat[:, : block * size], flat[:, block * size :]
    return keys.unflatten(1, (block, size)), scales.unflatten(1, (block, 4))


def write_index_keys(indexer: IndexerSpec, cache: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Write keys (rows, size) to their slots, int64 (rows,); -1 skips. Never waits for an accelerator."""
    if indexer.cache_dtype != "fp8_scaled":
        scatter(cache[:, :, None], quantize(keys, cache.dtype, 1.0)[:, None], slots)
        return
    exact = keys.float()
    scale = (exact.abs().amax(1) if len(exact) else exact[:, 0]).clamp(min=SMALLEST) / E4M3_MAX
    stored = (exact / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    places = keys_and_scales(cache, indexer.head_size)
    scatter(places[0][:, :, None], stored.view(torch.uint8)[:, None], slots)
    scatter(places[1][:, :, None], scale.view(torch.uint8).view(-1, 1, 4), slots)


def read_index_keys(
    indexer: IndexerSpec, cache: Tensor, blocks: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the keys of some blocks, int64 (n,), as numbers (n, block_size, size)."""
    pages = raw(cache)[blocks]
    if indexer.cache_dtype != "fp8_scaled":
        return pages.view(cache.dtype).to(dtype)
    keys, scales = (each.contiguous() for each in keys_and_scales(pages, indexer.head_size))
    return keys.view(torch.float8_e4m3fn).to(dtype) * scales.view(torch.float32).to(dtype)
