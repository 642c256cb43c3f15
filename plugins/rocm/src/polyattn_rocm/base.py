"""What the ROCm adapters share: the store, and the conventions of windows and LSE."""

from __future__ import annotations

import torch
from polyattn import AttentionBackend, Batch, KVCache, LayerParams, LayerSpec
from torch import Tensor


class RocmAttention(AttentionBackend):
    """An adapter that stores keys and values with one Triton kernel on the GPU."""

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, params: LayerParams
    ) -> None:
        if not key.is_cuda:
            super().write_kv(key, value, cache, slot_mapping, params)
            return
        from polyattn_triton.cache_write import write_kv

        write_kv(key, value, cache, slot_mapping, params)


def cumulative(lens: Tensor) -> Tensor:
    """Return (num_seqs + 1,) int32 starts of sequences of these lengths."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return (left, right): keys beside the query, itself not counted; -1 is none."""
    if spec.sliding_window is None:
        return (-1, 0) if spec.causal else (-1, -1)
    left = spec.sliding_window - 1
    return (left, 0) if spec.causal else (left, left)


def empty_rows(batch: Batch) -> Tensor | None:
    """Return which tokens are of sequences without keys (padding), or None for none."""
    if 0 not in batch.lens:
        return None
    lens = torch.tensor(batch.lens) == 0
    return torch.repeat_interleave(lens, torch.tensor(batch.query_lens)).to(batch.device)


def finish(rows: Tensor | None, out: Tensor, lse: Tensor | None, found: Tensor | None) -> None:
    """Store a (heads, tokens) LSE; a token without keys gets output 0 and LSE -inf."""
    if lse is not None and found is not None:
        lse.copy_(found.T)
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    if rows is not None:
        out.masked_fill_(rows[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(rows[:, None], -torch.inf)
