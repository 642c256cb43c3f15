"""What the ROCm adapters share: the store."""

from __future__ import annotations

from polyattn import AttentionBackend, KVCache, LayerParams
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
