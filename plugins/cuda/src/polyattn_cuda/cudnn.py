"""CUDNN_ATTENTION: torch's cuDNN kernel, a sequence at a time; context and new tokens are merged."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    AttentionState,
    Batch,
    CacheFormat,
    KVCache,
    LayerParams,
    Plan,
    blank,
    empty_rows,
    merge_states,
)
from torch import Tensor

from polyattn_cuda.paging import PackedKeys


class CudnnPlan(Plan):
    """Where the keys are, and which tokens see none."""

    __slots__ = ("empty", "keys")

    def __init__(self, batch: Batch, cache: CacheFormat | None, causal: bool):
        super().__init__(batch)
        self.keys, self.empty = PackedKeys(batch, cache), empty_rows(batch, causal)


class CudnnAttention(AttentionBackend):
    """Dense calls; a cached context is copied out of its pages."""

    name: ClassVar[str] = "CUDNN_ATTENTION"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> CudnnPlan:
        return CudnnPlan(batch, self.cache, self.spec_of(batch).causal)

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
        assert isinstance(plan, CudnnPlan)
        batch, starts = plan.batch, plan.keys.starts
        causal = self.spec_of(batch).causal
        key, value = plan.keys.read(key, value, cache)
        for index, count in enumerate(batch.query_lens):
            first, last = starts[index], starts[index + 1]
            end = batch.starts[index + 1]
            # Under a causal mask no more tokens see a key than there are keys.
            seeing = min(count, last - first) if causal else count
            if seeing == 0 or last == first:
                continue
            rows = slice(end - seeing, end)
            state = self._sequence(query[rows], key[first:last], value[first:last], causal)
            out[rows] = state.output
            if lse is not None:
                lse[rows] = state.lse
        blank(plan.empty, out, lse)

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> AttentionState:
        """The kernel's causal mask is aligned to the top left, so context is a part of its own."""
        if not causal:
            return self._attend(query, key, value, False)
        context = len(key) - len(query)
        state = self._attend(query, key[context:], value[context:], True)
        if context:
            head = self._attend(query, key[:context], value[:context], False)
            state = merge_states([head, state])
        return state

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
