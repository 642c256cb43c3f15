"""How is a block table transformed? Into smaller blocks, without first ones, a row for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import token_places
from polyattn.selection.cache_format import CacheFormat


def with_a_column(batch: Batch) -> Batch:
    """Return the batch with a block table of at least one column.

    Kernels read the first column before they know a length. A table without columns, which only empty
    sequences can have, becomes one of block 0.
    """
    table = batch.block_table
    if table is None or table.shape[1]:
        return batch
    return batch.with_block_table(table.new_zeros(table.shape[0], 1))


def expand(batch: Batch, cache: CacheFormat, size: int, into: Tensor | None = None) -> Batch:
    """Return the batch with a block table of blocks of `size` tokens.

    `into` is an earlier such table, filled anew where a captured graph reads it.
    """
    ratio = cache.block_size // size
    if ratio == 1 or batch.block_table is None:
        return batch
    table = batch.block_table
    if into is None:
        into = table.new_empty(table.shape[0], table.shape[1] * ratio)
    step = cache.block_stride // size
    for offset in range(ratio):  # in place: a captured step's replay allocates nothing
        into[:, offset::ratio].copy_(table).mul_(step).add_(offset)
    return batch.with_block_table(into)


def without_first(table: Tensor, counts: Sequence[int]) -> Tensor:
    """Return a block table (num_seqs, max_blocks) whose row i begins after its first `counts[i]` blocks.

    What is behind a row's end then is its last entry again.
    """
    width = table.shape[1]
    skipped = torch.tensor(counts, dtype=torch.int64, device=table.device)[:, None]
    columns = torch.arange(width, device=table.device) + skipped
    return table.gather(1, columns.clamp_(max=width - 1))


def each_token(batch: Batch) -> Batch:
    """Return the step as decodes alone: a row for each token, over the keys up to it.

    Then how a sequence is divided into steps changes nothing.
    """
    table = batch.block_table
    assert table is not None
    queries, tokens = batch.host_query_lens, np.arange(batch.num_tokens)
    seq = np.repeat(np.arange(len(queries)), queries)
    ends = np.asarray(batch.host_starts)[1:]
    lens = np.maximum(np.asarray(batch.host_lens)[seq] - (ends[seq] - 1 - tokens), 0)
    at = torch.from_numpy(seq).to(table.device)
    rows = Batch([*range(len(seq) + 1)], lens.tolist(), table.index_select(0, at))
    if batch.lens_are_bounds:
        _, positions, there = token_places(batch)
        rows.seq_lens = torch.minimum(positions + 1, there).clamp(min=0).int()
        rows.lens_are_bounds = True
    return rows
