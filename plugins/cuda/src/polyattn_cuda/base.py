"""What the CUDA adapters share: the store and the workspace."""

from __future__ import annotations

from functools import cache

import torch
from polyattn import AttentionBackend, KVCache, LayerParams
from polyattn_triton.cache_write import write_kv
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its split-KV partial results."""


@cache
def workspace(device: torch.device) -> Tensor:
    """Return the device's one scratch buffer; kernels of one stream use it one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def zeroed_workspace(device: torch.device) -> Tensor:
    """Return a scratch buffer for kernels that find their counters at zero and leave them so."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class CudaAttention(AttentionBackend):
    """An adapter that stores keys and values with one kernel of our own."""

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, params: LayerParams
    ) -> None:
        write_kv(key, value, cache, slot_mapping, params)
