"""CUDNN_ATTENTION: torch's cuDNN kernel; context and new tokens are merged.

Neighbouring sequences of equal lengths are one dense call: an encoder's batch of images, for one.
"""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    AttentionState,
    Batch,
    CacheFormat,
    Frame,
    Plan,
    blank,
    merge_states,
)
from torch import Tensor

from polyattn_cuda.paging import PackedPlan


class CudnnPlan(PackedPlan):
    """And `runs` of neighbours of equal lengths.

    Each is (first sequence, how many, query tokens, keys); those that see nothing are in none.
    """

    __slots__ = ("runs",)

    def __init__(self, batch: Batch, cache: CacheFormat | None, causal: bool):
        super().__init__(batch, cache, causal)
        lengths = list(zip(batch.query_lens, batch.lens, strict=True))
        self.runs: list[tuple[int, int, int, int]] = []
        first = 0
        for (count, length), same in groupby(lengths):
            many = len(list(same))
            if count and length:
                self.runs.append((first, many, count, length))
            first += many


class CudnnAttention(AttentionBackend):
    """Dense calls; a cached context is copied out of its pages."""

    name: ClassVar[str] = "CUDNN_ATTENTION"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> CudnnPlan:
        return CudnnPlan(batch, self.cache, self.spec_of(batch).causal)

    def run(self, plan: CudnnPlan, frame: Frame) -> None:
        key, value, out, lse = frame.key, frame.value, frame.out, frame.lse
        batch, starts = plan.batch, plan.keys.starts
        causal = self.spec_of(batch).causal
        key, value = plan.keys.read(key, value, frame.cache)
        for first, many, count, length in plan.runs:
            # Under a causal mask no more tokens see a key than there are keys.
            seeing = min(count, length) if causal else count
            rows = slice(batch.starts[first], batch.starts[first + many])
            keys = slice(starts[first], starts[first + many])

            def seen(
                tensor: Tensor,
                rows: slice = rows,
                shape: tuple[int, int] = (many, count),
                last: int = seeing,
            ) -> Tensor:
                return tensor[rows].view(*shape, *tensor.shape[1:])[:, shape[1] - last :]

            dense = [t[keys].view(many, length, *t.shape[1:]) for t in (key, value)]
            state = self._sequences(seen(frame.query), dense[0], dense[1], causal)
            if many * seeing == len(out):
                frame.set_out(state.output)
            else:
                seen(out).copy_(state.output.view(many, seeing, *out.shape[1:]))
            if lse is not None:
                seen(lse).copy_(state.lse.view(many, seeing, -1))
        blank(plan.empty, frame.out, lse)

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> AttentionState:
        """Attend in sequences (many, tokens, heads, size); the state is (many * tokens, heads).

        The kernel's causal mask is aligned to the top left, so context is a part of its own.
        """
        if not causal:
            return self._attend(query, key, value, False)
        context = key.shape[1] - query.shape[1]
        state = self._attend(query, key[:, context:], value[:, context:], True)
        if context:
            head = self._attend(query, key[:, :context], value[:, :context], False)
            state = merge_states([head, state])
        return state

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> AttentionState:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=self.spec.scale
        )
        rows = lse.reshape(query.shape[:3]).transpose(1, 2)
        return AttentionState(out.transpose(1, 2).flatten(0, 1), rows.flatten(0, 1))
