"""FLASH_ATTN_V4: FlashAttention-4 (CuTe DSL). Prefill only: on Hopper it has no split-KV.

Its paged loads need finite rows behind a sequence's end, which our contract doesn't promise, so
cached sequences are copied out of their pages first; a prompt without context isn't.
"""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import store_lse
from torch import Tensor

from polyattn_cuda.base import CudaAttention
from polyattn_cuda.paging import read_slots, token_slots


class FlashAttention4(CudaAttention):
    """The varlen kernel over packed keys."""

    name: ClassVar[str] = "FLASH_ATTN_V4"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        from flash_attn.cute.interface import flash_attn_varlen_func

        self.func = flash_attn_varlen_func
        window = spec.sliding_window
        self.window = (None, None) if window is None else (window - 1, 0)

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.starts = batch.query_start_loc
        self.fresh = batch.lens == batch.query_lens
        if self.fresh:
            self.key_starts = self.starts
        else:
            starts = [0, *accumulate(batch.lens)]
            self.key_starts = torch.tensor(starts, dtype=torch.int32, device=batch.device)
            self.slots: Tensor | None = None

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
        if not self.fresh or key is None or value is None:
            assert cache is not None
            if self.fresh or self.slots is None:
                self.slots = token_slots(batch, cache.block_size)
            key, value = read_slots(cache, self.slots)
        result, found = self.func(
            query, key, value, cu_seqlens_q=self.starts, cu_seqlens_k=self.key_starts,
            max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
            softmax_scale=self.spec.scale, causal=True, window_size=self.window,
            softcap=self.spec.logit_soft_cap or 0.0, return_lse=lse is not None,
        )  # fmt: skip
        out.copy_(result)
        if lse is not None:
            store_lse(lse, found)
