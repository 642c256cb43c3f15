"""FLASHINFER_TRTLLM: TensorRT-LLM's decode kernels as FlashInfer carries them.

XQA on Hopper and on sm_120, trtllm-gen on sm_100 and sm_103. They read block table and lengths on
the device, so nothing is planned; XQA gives no LSE. Rows of several tokens are for trtllm-gen alone:
XQA wants a packed mask with them. Context (prefill) isn't served: trtllm-gen's kernels for it are
Blackwell's, and TensorRT-LLM's FMHA, which FlashInfer compiles for Hopper, wants keys and values in one
tensor.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    arch_matches,
    blank,
    empty_rows,
    window_sizes,
)
from torch import Tensor

from polyattn_cuda.flashinfer_wrappers import WORKSPACE_BYTES
from polyattn_cuda.outputs import contiguous_after

SEMAPHORE_BYTES = 8 << 20
"""What FlashInfer lets XQA count in, at the start of its workspace."""


class TrtllmPlan(Plan):
    """Which sequences have a token, for the kernels know a token's by its place; which see no key."""

    __slots__ = ("empty", "rows")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.empty, self.rows = empty_rows(batch), batch
        if batch.num_tokens < batch.num_seqs:
            self.rows = batch.part([i for i, count in enumerate(batch.query_lens) if count])


class FlashInferTrtllm(AttentionBackend):
    """One call a layer and step, over the cache as it lies.

    Over 8-bit keys on Hopper it is XQA's general kernel. Hopper's own, which FlashInfer would choose,
    multiplies what lies behind a sequence's end by a weight of zero, and NaN may lie there (0.6.13).
    """

    name: ClassVar[str] = "FLASHINFER_TRTLLM"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))
        assert cache is not None
        self.quantized = cache.item_bytes == 1
        self.by_xqa = self.quantized and arch_matches("sm_90", device.arch)

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Compile XQA's module, where it is XQA that runs."""
        if not arch_matches("sm_100-sm_109", self.device.arch):
            self._xqa()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> TrtllmPlan:
        return TrtllmPlan(batch)

    @contiguous_after
    def run(self, plan: Plan, frame: Frame) -> None:
        assert isinstance(plan, TrtllmPlan) and frame.cache is not None and frame.lse is None
        attend = self._general if self.by_xqa else self._chosen
        attend(plan.rows, frame.query.contiguous(), frame.cache, frame.params, frame.out)
        blank(plan.empty, frame.out, frame.lse)

    def _chosen(
        self, batch: Batch, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor
    ) -> None:
        """Attend by the kernel that FlashInfer chooses."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        assert batch.block_table is not None
        k_scale, v_scale = (params.k_scale, params.v_scale) if self.quantized else (1.0, 1.0)
        trtllm_batch_decode_with_kv_cache(
            query, (cache.key, cache.value), self._counters(),
            batch.block_table.contiguous(), batch.seq_lens, batch.max_seq_len,
            bmm1_scale=self.spec.scale * k_scale, bmm2_scale=v_scale,
            window_left=window_sizes(self.spec)[0], out=out, sinks=params.sinks, kv_layout="NHD",
        )  # fmt: skip

    def _general(
        self, batch: Batch, query: Tensor, cache: KVCache, params: LayerParams, out: Tensor
    ) -> None:
        """Attend by XQA's general kernel: what FlashInfer's function does, but for its choice."""
        spec, table = self.spec, batch.block_table
        assert table is not None
        left, work = window_sizes(spec)[0], self._counters()
        sinks = None if params.sinks is None else params.sinks.view(spec.num_kv_heads, -1)
        # It multiplies logits by `q_scale * kv_scale / sqrt(head_size)`, outputs by `kv_scale`.
        q_scale = spec.scale * params.k_scale / params.v_scale * spec.head_size**0.5
        self._xqa().xqa(
            False, self.num_sms, spec.num_kv_heads, left + 1 if left >= 0 else 0, q_scale,
            out.unsqueeze(1), 1.0, query.unsqueeze(1), sinks, cache.key, cache.value, None, None,
            table.contiguous(), table.shape[1] * cache.block_size, batch.seq_lens.unsqueeze(1),
            batch.num_seqs, params.v_scale, work[:SEMAPHORE_BYTES], work[SEMAPHORE_BYTES:], True, 1,
            None,
        )  # fmt: skip

    def _counters(self) -> Tensor:
        """The kernels count at its start, and write their scratch behind that."""
        return self.workspaces.counters(self.torch_device, WORKSPACE_BYTES)

    @cached_property
    def num_sms(self) -> int:
        """How many multiprocessors XQA may spread a step's keys over."""
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def _xqa(self) -> Any:
        """XQA's module for this layer; FlashInfer compiles each once."""
        from flashinfer.xqa import get_xqa_module

        spec, cache = self.spec, self.cache
        assert cache is not None
        kind = STORAGE_DTYPES[spec.dtype]
        return get_xqa_module(
            kind, STORAGE_DTYPES[cache.dtype], cache.block_size, spec.head_size, spec.gqa_ratio,
            window_sizes(spec)[0] >= 0, kind, 1,
        )  # fmt: skip
