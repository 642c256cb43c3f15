"""XPU_FLASH_ATTN: vllm-xpu-kernels' varlen FlashAttention, over pages or given keys."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    Frame,
    Plan,
    blank,
    cumulative,
    decode_window_sizes,
    empty_rows,
    store_lse,
)
from torch import Tensor


class VarlenPlan(Plan):
    """Tokens that see no key, and where keys that are passed whole start."""

    __slots__ = ("empty", "key_starts")

    def __init__(self, batch: Batch, cached: bool, causal: bool):
        super().__init__(batch)
        self.empty = empty_rows(batch, causal)
        self.key_starts: Tensor | None = None if cached else cumulative(batch.seq_lens)


class VarlenAttention(AttentionBackend):
    """Prefill and decode are one function, which chooses its kernel by the longest query."""

    name: ClassVar[str] = "XPU_FLASH_ATTN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> VarlenPlan:
        return VarlenPlan(batch, self.cache is not None, self.spec_of(batch).causal)

    def run(self, plan: VarlenPlan, frame: Frame) -> None:
        from vllm_xpu_kernels.flash_attn_interface import flash_attn_varlen_func

        cache, batch, params = frame.cache, plan.batch, frame.params
        spec, key, value = self.spec_of(batch), frame.key, frame.value
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if not batch.num_tokens:
            return
        table = None
        if cache is not None:
            assert batch.block_table is not None
            table = batch.block_table.contiguous()  # its kernels go by the number of columns
            key, value = cache.key, cache.value
            if key.dtype != frame.query.dtype:
                scales = self._scale(params.k_scale, batch), self._scale(params.v_scale, batch)
        else:
            assert key is not None and value is not None
            key, value = key[batch.key_rows], value[batch.key_rows]
        # Any bound, even a causal mask's, asks for kernels of windows, of which its wheels have few.
        # Its kernel for single tokens returns no LSE. Where one is asked for, all rows are a prefill's.
        whole = frame.lse is not None
        result = flash_attn_varlen_func(
            frame.query, key, value, max(2 if whole else 1, batch.max_query_len),
            batch.query_start_loc, batch.max_seq_len, cu_seqlens_k=plan.key_starts,
            seqused_k=None if cache is None else batch.seq_lens, softmax_scale=spec.scale,
            causal=spec.causal, window_size=list(decode_window_sizes(spec)),
            block_table=table, return_softmax_lse=whole,
            k_descale=scales[0], v_descale=scales[1], is_mix_batch=not whole,
            s_aux=None if params.sinks is None else params.sinks.to(frame.query.dtype),
        )  # fmt: skip
        frame.set_out(result[0] if whole else result)
        if frame.lse is not None:
            store_lse(frame.lse, result[1])
        blank(plan.empty, frame.out, frame.lse)

    def _scale(self, value: float, batch: Batch) -> Tensor:
        """Return a scale as the library takes it: a view of one number."""
        number = torch.tensor(value, dtype=torch.float32, device=batch.device)
        return number.expand(batch.num_seqs, self.spec.num_kv_heads)
