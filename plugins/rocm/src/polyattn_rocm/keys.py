"""Keys that are given whole, one sequence after another as the varlen kernels read them."""

from __future__ import annotations

import numpy as np
import torch
from polyattn.kernel import Batch, Frame
from torch import Tensor


class GivenKeys:
    """Finds once a step where a batch's keys are; where they lie with gaps they are gathered."""

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

    Told of single tokens they fold the heads of a group into rows and take one token of each sequence
    for granted (Dao-AILab/flash-attention#1537).
    """
    return max(2, batch.max_query_len)
