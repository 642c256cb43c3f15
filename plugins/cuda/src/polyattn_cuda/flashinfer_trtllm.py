"""FLASHINFER_TRTLLM: TensorRT-LLM's decode kernels as FlashInfer carries them.

XQA on Hopper and on sm_120, trtllm-gen on sm_100 and sm_103. They read block table and lengths on
the device, so nothing is planned; XQA gives no LSE.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import blank, empty_rows, window_sizes
from torch import Tensor

from polyattn_cuda.base import CudaAttention, zeroed_workspace


class FlashInferTrtllm(CudaAttention):
    """One call a layer and step, over the cache as it lies."""

    name: ClassVar[str] = "FLASHINFER_TRTLLM"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.torch_device = torch.device(str(device.torch_device))

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.empty = empty_rows(batch)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        spec, batch = self.spec, self.batch
        assert batch.block_table is not None and lse is None
        # The kernels are given addresses alone: what isn't contiguous goes by a copy.
        whole = out if out.is_contiguous() else torch.empty_like(
            out, memory_format=torch.contiguous_format
        )  # fmt: skip
        trtllm_batch_decode_with_kv_cache(
            query.contiguous(), (cache.key, cache.value), zeroed_workspace(self.torch_device),
            batch.block_table.contiguous(), batch.seq_lens, batch.max_seq_len,
            bmm1_scale=spec.scale, window_left=window_sizes(spec)[0], out=whole, sinks=params.sinks,
            kv_layout="NHD",
        )  # fmt: skip
        if whole is not out:
            out.copy_(whole)
        blank(self.empty, out, lse)
