"""What the CUDA adapters share: the store, the workspace, and the LSE's conventions."""

from __future__ import annotations

from functools import cache

import torch
from polyattn import AttentionBackend, Batch, KVCache, LayerParams, LayerSpec
from polyattn_triton.cache_write import write_kv
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its split-KV partial results."""


@cache
def workspace(device: torch.device) -> Tensor:
    """Return the device's one scratch buffer; kernels of one stream use it one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class CudaAttention(AttentionBackend):
    """An adapter that stores keys and values with one kernel of our own."""

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, params: LayerParams
    ) -> None:
        write_kv(key, value, cache, slot_mapping, params)


def empty_rows(batch: Batch) -> Tensor | None:
    """Return which tokens are of sequences without keys (padding), or None for none."""
    if 0 not in batch.lens:
        return None
    lens = torch.tensor(batch.lens) == 0
    return torch.repeat_interleave(lens, torch.tensor(batch.query_lens)).to(batch.device)


def blank(rows: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Write what a token without keys gets: output 0, LSE -inf; libraries differ there."""
    if rows is not None:
        out.masked_fill_(rows[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(rows[:, None], -torch.inf)


def window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return flash-attn's (left, right): keys beside the query, itself not counted; -1 is none."""
    if spec.sliding_window is None:
        return (-1, 0) if spec.causal else (-1, -1)
    left = spec.sliding_window - 1
    return (left, 0) if spec.causal else (left, left)


def store_lse(lse: Tensor | None, found: Tensor) -> None:
    """Copy a library's (heads, tokens) LSE; where it says +inf for a row without keys, say -inf."""
    if lse is not None:
        lse.copy_(found.T)
        lse.masked_fill_(lse == torch.inf, -torch.inf)
