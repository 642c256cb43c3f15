"""FLASH_ATTN: FlashAttention-2 from whichever package has it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import cumulative, decode_window_sizes, store_lse, window_sizes
from torch import Tensor

from polyattn_cuda.base import CudaAttention
from polyattn_cuda.providers import fa2_provider, vllm_library


class FlashAttention2(CudaAttention):
    """Prefill by the varlen kernel over pages, decode by the KV-cache kernel with split-KV."""

    name: ClassVar[str] = "FLASH_ATTN"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.calls = PROVIDERS[fa2_provider() or ""](spec)

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.starts, self.lens = batch.query_start_loc, batch.seq_lens

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
            found = self.calls.varlen(query, cache, params, out, self.batch)
            store_lse(lse, found)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        found = self.calls.decode(query, cache, params, out, self.batch)
        store_lse(lse, found)


class _Vllm:
    """vLLM's build: its operators write `out` and take pages of 16 tokens."""

    def __init__(self, spec: LayerSpec):
        torch.ops.load_library(str(vllm_library("_vllm_fa2_C")))
        self.spec, self.ops = spec, torch.ops._vllm_fa2_C
        self.window, self.cap = window_sizes(spec), spec.logit_soft_cap or 0.0

    def varlen(
        self, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor, batch: Batch
    ) -> Tensor:
        starts = batch.query_start_loc
        result = self.ops.varlen_fwd(
            _dense(query), cache.key, cache.value, out, starts, torch.zeros_like(starts),
            batch.seq_lens, None, batch.block_table, params.alibi_slopes, batch.max_query_len,
            batch.max_seq_len, 0.0, self.spec.scale, False, self.spec.causal, *self.window,
            self.cap, False, 0, None,
        )  # fmt: skip
        return result[1]

    def decode(
        self, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor, batch: Batch
    ) -> Tensor:
        result = self.ops.fwd_kvcache(
            _dense(query)[:, None], cache.key, cache.value, None, None, batch.seq_lens, None, None,
            None, None, batch.block_table, params.alibi_slopes, out[:, None], self.spec.scale,
            self.spec.causal, *self.window, self.cap, True, 0,
        )  # fmt: skip
        return result[1][:, :, 0].T


class _FlashAttn:
    """The upstream package: returns its output, and pages by 256 tokens."""

    def __init__(self, spec: LayerSpec):
        from flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
        )

        self.window, self.decode_window = window_sizes(spec), decode_window_sizes(spec)
        self.varlen_func: Callable[..., Any] = flash_attn_varlen_func
        self.kvcache_func: Callable[..., Any] = flash_attn_with_kvcache
        self.options = {
            "softmax_scale": spec.scale,
            "causal": spec.causal,
            "softcap": spec.logit_soft_cap or 0.0,
        }

    def varlen(
        self, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor, batch: Batch
    ) -> Tensor:
        lens = cumulative(batch.seq_lens)
        result, found, _ = self.varlen_func(
            query, cache.key, cache.value, batch.query_start_loc, lens, batch.max_query_len,
            batch.max_seq_len, alibi_slopes=params.alibi_slopes, return_attn_probs=True,
            block_table=batch.block_table, window_size=self.window, **self.options,
        )  # fmt: skip
        out.copy_(result)
        return found

    def decode(
        self, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor, batch: Batch
    ) -> Tensor:
        result, found = self.kvcache_func(
            query[:, None], cache.key, cache.value, cache_seqlens=batch.seq_lens,
            block_table=batch.block_table, alibi_slopes=params.alibi_slopes,
            return_softmax_lse=True, window_size=self.decode_window, **self.options,
        )  # fmt: skip
        out.copy_(result[:, 0])
        return found[:, :, 0].T


class _Torch:
    """torch's own build, from the release whose `varlen_attn` reads pages (2.13)."""

    def __init__(self, spec: LayerSpec):
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        if spec.logit_soft_cap is not None or spec.alibi:
            raise NotImplementedError(
                "torch's varlen_attn has neither soft cap nor ALiBi; install flash-attn"
            )
        self.spec, self.func, self.aux = spec, varlen_attn, AuxRequest(lse=True)

    def varlen(
        self, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor, batch: Batch
    ) -> Tensor:
        result, found = self.func(
            query, cache.key, cache.value, batch.query_start_loc, None, batch.max_query_len,
            batch.max_seq_len, return_aux=self.aux, scale=self.spec.scale,
            window_size=window_sizes(self.spec), enable_gqa=self.spec.gqa_ratio > 1,
            seqused_k=batch.seq_lens, block_table=batch.block_table,
        )  # fmt: skip
        out.copy_(result)
        return found

    decode = varlen


PROVIDERS: dict[str, Callable[[LayerSpec], Any]] = {
    "vllm": _Vllm,
    "flash_attn": _FlashAttn,
    "torch": _Torch,
}


def _dense(query: Tensor) -> Tensor:
    return query if query.stride(-1) == 1 else query.contiguous()
