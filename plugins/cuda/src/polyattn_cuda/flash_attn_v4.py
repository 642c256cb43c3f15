"""FLASH_ATTN_V4: FlashAttention-4 (CuTe DSL). Prefill only: on Hopper it has no split-KV.

Its paged loads need finite rows behind a sequence's end (Dao-AILab/flash-attention#2374), which our
contract doesn't promise, so cached sequences are copied out of their pages first; a prompt without
context isn't.
"""

from __future__ import annotations

from typing import ClassVar

from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    blank,
    store_lse,
    window_sizes,
)

from polyattn_cuda.paging import PackedPlan


class FlashAttention4(AttentionBackend):
    """The varlen kernel over packed keys."""

    name: ClassVar[str] = "FLASH_ATTN_V4"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        from flash_attn.cute.interface import flash_attn_varlen_func

        self.func = flash_attn_varlen_func
        left, right = window_sizes(spec)
        self.window = (None, None) if left < 0 else (left, right)  # causal has a flag of its own

    def plan(self, batch: Batch, reuse: Plan | None = None) -> PackedPlan:
        return PackedPlan(batch, self.cache, self.spec_of(batch).causal)

    def run(self, plan: PackedPlan, frame: Frame) -> None:
        key, value, lse = frame.key, frame.value, frame.lse
        batch = plan.batch
        if not batch.num_tokens:
            return
        key, value = plan.keys.read(key, value, frame.cache)
        if plan.keys.total:
            result, row_lse = self.func(
                frame.query, key, value, cu_seqlens_q=batch.query_start_loc,
                cu_seqlens_k=batch.key_start_loc, max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len, softmax_scale=self.spec.scale,
                causal=self.spec_of(batch).causal, window_size=self.window,
                softcap=self.spec.logit_soft_cap or 0.0, return_lse=lse is not None,
            )  # fmt: skip
            frame.set_out(result)
            if lse is not None:
                store_lse(lse, row_lse)
        blank(plan.empty, frame.out, lse)
