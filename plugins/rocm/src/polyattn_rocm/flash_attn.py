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
    cumulative,
    decode_window_sizes,
    empty_rows,
    store_lse,
    window_sizes,
)

from polyattn_rocm.keys import GivenKeys, keys_of, longest_query

SHORT = 16
"""Query tokens up to which the KV-cache kernel runs: it splits the keys, the varlen one doesn't."""


class CkPlan(Plan):
    """Where the keys are and which tokens see none; `short` rows run by the KV-cache kernel."""

    __slots__ = ("empty", "key_starts", "keys", "short")

    def __init__(self, batch: Batch, cached: bool, causal: bool):
        super().__init__(batch)
        self.short = UniformRows(batch) if cached and batch.max_query_len <= SHORT else None
        self.keys = None if cached else GivenKeys(batch)
        self.key_starts = cumulative(batch.seq_lens) if cached else batch.key_start_loc
        self.empty = empty_rows(batch, causal)


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
        key, value = keys_of(plan.keys, frame)
        result, lse, _ = flash_attn_varlen_func(
            frame.query, key, value, batch.query_start_loc, plan.key_starts, longest_query(batch),
            batch.max_seq_len, softmax_scale=spec.scale, causal=spec.causal,
            window_size=window_sizes(spec), softcap=spec.logit_soft_cap or 0.0,
            alibi_slopes=frame.params.alibi_slopes, return_attn_probs=True,
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
            window_size=sizes(spec), softcap=spec.logit_soft_cap or 0.0,
            alibi_slopes=frame.params.alibi_slopes, return_softmax_lse=True,
        )  # fmt: skip
        frame.set_out(rows.collect(result))
        store_lse(frame.lse, rows.collect(lse.transpose(1, 2)).T)
