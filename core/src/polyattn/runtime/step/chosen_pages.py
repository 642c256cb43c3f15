"""How is a decode under a block-sparse mask planned? As a plain one over its chosen pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.step_mask import BlockSparseMask

Ints = NDArray[np.int64]


def over_chosen_pages(batch: Batch, block_size: int) -> Batch | None:
    """Return decodes as the same queries over the blocks of keys that their mask chooses, packed.

    It serves kernels to which a key's position means nothing: the new batch has no mask, and its lengths
    count chosen keys alone.

    Args:
        batch: one query token a sequence, with a `BlockSparseMask`.
        block_size: tokens of a block of the block table.

    Returns:
        The new batch, or None if the mask's blocks aren't whole blocks of the cache.

    Raises:
        Nothing: the batch was checked before.

    Examples:
        >>> table = torch.tensor([[4, 7, 5]], dtype=torch.int32)
        >>> mask = BlockSparseMask([0, 2], [0, 2], block=(1, 16))
        >>> over_chosen_pages(Batch.from_lens([1], [40], table, 16, mask=mask), 16).block_table[:, :2]
        tensor([[4, 5]], dtype=torch.int32)

    """
    mask, table = batch.mask, batch.block_table
    if not isinstance(mask, BlockSparseMask) or table is None or mask.block[1] % block_size:
        return None
    lens = np.asarray(batch.lens, np.int64)
    seq, page = _pages(batch, mask, mask.block[1] // block_size)
    there = page * block_size < lens[seq]
    # A block that is named twice is seen once.
    named = np.unique(np.stack([seq[there], page[there]], 1), axis=0)
    seq, page = named[:, 0], named[:, 1]
    counts = np.bincount(seq, minlength=len(lens))
    column = np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)
    columns = np.zeros((len(lens), max(1, counts.max(initial=0))), np.int64)
    columns[seq, column] = page
    chosen = counts * block_size
    short = (page + 1) * block_size - lens[seq]  # of a sequence's last page alone it is positive
    np.subtract.at(chosen, seq, short.clip(min=0))
    found = Batch(
        batch.starts,
        chosen.tolist(),
        table.gather(1, torch.from_numpy(columns).to(table.device)),
        device=batch.device,
    )
    found.causal = batch.causal
    return found


def _pages(batch: Batch, mask: BlockSparseMask, each: int) -> tuple[Any, Any]:
    """Return the sequence and the page of all that the mask names; a block is `each` pages."""
    rows = -(-np.asarray(batch.step_query_lens, np.int64) // mask.block[0])
    row = (rows.cumsum() - rows)[batch.seq_ids]
    indptr, indices = np.asarray(mask.indptr, np.int64), np.asarray(mask.indices, np.int64)
    first, counts = indptr[row], indptr[row + 1] - indptr[row]
    seq = np.repeat(np.arange(len(row)), counts)
    at = np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)
    blocks: Ints = indices[first[seq] + at]
    pages = (blocks[:, None] * each + np.arange(each)).ravel()
    return np.repeat(seq, each), pages
