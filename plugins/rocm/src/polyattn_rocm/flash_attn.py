"""ROCM_FLASH_ATTN: the ROCm build of flash-attn, on Composable Kernel."""

from __future__ import annotations

from typing import ClassVar

from polyattn.kernel import (
    AttentionBackend,
    Batch,
    Frame,
    KVCache,
    Plan,
    UniformRows,
    blank,
    decode_window_sizes,
    store_lse,
    window_sizes,
)

from polyattn_rocm.keys import KeysPlan

SHORT = 16
"""Query tokens up to which the KV-cache kernel runs: it splits the keys, the varlen one doesn't."""


class CkPlan(KeysPlan):
    """`short` rows run by the KV-cache kernel."""

    __slots__ = ("short",)

    def __init__(self, batch: Batch, cached: bool, causal: bool):
        super().__init__(batch, cached, causal)
        self.short = UniformRows(batch) if cached and batch.max_query_len <= SHORT else None


class CkFlashAttention(AttentionBackend):
    """Long queries by the varlen kernel over pages or given keys, short ones by the KV-cache kernel."""

    name: ClassVar[str] = "ROCM_FLASH_ATTN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> CkPlan:
        return CkPlan(batch, self.cache is not None, self.spec_of(batch).causal)

    def run(self, plan: CkPlan, frame: Frame) -> None:
        cache = frame.cache
        if not plan.batch.num_tokens:
            return
        if plan.short is not None and cache is not None:
            self._short(plan, plan.short, frame, cache)
        else:
            self._varlen(plan, frame)
        blank(plan.empty, frame.out, frame.lse)

    def _varlen(self, plan: CkPlan, frame: Frame) -> None:
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        spec, batch, cache = self.spec_of(plan.batch), plan.batch, frame.cache
        key, value = plan.keys(frame)
        result, lse, _ = flash_attn_varlen_func(
            frame.query, key, value, batch.query_start_loc, plan.key_starts, plan.longest,
            batch.max_seq_len, softmax_scale=spec.scale, causal=spec.causal,
            window_size=window_sizes(spec), alibi_slopes=frame.params.alibi_slopes,
            return_attn_probs=True,
            block_table=None if cache is None else batch.block_table,
        )  # fmt: skip
        frame.set_out(result)
        store_lse(frame.lse, lse)

    def _short(self, plan: CkPlan, rows: UniformRows, frame: Frame, cache: KVCache) -> None:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache

        spec, batch = self.spec_of(plan.batch), plan.batch
        sizes = decode_window_sizes if batch.max_query_len == 1 else window_sizes
        result, lse = flash_attn_with_kvcache(
            rows.spread(frame.query), cache.key, cache.value, cache_seqlens=batch.seq_lens,
            block_table=batch.block_table, softmax_scale=spec.scale, causal=spec.causal,
            window_size=sizes(spec), alibi_slopes=frame.params.alibi_slopes,
            return_softmax_lse=True,
        )  # fmt: skip
        frame.set_out(rows.collect(result))
        store_lse(frame.lse, rows.collect(lse.transpose(1, 2)).T)
