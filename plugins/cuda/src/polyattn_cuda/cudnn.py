"""CUDNN_ATTENTION: torch's cuDNN kernel, a sequence at a time; context and new tokens are merged."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import torch
from polyattn import AttentionState, Batch, KVCache, LayerParams, merge_states
from torch import Tensor

from polyattn_cuda.base import CudaAttention
from polyattn_cuda.paging import read_slots, token_slots


class CudnnAttention(CudaAttention):
    """Dense calls; a cached context is copied out of its pages."""

    name: ClassVar[str] = "CUDNN_ATTENTION"

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.key_starts = [0, *accumulate(batch.lens)]
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
        fresh = batch.lens == batch.query_lens and key is not None
        if fresh:
            starts = batch.starts
        else:
            assert cache is not None
            if self.slots is None:
                self.slots = token_slots(batch, cache.block_size)
            key, value = read_slots(cache, self.slots)
            starts = self.key_starts
        assert key is not None and value is not None
        for index, count in enumerate(batch.query_lens):
            if count == 0:
                continue
            rows = slice(batch.starts[index], batch.starts[index + 1])
            first, last = starts[index], starts[index + 1]
            state = self._attend(
                query[rows], key[last - count : last], value[last - count : last], True
            )
            if last - first > count:
                context = slice(first, last - count)
                head = self._attend(query[rows], key[context], value[context], False)
                state = merge_states([head, state])
            out[rows] = state.output
            if lse is not None:
                lse[rows] = state.lse

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> AttentionState:
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            None,
            True,
            0.0,
            causal,
            False,
            scale=self.spec.scale,
        )
        return AttentionState(result[0][0].transpose(0, 1), result[1][0].view(query.shape[1], -1).T)
