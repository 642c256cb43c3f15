"""Where a step's keys are: in the cache's pages, or whole, as the varlen kernels read them."""

from __future__ import annotations

from polyattn.kernel import Batch, Frame, Plan, cumulative, empty_rows
from torch import Tensor


class KeysPlan(Plan):
    """Where a step's keys are, and which tokens see none: `empty`.

    `longest`: what the varlen kernels are told, the longest query, at least 2. For 1 they fold the heads
    of a group into rows, and assume exactly one token in each sequence (Dao-AILab/flash-attention#1537).
    """

    __slots__ = ("empty", "key_starts", "longest")

    def __init__(self, batch: Batch, cached: bool, causal: bool):
        super().__init__(batch)
        self.longest = max(2, batch.max_query_len)
        self.key_starts = cumulative(batch.seq_lens) if cached else batch.key_start_loc
        self.empty = empty_rows(batch, causal)

    def keys(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return a call's keys and values: the cache's pages, or packed where the layer has no cache."""
        if frame.cache is not None:
            return frame.cache.key, frame.cache.value
        assert frame.key is not None and frame.value is not None
        rows = self.batch.key_rows
        return frame.key[rows], frame.value[rows]
