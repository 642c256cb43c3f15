"""ROCM_FLASH_ATTN: the ROCm build of flash-attn, on Composable Kernel."""

from __future__ import annotations

from typing import ClassVar

from polyattn import Batch, KVCache, LayerParams
from polyattn.runtime.conventions import (
    blank,
    cumulative,
    decode_window_sizes,
    empty_rows,
    store_lse,
    window_sizes,
)
from torch import Tensor

from polyattn_rocm.base import RocmAttention


class CkFlashAttention(RocmAttention):
    """Prefill by the varlen kernel over pages, decode by the KV-cache kernel."""

    name: ClassVar[str] = "ROCM_FLASH_ATTN"

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.starts, self.lens = batch.query_start_loc, batch.seq_lens
        self.key_starts = cumulative(self.lens)
        self.empty = empty_rows(batch)

    def forward_prefill(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert cache is not None
        if not self.batch.num_tokens:
            return
        spec, batch = self.spec, self.batch
        result, found, _ = flash_attn_varlen_func(
            query, cache.key, cache.value, self.starts, self.key_starts, batch.max_query_len,
            batch.max_seq_len, softmax_scale=spec.scale, causal=spec.causal,
            window_size=window_sizes(spec), softcap=spec.logit_soft_cap or 0.0,
            alibi_slopes=params.alibi_slopes, return_attn_probs=True,
            block_table=batch.block_table,
        )  # fmt: skip
        out.copy_(result)
        store_lse(lse, found)
        blank(self.empty, out, lse)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache

        spec = self.spec
        result, found = flash_attn_with_kvcache(
            query[:, None], cache.key, cache.value, cache_seqlens=self.lens,
            block_table=self.batch.block_table, softmax_scale=spec.scale, causal=spec.causal,
            window_size=decode_window_sizes(spec), softcap=spec.logit_soft_cap or 0.0,
            alibi_slopes=params.alibi_slopes, return_softmax_lse=True,
        )  # fmt: skip
        out.copy_(result[:, 0])
        store_lse(lse, found[:, :, 0].T)
        blank(self.empty, out, lse)
