"""Turns a block table into the forms that libraries want. Lengths are known on the host."""

from __future__ import annotations

import numpy as np
import torch
from polyattn import Batch, KVCache
from torch import Tensor


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of every entry of rows with `counts` entries each."""
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], counts.cumsum()[:-1]]) if len(counts) else counts
    return row, np.arange(counts.sum()) - starts[row]


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def page_lists(batch: Batch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return CSR pages: (indptr int32, last page's length int32) on the host, indices on the device.

    Order: indptr (num_seqs + 1,), indices (pages,), last_page_len (num_seqs,).
    """
    assert batch.block_table is not None
    lens = np.asarray(batch.lens, dtype=np.int64)
    pages = -(-lens // block_size)
    indptr = np.concatenate([[0], pages.cumsum()]).astype(np.int32)
    last = np.where(pages > 0, lens - (pages - 1) * block_size, 0).astype(np.int32)
    row, column = ragged(pages)
    at = upload(np.stack([row, column]), batch.device)
    return torch.from_numpy(indptr), batch.block_table[at[0], at[1]], torch.from_numpy(last)


def token_slots(batch: Batch, block_size: int) -> Tensor:
    """Return every cached token's slot, int64, the sequences one after another."""
    assert batch.block_table is not None
    row, position = ragged(np.asarray(batch.lens, dtype=np.int64))
    at = upload(np.stack([row, position]), batch.device)
    block = batch.block_table[at[0], at[1] // block_size].long()
    return block * block_size + at[1] % block_size


def read_slots(cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of their pages: (slots, num_kv_heads, size) each."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    return cache.key[block, offset], cache.value[block, offset]
