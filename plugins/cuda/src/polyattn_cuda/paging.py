"""Turns block tables and key lengths into the forms that libraries want, once a step."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from polyattn.kernel import Batch, BatchError, CacheFormat, KVCache, Plan, empty_rows, upload
from torch import Tensor


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of every entry of rows with `counts` entries each."""
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], counts.cumsum()[:-1]]) if len(counts) else counts
    return row, np.arange(counts.sum()) - starts[row]


class Room(NamedTuple):
    """Device buffers that pages are gathered through, so that a captured step's replay allocates none.

    `places` int64, `pages` int32, both (capacity,).
    """

    places: Tensor
    pages: Tensor

    @classmethod
    def of(cls, capacity: int, device: torch.device) -> Room:
        """Allocate for so many pages."""
        buffers = (
            torch.empty(capacity, dtype=d, device=device) for d in (torch.int64, torch.int32)
        )
        return cls(*buffers)


def num_pages(batch: Batch, block_size: int) -> int:
    """Return how many pages the step's sequences have together."""
    return sum(-(-n // block_size) for n in batch.lens)


def page_lists(
    batch: Batch, block_size: int, room: Room | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return CSR pages: (indptr int32, last page's length int32) on the host, indices on the device.

    Order: indptr (num_seqs + 1,), indices (pages,), last_page_len (num_seqs,). `room`: where the
    indices are to lie.
    """
    lens, table = batch.host_lens, batch.block_table
    assert table is not None
    pages = (lens + (block_size - 1)) // block_size
    indptr = np.zeros(len(lens) + 1, np.int32)
    indptr[1:] = pages.cumsum()
    last = (lens - np.maximum(pages - 1, 0) * block_size).astype(np.int32)
    count = int(indptr[-1])
    if room is not None and count > len(room.pages):
        raise BatchError(
            f"the step has {count} pages, its captured graph room for {len(room.pages)}; capture one for "
            "longer sequences"
        )
    if len(lens) == 1:  # whose row of the table is its list
        return torch.from_numpy(indptr), table[0, :count], torch.from_numpy(last)
    stride = table.stride(0)
    places = np.arange(count) + (np.arange(len(lens)) * stride - indptr[:-1]).repeat(pages)
    # The table as it lies, rows and what is between them: one index a page, not two.
    width = stride * (len(table) - 1) + table.shape[1] if table.numel() else 0
    flat = table.as_strided((width,), (1,))
    if room is None:
        indices = flat[upload(places, batch.device)]
    else:
        at = upload(places, batch.device, room.places[:count])
        indices = torch.index_select(flat, 0, at, out=room.pages[:count])
    return torch.from_numpy(indptr), indices, torch.from_numpy(last)


class PackedKeys:
    """A step's keys one sequence after another, from wherever they are; places are found once.

    - given whole, without gaps: as they are, with gaps: gathered;
    - of prompts without context: the new tokens, as long as they are given;
    - cached: copied out of their pages.
    """

    def __init__(self, batch: Batch, cache: CacheFormat | None):
        self.batch, self.cache = batch, cache
        self.total = sum(batch.lens)
        self.fresh = cache is not None and batch.lens == batch.query_lens
        self.slots = None if cache is None or self.fresh else self._slots()

    @property
    def starts(self) -> list[int]:
        """Where each sequence's keys start, on the host, ending with their total."""
        return [0, *accumulate(self.batch.lens)]

    def read(
        self, key: Tensor | None, value: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, (total, num_kv_heads, size) each."""
        if cache is not None and (not self.fresh or key is None or value is None):
            if self.slots is None:
                self.slots = self._slots()
            block, offset = self.slots // cache.block_size, self.slots % cache.block_size
            return cache.key[block, offset], cache.value[block, offset]
        assert key is not None and value is not None
        rows = slice(self.total) if cache is not None else self.batch.key_rows
        return key[rows], value[rows]

    def _slots(self) -> Tensor:
        """Return every cached token's slot, int64."""
        assert self.cache is not None and self.batch.block_table is not None
        size = self.cache.block_size
        row, position = ragged(np.asarray(self.batch.lens, dtype=np.int64))
        at = upload(np.stack([row, position]), self.batch.device)
        return self.batch.block_table[at[0], at[1] // size].long() * size + at[1] % size


class PackedPlan(Plan):
    """A step over packed keys: where they are, and which tokens see none."""

    __slots__ = ("empty", "keys")

    def __init__(self, batch: Batch, cache: CacheFormat | None, causal: bool):
        super().__init__(batch)
        self.keys, self.empty = PackedKeys(batch, cache), empty_rows(batch, causal)
