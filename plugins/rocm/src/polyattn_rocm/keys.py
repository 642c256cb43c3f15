"""Keys that are passed whole, one sequence after another as the varlen kernels read them."""

from __future__ import annotations

import numpy as np
import torch
from polyattn.kernel import Batch, Frame
from torch import Tensor


class GivenKeys:
    """Locates a batch's keys once a step. Keys that lie with gaps are gathered."""

    def __init__(self, batch: Batch):
        self.total = sum(batch.lens)
        self.rows: Tensor | None = None
        if not batch.keys_packed:
            spans = zip(batch.key_starts, batch.lens, strict=True)
            rows = np.concatenate([np.arange(start, start + n) for start, n in spans])
            self.rows = torch.from_numpy(rows.astype(np.int64)).to(batch.device)

    def read(self, tensor: Tensor | None) -> Tensor:
        """Return a tensor of keys or values, packed."""
        assert tensor is not None
        return tensor[: self.total] if self.rows is None else tensor[self.rows]


def keys_of(keys: GivenKeys | None, frame: Frame) -> tuple[Tensor, Tensor]:
    """Return a call's keys and values: packed where the layer has no cache, else the cache's pages."""
    if keys is not None:
        return keys.read(frame.key), keys.read(frame.value)
    assert frame.cache is not None
    return frame.cache.key, frame.cache.value


def longest_query(batch: Batch) -> int:
    """Return what the varlen kernels are told: the longest query, at least 2.

    For a longest query of 1 they fold the heads of a group into rows, and assume exactly one token in
    each sequence (Dao-AILab/flash-attention#1537).
    """
    return max(2, batch.max_query_len)
