"""FLASH_ATTN_V3: FlashAttention-3 on Hopper, paged or packed, one call for prefill and decode."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    store_lse,
    upload,
    window_sizes,
    with_sinks,
)
from torch import Tensor

from polyattn_cuda.outputs import quantized_after
from polyattn_cuda.paging import PackedKeys, ragged
from polyattn_cuda.providers import vllm_library
from polyattn_cuda.splits import captured_splits, capturing

SHORT = 16
"""Query tokens up to which keys are split by a captured step, as decodes' are."""
MOST_SINKS = 64
"""Query heads up to which vLLM's build reads sinks."""
Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
OfStep = tuple[Tensor | None, Tensor | None]
"""The lengths by which a window's blocks are masked, and the order in which tiles are taken."""


class Flash3Plan(Plan):
    """`splits`: 0 lets the library decide by the lengths. `keys` where the layer has no cache.

    `seq_of` int64 (num_tokens,): each token's sequence, where queries are scaled by sequence; None
    where every sequence has one token. `of_step`: what the first layer's call made for the others.
    """

    __slots__ = ("keys", "of_step", "seq_of", "splits")

    def __init__(
        self, batch: Batch, cache: CacheFormat | None, splits: int, into: Tensor | None = None
    ):
        super().__init__(batch)
        self.splits = splits
        self.keys = PackedKeys(batch, None) if cache is None else None
        self.seq_of: Tensor | None = None
        self.of_step: OfStep | None = None
        if cache is not None and cache.item_bytes == 1 and not batch.all_decode:
            self.seq_of = upload(ragged(np.asarray(batch.query_lens))[0], batch.device, into)


class FlashAttention3(AttentionBackend):
    """A packed ragged batch; the number of splits is fixed where graphs are captured."""

    name: ClassVar[str] = "FLASH_ATTN_V3"
    reads_tensors = False

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.cap = spec.logit_soft_cap or 0.0
        index = torch.device(str(device.torch_device))
        self.scales: dict[float, Tensor] = {}
        self.rounded: Any = None
        if cache is not None and cache.item_bytes == 1:
            # Imported where it is needed: it brings Triton.
            from polyattn_cuda.query_rounding import rounded_query

            self.rounded = rounded_query
        self.num_sms = torch.cuda.get_device_properties(index).multi_processor_count

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Flash3Plan:
        splits = 0
        if self.spec.batch_invariant:  # with another number the batch would decide where it splits
            splits = 1
        elif self.spec.graph_capture and batch.max_query_len <= SHORT and not batch.num_contexts:
            splits = captured_splits(self.num_sms, batch.num_seqs * self.spec.num_kv_heads)
        elif batch.lens_are_bounds:
            splits = 1
        into = reuse.seq_of if isinstance(reuse, Flash3Plan) else None
        batch.lengths_at()  # which the first call would copy apart
        return Flash3Plan(batch, self.cache, splits, into)

    @quantized_after
    def run(self, plan: Flash3Plan, frame: Frame) -> None:
        query, cache, params, inner = frame.query, frame.cache, frame.params, frame
        if not plan.batch.num_tokens:
            return
        scales: Scales = (None, None, None)
        if cache is None:
            assert plan.keys is not None
            key, value = plan.keys.read(frame.key, frame.value, None)
            inner = frame.but(key=key, value=value)
        elif cache.key.dtype.itemsize == 1:
            shape = (plan.batch.num_seqs, self.spec.num_kv_heads)
            if query.dtype.itemsize == 1:
                of_query = self._each(params.q_scale, shape, query.device)
            else:
                rounded, of_query = self.rounded(query, shape[1], shape[0], plan.seq_of)
                inner = frame.but(query=rounded)
            scales = (
                of_query,
                self._each(params.k_scale, shape, query.device),
                self._each(params.v_scale, shape, query.device),
            )
        result, lse = self.attend(plan, inner, scales)
        frame.set_out(result)
        store_lse(frame.lse, lse)

    def _each(self, scale: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return a scale as the library reads it, float32 (num_seqs, num_kv_heads): a view."""
        if not isinstance(scale, Tensor):
            if scale not in self.scales:
                self.scales[scale] = torch.tensor(scale, dtype=torch.float32, device=device)
            scale = self.scales[scale]
        return scale.expand(shape)  # type: ignore[no-any-return]

    @abstractmethod
    def attend(self, plan: Flash3Plan, frame: Frame, scales: Scales) -> tuple[Tensor, Tensor]:
        """Attend over the cache or packed keys.

        Returns the output, the frame's where that was written, and the LSE (heads, tokens).
        """


class VllmFlashAttention3(FlashAttention3):
    """vLLM's build: its operator writes `out` and reads sinks, as bf16."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        torch.ops.load_library(str(vllm_library("_vllm_fa3_C")))

    def attend(self, plan: Flash3Plan, frame: Frame, scales: Scales) -> tuple[Tensor, Tensor]:
        batch, spec = plan.batch, self.spec_of(plan.batch)
        key, value, cache, sinks = frame.key, frame.value, frame.cache, frame.params.sinks
        key_starts, lens, table = batch.key_start_loc if cache is None else None, None, None
        if cache is not None:
            key, value, lens, table = cache.key, cache.value, batch.seq_lens, batch.block_table
        left, right = window_sizes(spec)
        masked, schedule = self._of_step(plan, frame, left, right)
        after = None
        if spec.num_heads > MOST_SINKS:
            sinks, after = after, sinks
        result = torch.ops._vllm_fa3_C.fwd(
            frame.query, key, value, None, None, None, frame.out, batch.query_start_loc, key_starts,
            None, None, lens, batch.max_query_len, batch.max_seq_len, table, None, None, None, None, None,
            *scales, spec.scale, spec.causal, left, right, self.cap, True, schedule,
            plan.splits, None, 0, None if sinks is None else sinks.bfloat16(), 1, 0, masked,
        )  # fmt: skip
        lse: Tensor = result[1]
        if after is not None:  # the library's LSE of a row without keys is inf
            output, total = with_sinks(frame.out, lse.where(lse != torch.inf, -torch.inf).T, after)
            return output, total.T
        return frame.out, lse

    def _of_step(self, plan: Flash3Plan, frame: Frame, left: int, right: int) -> OfStep:
        """Return what is made once a step; each call in a graph masks and schedules for itself.

        The keys of a tile count from its window's first. Since vllm-project/flash-attention#93 the
        blocks to mask count from the sequence's first, so rows see later keys where blocks of keys
        don't divide the window. Of a length of at most 0 all blocks are masked.
        """
        changes = self.spec.length_bounds or capturing()
        if plan.of_step is not None and not changes:
            return plan.of_step
        masked, lens = None, plan.batch.seq_lens
        if left >= 0 and plan.batch.max_query_len > 1:
            masked = torch.where(lens > left + 1, -right, lens)
        if changes or frame.cache is None:
            return masked, None
        page = frame.cache.key.shape[1]
        plan.of_step = masked, self._schedule(plan, frame.query.dtype, page, left, right)
        return plan.of_step

    def _schedule(
        self, plan: Flash3Plan, dtype: torch.dtype, page: int, left: int, right: int
    ) -> Tensor:
        """Return the operator's own schedule over pages, which a call without one makes anew."""
        batch, spec = plan.batch, self.spec_of(plan.batch)
        rows = batch.num_seqs, batch.max_query_len, batch.max_seq_len
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size
        lens = batch.seq_lens, batch.query_start_loc, None, None, None, None
        mask = spec.causal, left, right, self.cap > 0
        make = torch.ops._vllm_fa3_C.get_scheduler_metadata
        schedule: Tensor = make(*rows, *sizes, dtype, *lens, page, 0, *mask, plan.splits, None, 0)
        return schedule


class UpstreamFlashAttention3(FlashAttention3):
    """flash-attn's hopper folder: returns its output, knows no sinks."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        from flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

        self.kvcache_func, self.varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
        self.options: dict[str, Any] = {"softmax_scale": spec.scale, "softcap": self.cap}

    def attend(self, plan: Flash3Plan, frame: Frame, scales: Scales) -> tuple[Tensor, Tensor]:
        batch, spec, cache = plan.batch, self.spec_of(plan.batch), frame.cache
        masks = {"causal": spec.causal, "window_size": window_sizes(spec)}
        if cache is None:
            result, lse = self.varlen_func(
                frame.query, frame.key, frame.value, batch.query_start_loc, batch.key_start_loc,
                batch.max_query_len, batch.max_seq_len, return_attn_probs=True, **masks, **self.options,
            )  # fmt: skip
        else:
            result, lse, *_ = self.kvcache_func(
                frame.query, cache.key, cache.value, cache_seqlens=batch.seq_lens,
                page_table=batch.block_table, cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len, num_splits=plan.splits, return_softmax_lse=True,
                q_descale=scales[0], k_descale=scales[1], v_descale=scales[2],
                **masks, **self.options,
            )  # fmt: skip
        return result, lse
