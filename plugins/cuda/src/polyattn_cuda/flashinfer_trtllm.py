"""FLASHINFER_TRTLLM: TensorRT-LLM's decode kernels as FlashInfer carries them.

XQA on Hopper and on sm_120, trtllm-gen on sm_100 and sm_103. They read block table and lengths on
the device, so nothing is planned; XQA gives no LSE. Rows of several tokens are for trtllm-gen alone:
XQA wants a packed mask with them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    blank,
    empty_rows,
    window_sizes,
)
from torch import Tensor

from polyattn_cuda.workspaces import zeroed_workspace


class TrtllmPlan(Plan):
    """Which tokens see no key."""

    __slots__ = ("empty",)

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.empty = empty_rows(batch)


class FlashInferTrtllm(AttentionBackend):
    """One call a layer and step, over the cache as it lies."""

    name: ClassVar[str] = "FLASHINFER_TRTLLM"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))

    def plan(self, batch: Batch, reuse: Plan | None = None) -> TrtllmPlan:
        return TrtllmPlan(batch)

    def run(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        assert isinstance(plan, TrtllmPlan) and cache is not None and lse is None
        spec, batch = self.spec, plan.batch
        assert batch.block_table is not None
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
        blank(plan.empty, out, lse)
