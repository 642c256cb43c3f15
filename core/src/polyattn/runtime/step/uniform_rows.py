"""How do kernels without packed queries run? Over rows with the same number of tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch


class UniformRows:
    """A batch's tokens as (num_seqs, longest query); views, if all rows have the same length.

    A shorter row is padded at its front with its own first token. A mask that is aligned to the bottom
    right leaves the other tokens in place.

    Args:
        batch: the step.

    Examples:
        >>> rows = UniformRows(Batch.from_lens([1, 2], [5, 6]))
        >>> rows.spread(torch.tensor([7, 8, 9])).tolist()
        [[7, 7], [8, 9]]

    """

    def __init__(self, batch: Batch):
        count, width = batch.num_seqs, batch.max_query_len
        self.shape = (count, width)
        self.take: Tensor | None = None
        self.give: Tensor | None = None
        if batch.num_tokens == count * width:
            return
        lens, starts = np.asarray(batch.query_lens), np.asarray(batch.starts[:-1])
        column = np.arange(width) - (width - lens)[:, None]
        take = np.minimum(starts[:, None] + np.maximum(column, 0), max(batch.num_tokens - 1, 0))
        give = np.flatnonzero(column.ravel() >= 0)
        self.take = torch.from_numpy(take.ravel()).to(batch.device)
        self.give = torch.from_numpy(give).to(batch.device)

    @property
    def uniform(self) -> bool:
        """Whether all rows are as long, so that nothing is copied."""
        return self.take is None

    def spread(self, packed: Tensor) -> Tensor:
        """Return (num_seqs, longest query, ...).

        Args:
            packed: (tokens, ...).

        """
        taken = packed if self.take is None else packed[self.take]
        return taken.view(*self.shape, *packed.shape[1:])

    def collect(self, rows: Tensor) -> Tensor:
        """Return (tokens, ...).

        Args:
            rows: (num_seqs, longest query, ...).

        """
        flat = rows.flatten(0, 1)
        return flat if self.give is None else flat.index_select(0, self.give)
