"""FLASH_ATTN_V3: FlashAttention-3 on Hopper, paged through one call for prefill and decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import store_lse, window_sizes
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
        self.scales: dict[tuple[float, float], Tensor] = {}
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
            scales: tuple[Tensor | None, ...] = (None, None, None)
            if cache.key.dtype.itemsize == 1:
                query, scales = self._quantised(query, params)
            store_lse(lse, call(query, cache, out, scales, params.sinks))

    def _quantised(
        self, query: Tensor, params: LayerParams
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Round the query to e4m3 by its own largest value; return it with the three scales."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale = query.abs().amax().float().clamp_min(1e-12) / largest
        rounded = (query / scale).to(torch.float8_e4m3fn)
        key = (params.k_scale, params.v_scale)
        if key not in self.scales:
            self.scales[key] = torch.tensor(key, device=query.device)
        shape = (self.batch.num_seqs, self.spec.num_kv_heads)
        return rounded, tuple(s.expand(shape) for s in (scale, *self.scales[key]))

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.forward_prefill(query, None, None, cache, params, out, lse)

    def _vllm(
        self,
        query: Tensor,
        cache: KVCache,
        out: Tensor,
        scales: tuple[Tensor | None, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        batch = self.batch
        if sinks is not None:
            sinks = sinks.bfloat16()  # as its kernel reads them
        result = torch.ops._vllm_fa3_C.fwd(
            query, cache.key, cache.value, None, None, None, out, self.starts, None, None, None,
            self.lens, batch.max_query_len, batch.max_seq_len, batch.block_table, None, None, None,
            None, None, *scales, self.spec.scale, self.spec.causal, *self.window, self.cap,
            True, None, self.splits, None, 0, sinks, 1, 0, None,
        )  # fmt: skip
        return result[1]

    def _upstream(
        self,
        query: Tensor,
        cache: KVCache,
        out: Tensor,
        scales: tuple[Tensor | None, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        assert sinks is None, "upstream's kernel has no sinks, and its capabilities say so"
        batch = self.batch
        result, found, *_ = self.kvcache_func(
            query, cache.key, cache.value, cache_seqlens=self.lens, page_table=batch.block_table,
            cu_seqlens_q=self.starts, max_seqlen_q=batch.max_query_len,
            softmax_scale=self.spec.scale, causal=self.spec.causal, window_size=self.window,
            softcap=self.cap, num_splits=self.splits, return_softmax_lse=True,
            q_descale=scales[0], k_descale=scales[1], v_descale=scales[2],
        )  # fmt: skip
        out.copy_(result)
        return found
