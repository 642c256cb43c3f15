"""Which pages does a block-sparse mask choose? Rows of queries over a table of their pages alone.

A row is up to Br neighbouring queries of a sequence, which see the same blocks of keys; a decode is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyattn.runtime.batch import Batch
from polyattn.runtime.step_mask import BlockSparseMask

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ChosenPages:
    """A step's rows of blocks, in the order of its tokens, and what is chosen for each.

    - `seq`, `first`, `queries` (rows,): a row's sequence in the batch, the place of its first query in
      that sequence, how many queries it has;
    - `row`, `page` (pages,): whose page it is, ascending, and which of its sequence's, ascending too;
    - `lens` (rows,): how many keys are chosen.
    """

    seq: Ints
    first: Ints
    queries: Ints
    row: Ints
    page: Ints
    lens: Ints

    def table(self, batch: Batch) -> Tensor:
        """Return the chosen pages as a block table, int32 (rows, most pages), on the device."""
        assert batch.block_table is not None
        counts = np.bincount(self.row, minlength=len(self.seq))
        column = np.arange(len(self.row)) - np.repeat(counts.cumsum() - counts, counts)
        columns = np.zeros((len(self.seq), max(1, counts.max(initial=0))), np.int64)
        columns[self.row, column] = self.page
        table = batch.block_table
        if len(self.seq) != len(table) or (self.seq != np.arange(len(table))).any():
            table = table[torch.from_numpy(self.seq).to(table.device)]
        return table.gather(1, torch.from_numpy(columns).to(table.device))


def chosen_pages(batch: Batch, block_size: int, causal: bool) -> ChosenPages | None:
    """Return the rows of a step whose mask chooses whole blocks of the cache, None of another's.

    `causal`: keys behind a row's last query are left out, whatever the mask says.
    """
    mask = batch.mask
    if not isinstance(mask, BlockSparseMask) or batch.block_table is None:
        return None
    if mask.block[1] % block_size:
        return None
    height, lens = mask.block[0], np.asarray(batch.lens, np.int64)
    counts = -(-np.asarray(batch.query_lens, np.int64) // height)
    seq = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)
    total = np.asarray(batch.query_lens, np.int64)[seq]
    queries = np.minimum(height, total - nth * height)
    first = lens[seq] - total + nth * height
    reach = np.minimum(lens[seq], first + queries) if causal else lens[seq]
    row, page = _pages(batch, mask, seq, nth, mask.block[1] // block_size)
    there = page * block_size < reach[row]
    # A block that is named twice is seen once.
    named = np.unique(np.stack([row[there], page[there]], 1), axis=0)
    row, page = named[:, 0], named[:, 1]
    chosen = np.bincount(row, minlength=len(seq)) * block_size
    short = (page + 1) * block_size - reach[row]  # of a row's last page alone it is positive
    np.subtract.at(chosen, row, short.clip(min=0))
    return ChosenPages(seq, first, queries, row, page, chosen)


def over_chosen_pages(batch: Batch, block_size: int) -> Batch | None:
    """Return decodes as the same queries over the blocks of keys that their mask chooses, packed.

    `batch`: of one query token each, whose block table counts blocks of `block_size`. The result has no
    mask, and its lengths count chosen keys: for kernels to which a key's place means nothing. None
    where the mask's blocks are not whole blocks of the cache.
    """
    rows = chosen_pages(batch, block_size, batch.causal)
    if rows is None:
        return None
    found = Batch(batch.starts, rows.lens.tolist(), rows.table(batch), device=batch.device)
    found.causal = batch.causal
    return found


def _pages(
    batch: Batch, mask: BlockSparseMask, seq: Ints, nth: Ints, each: int
) -> tuple[Ints, Ints]:
    """Return the row and the page of all that the mask names; a block is `each` pages."""
    rows = -(-np.asarray(batch.step_query_lens, np.int64) // mask.block[0])
    at = (rows.cumsum() - rows)[np.asarray(batch.seq_ids, np.int64)[seq]] + nth
    indptr, indices = np.asarray(mask.indptr, np.int64), np.asarray(mask.indices, np.int64)
    first, counts = indptr[at], indptr[at + 1] - indptr[at]
    row = np.repeat(np.arange(len(at)), counts)
    within = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    blocks: Ints = indices[first[row] + within]
    pages = (blocks[:, None] * each + np.arange(each)).ravel()
    return np.repeat(row, each), pages
