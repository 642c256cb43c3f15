"""FLASH_ATTN_V3: FlashAttention-3 on Hopper, paged through one call for prefill and decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.adapters import store_lse, window_sizes
from torch import Tensor

from polyattn_cuda.base import CudaAttention
from polyattn_cuda.providers import fa3_provider, vllm_library

MAX_SPLITS = 32


class FlashAttention3(CudaAttention):
    """A packed ragged batch over pages; the number of splits is fixed where graphs are captured."""

    name: ClassVar[str] = "FLASH_ATTN_V3"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.window, self.cap = window_sizes(spec), spec.logit_soft_cap or 0.0
        self.from_vllm = fa3_provider() == "vllm"
        if self.from_vllm:
            torch.ops.load_library(str(vllm_library("_vllm_fa3_C")))
        else:
            from flash_attn_interface import flash_attn_with_kvcache

            self.kvcache_func = flash_attn_with_kvcache
        index = torch.device(str(device.torch_device))
        self.num_sms = torch.cuda.get_device_properties(index).multi_processor_count

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.starts, self.lens = batch.query_start_loc, batch.seq_lens
        self.splits = 0  # the library decides, by the lengths
        if self.spec.graph_capture:
            programs = max(1, batch.num_seqs * self.spec.num_kv_heads)
            self.splits = min(MAX_SPLITS, max(1, self.num_sms // programs))

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
        assert cache is not None
        if self.batch.num_tokens:
            call = self._vllm if self.from_vllm else self._upstream
            store_lse(lse, call(query, cache, out))

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.forward_prefill(query, None, None, cache, params, out, lse)

    def _vllm(self, query: Tensor, cache: KVCache, out: Tensor) -> Tensor:
        batch = self.batch
        result = torch.ops._vllm_fa3_C.fwd(
            query, cache.key, cache.value, None, None, None, out, self.starts, None, None, None,
            self.lens, batch.max_query_len, batch.max_seq_len, batch.block_table, None, None, None,
            None, None, None, None, None, self.spec.scale, self.spec.causal, *self.window, self.cap,
            True, None, self.splits, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return result[1]

    def _upstream(self, query: Tensor, cache: KVCache, out: Tensor) -> Tensor:
        batch = self.batch
        result, found, *_ = self.kvcache_func(
            query, cache.key, cache.value, cache_seqlens=self.lens, page_table=batch.block_table,
            cu_seqlens_q=self.starts, max_seqlen_q=batch.max_query_len,
            softmax_scale=self.spec.scale, causal=self.spec.causal, window_size=self.window,
            softcap=self.cap, num_splits=self.splits, return_softmax_lse=True,
        )  # fmt: skip
        out.copy_(result)
        return found
