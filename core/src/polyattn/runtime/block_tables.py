"""How does a kernel walk blocks larger than its own? Each block becomes several entries of the table."""

from __future__ import annotations

from torch import Tensor

from polyattn.runtime.batch import Batch
from polyattn.selection.cache_format import CacheFormat


def expand(batch: Batch, cache: CacheFormat, size: int, into: Tensor | None = None) -> Batch:
    """Return the batch with a block table of blocks of `size` tokens.

    `into` is an earlier such table, filled anew where a captured graph reads it. Where K's and V's
    blocks lie in turn, K's next block is twice as far.
    """
    ratio = cache.block_size // size
    if ratio == 1 or batch.block_table is None:
        return batch
    table = batch.block_table
    if into is None:
        into = table.new_empty(table.shape[0], table.shape[1] * ratio)
    step = ratio * (2 if cache.interleaved else 1)
    for offset in range(ratio):
        into[:, offset::ratio] = table * step + offset
    return batch.with_block_table(into)
