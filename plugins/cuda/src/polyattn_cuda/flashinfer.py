"""FLASHINFER: FlashInfer's wrappers. Planned once a step; its LSE is in base 2.

Prompts without context are attended to as they come (its ragged wrapper), all else in pages.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import blank, empty_rows, window_sizes
from polyattn.runtime.kv_cache import STORAGE_DTYPES
from torch import Tensor

from polyattn_cuda.base import CudaAttention, workspace
from polyattn_cuda.paging import page_lists


class FlashInferAttention(CudaAttention):
    """Two wrappers for prefill and one for decode; for graphs one decode wrapper a batch size."""

    name: ClassVar[str] = "FLASHINFER"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.torch_device = torch.device(str(device.torch_device))
        self.dtype = STORAGE_DTYPES[spec.dtype]
        self.kv_dtype = STORAGE_DTYPES[spec.stored_dtype]
        self.quantized = self.kv_dtype.itemsize == 1
        # Each cached page is read once whatever the group; from four heads on, tensor cores are
        # what keeps up with the memory.
        self.tensor_cores = spec.gqa_ratio >= 4
        self._paged: Any = None
        self._ragged: Any = None
        self._decode: dict[int, Any] = {}
        self._pages: dict[int, int] = {}

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self._block_size: int | None = None
        self._ragged_planned = False
        self._empty = empty_rows(batch)
        decode = batch.num_decodes == batch.num_seqs
        if decode and self.spec.graph_capture and batch.num_seqs in self._decode:
            # A captured graph reads this wrapper's buffers: they must hold the new step before
            # it is replayed, and the block size is known from the capture.
            self._plan_decode(self._pages[batch.num_seqs])

    def _options(self) -> dict[str, Any]:
        """Return what every plan is told."""
        spec = self.spec
        return {
            "window_left": window_sizes(spec)[0],
            "logits_soft_cap": spec.logit_soft_cap, "sm_scale": spec.scale,
            "q_data_type": self.dtype, "kv_data_type": self.kv_dtype,
        }  # fmt: skip

    def _plan_decode(self, block_size: int) -> Any:
        batch, spec = self.batch, self.spec
        indptr, indices, last = page_lists(batch, block_size)
        wrapper = self._decode_wrapper(len(indices))
        wrapper.plan(
            indptr, indices, last, spec.num_heads, spec.num_kv_heads, spec.head_size, block_size,
            **self._options(),
        )  # fmt: skip
        self._block_size = block_size
        return wrapper

    def _decode_wrapper(self, pages: int) -> Any:
        import flashinfer

        make, count = flashinfer.BatchDecodeWithPagedKVCacheWrapper, self.batch.num_seqs
        buffer = workspace(self.torch_device)
        if not self.spec.graph_capture:
            if 0 not in self._decode:
                self._decode[0] = make(buffer, "NHD", use_tensor_cores=self.tensor_cores)
            return self._decode[0]
        if count not in self._decode:

            def ints(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self.torch_device)

            self._decode[count] = make(
                buffer, "NHD", use_cuda_graph=True, use_tensor_cores=self.tensor_cores,
                paged_kv_indptr_buffer=ints(count + 1), paged_kv_indices_buffer=ints(pages),
                paged_kv_last_page_len_buffer=ints(count),
            )  # fmt: skip
        return self._decode[count]

    def _plan_paged(self, block_size: int) -> None:
        import flashinfer

        batch, spec = self.batch, self.spec
        if self._paged is None:
            self._paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(self.torch_device), "NHD", backend="fa2" if self.quantized else "auto"
            )
        indptr, indices, last = page_lists(batch, block_size)
        self._paged.plan(
            torch.tensor(batch.starts, dtype=torch.int32), indptr, indices, last, spec.num_heads,
            spec.num_kv_heads, spec.head_size, block_size, causal=spec.causal, **self._options(),
        )  # fmt: skip
        self._block_size = block_size

    def _plan_ragged(self) -> None:
        import flashinfer

        spec = self.spec
        if self._ragged is None:
            self._ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace(self.torch_device), "NHD"
            )
        starts = torch.tensor(self.batch.starts, dtype=torch.int32)
        self._ragged.plan(
            starts, starts, spec.num_heads, spec.num_kv_heads, spec.head_size, causal=spec.causal,
            **self._options(),
        )  # fmt: skip
        self._ragged_planned = True

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
        batch = self.batch
        if not batch.num_tokens:
            return
        packed = batch.lens == batch.query_lens and not self.quantized and key is not None
        if cache is not None and not packed:
            if self._block_size != cache.block_size:
                self._plan_paged(cache.block_size)
            self._run(self._paged, query, (cache.key, cache.value), params, out, lse)
            return
        if not self._ragged_planned:
            self._plan_ragged()
        self._run(self._ragged, query, (key, value), params, out, lse)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if self._block_size != cache.block_size:
            self._plan_decode(cache.block_size)
            self._pages[self.batch.num_seqs] = cache.block_size
        wrapper = self._decode[self.batch.num_seqs if self.spec.graph_capture else 0]
        self._run(wrapper, query, (cache.key, cache.value), params, out, lse)

    def _run(
        self,
        wrapper: Any,
        query: Tensor,
        stored: tuple[Tensor | None, Tensor | None],
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        scales = {"k_scale": params.k_scale, "v_scale": params.v_scale} if self.quantized else {}
        keys = stored if wrapper is self._ragged else (stored,)
        wrapper.run(
            query.contiguous(), *keys, out=out, lse=lse, return_lse=lse is not None, **scales
        )
        if lse is not None:
            lse.mul_(math.log(2.0))
        blank(self._empty, out, lse)  # older releases say -5e4 where nothing was attended to
