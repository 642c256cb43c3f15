"""FLASH_ATTN_MLA: FlashAttention-3 with a second query: rope parts as q and k, latents as q_v and v."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from polyattn.kernel import Batch, CacheFormat, Device, Frame, LayerSpec, Plan, blank, store_lse
from torch import Tensor

from polyattn_cuda.latent import LatentAdapter, LatentPlan
from polyattn_cuda.providers import vllm_library
from polyattn_cuda.splits import captured_splits

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""A query's rope part and latent part, and likewise the cache's."""
TILE_HEADS = 64
"""Heads of a token that one of its programs takes."""


class SplitPlan(LatentPlan):
    """The number of parts of each sequence's keys; 0: the library decides by the lengths."""

    __slots__ = ("splits",)

    splits: int


class FlashAttentionMLA(LatentAdapter):
    """A packed ragged batch over pages, causal; how far keys are split is fixed in captured steps."""

    name: ClassVar[str] = "FLASH_ATTN_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.num_sms = 0
        if spec.graph_capture:
            facts = torch.cuda.get_device_properties(self.torch_device)
            self.num_sms = facts.multi_processor_count

    def plan(self, batch: Batch, reuse: Plan | None = None) -> SplitPlan:
        plan = SplitPlan(batch, reuse)
        plan.splits = 0
        if self.num_sms:
            programs = batch.num_tokens * -(-self.spec.num_heads // TILE_HEADS)
            plan.splits = captured_splits(self.num_sms, programs)
        return plan

    def run(self, plan: Plan, frame: Frame) -> None:
        cache = frame.cache
        assert isinstance(plan, SplitPlan) and cache is not None
        latent, rope = frame.query[..., : self.rank], frame.query[..., self.rank :]
        parts = rope, latent, cache.key[..., self.rank :], cache.value
        store_lse(frame.lse, self.attend(plan, parts, frame))
        blank(plan.empty, frame.out, frame.lse)

    @abstractmethod
    def attend(self, plan: SplitPlan, parts: Parts, frame: Frame) -> Tensor:
        """Write the frame's output (tokens, heads, 512); returns the LSE (heads, tokens)."""


class VllmFlashAttentionMLA(FlashAttentionMLA):
    """vLLM's build of FlashAttention-3."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        torch.ops.load_library(str(vllm_library("_vllm_fa3_C")))

    def attend(self, plan: SplitPlan, parts: Parts, frame: Frame) -> Tensor:
        batch, (rope, latent, rope_keys, latents) = plan.batch, parts
        return torch.ops._vllm_fa3_C.fwd(  # type: ignore[no-any-return]
            rope, rope_keys, latents, None, None, latent, frame.out, batch.query_start_loc, None, None,
            None, batch.seq_lens, batch.max_query_len, batch.max_seq_len, batch.block_table, None,
            None, None, None, None, None, None, None, self.spec.scale, True, -1, -1, 0.0, True,
            None, plan.splits, None, 0, None, 1, 0, None,
        )[1]  # fmt: skip


class UpstreamFlashAttentionMLA(FlashAttentionMLA):
    """flash-attn's hopper folder."""

    def attend(self, plan: SplitPlan, parts: Parts, frame: Frame) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        batch, (rope, latent, rope_keys, latents) = plan.batch, parts
        result, lse, *_ = flash_attn_with_kvcache(
            rope, rope_keys, latents, qv=latent, cache_seqlens=batch.seq_lens,
            page_table=batch.block_table, cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len, softmax_scale=self.spec.scale, causal=True,
            num_splits=plan.splits, return_softmax_lse=True,
        )  # fmt: skip
        frame.set_out(result)
        return lse  # type: ignore[no-any-return]
