"""FLASH_ATTN: FlashAttention-2, from whichever package brings it; a class for each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerSpec,
    Plan,
    UniformRows,
    cumulative,
    decode_window_sizes,
    store_lse,
    window_sizes,
)
from torch import Tensor

from polyattn_cuda.paging import PackedKeys
from polyattn_cuda.providers import vllm_library
from polyattn_cuda.splits import captured_splits

SHORT = 16
"""Query tokens up to which the KV-cache kernel runs. It splits the keys; the varlen one doesn't."""


class FlashPlan(Plan):
    """`short` rows over a cache, or varlen with `keys`; `longest` is told to the varlen kernel.

    At least 2: told of single tokens, a kernel folds the heads of a group into rows and takes one token
    of each sequence for granted (Dao-AILab/flash-attention#1537). `splits` of short rows'
    keys: 0 lets the library decide, by the block table's width.
    """

    __slots__ = ("keys", "longest", "short", "splits")

    def __init__(self, batch: Batch, cache: CacheFormat | None, short: bool, splits: int):
        super().__init__(batch)
        self.splits = splits
        self.short = UniformRows(batch) if short else None
        self.keys = PackedKeys(batch, None) if cache is None else None
        self.longest = max(2, batch.max_query_len)


class FlashAttention2(AttentionBackend):
    """Long queries by the varlen kernel over pages or given keys, short ones by the split-KV kernel."""

    name: ClassVar[str] = "FLASH_ATTN"
    splits_short: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.num_sms = 0
        if spec.graph_capture:
            index = torch.device(str(device.torch_device))
            self.num_sms = torch.cuda.get_device_properties(index).multi_processor_count

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FlashPlan:
        short = self.splits_short and self.cache is not None and batch.max_query_len <= SHORT
        splits = 0
        if self.num_sms:  # a captured step's table is wider than an eager one's
            splits = captured_splits(self.num_sms, batch.num_seqs * self.spec.num_kv_heads)
        return FlashPlan(batch, self.cache, short, splits)

    def run(self, plan: FlashPlan, frame: Frame) -> None:
        if not plan.batch.num_tokens:
            return
        query, out, rows = frame.query, frame.out, plan.short
        inner = frame.but(query=query if query.stride(-1) == 1 else query.contiguous())
        if rows is None or frame.cache is None:
            if plan.keys is not None:
                inner.key, inner.value = plan.keys.read(frame.key, frame.value, None)
            result, lse = self.varlen(plan, inner)
            frame.set_out(result)
            store_lse(frame.lse, lse)
            return
        inner.query = query = rows.spread(inner.query)
        shape = *query.shape[:3], frame.cache.value.shape[3]
        inner.out = out.unflatten(0, rows.shape) if rows.uniform else query.new_empty(shape)
        result, lse = self.split(plan, inner, frame.cache)
        if not rows.uniform or result.data_ptr() != out.data_ptr():
            frame.set_out(rows.collect(result))
        store_lse(frame.lse, rows.collect(lse.transpose(1, 2)).T)

    @abstractmethod
    def varlen(self, plan: FlashPlan, frame: Frame) -> tuple[Tensor, Tensor]:
        """Attend for packed queries over the cache, or over packed keys.

        Returns the output, the frame's where that was written, and the LSE (num_heads, num_tokens).
        """

    @abstractmethod
    def split(self, plan: FlashPlan, frame: Frame, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Attend for queries (num_seqs, tokens, num_heads, head_size) over the cache.

        Returns the output, the frame's where that was written, and the LSE (num_seqs, num_heads,
        tokens).
        """


class VllmFlashAttention2(FlashAttention2):
    """vLLM's build: its operators write `out` and take pages of 16 tokens."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        torch.ops.load_library(str(vllm_library("_vllm_fa2_C")))
        self.ops = torch.ops._vllm_fa2_C
        self.cap = spec.logit_soft_cap or 0.0

    def varlen(self, plan: FlashPlan, frame: Frame) -> tuple[Tensor, Tensor]:
        batch, starts = plan.batch, plan.batch.query_start_loc
        spec, key, value, cache = self.spec_of(batch), frame.key, frame.value, frame.cache
        if cache is None:
            where: tuple[Any, ...] = (batch.key_start_loc, None, None, None)
        else:
            key, value = cache.key, cache.value
            where = (torch.zeros_like(starts), batch.seq_lens, None, batch.block_table)
        result = self.ops.varlen_fwd(
            frame.query, key, value, frame.out, starts, *where, frame.params.alibi_slopes, plan.longest,
            batch.max_seq_len, 0.0, spec.scale, False, spec.causal, *window_sizes(spec),
            self.cap, False, 0, None,
        )  # fmt: skip
        return frame.out, result[1]

    def split(self, plan: FlashPlan, frame: Frame, cache: KVCache) -> tuple[Tensor, Tensor]:
        batch, spec = plan.batch, self.spec_of(plan.batch)
        result = self.ops.fwd_kvcache(
            frame.query, cache.key, cache.value, None, None, batch.seq_lens, None, None, None, None,
            batch.block_table, frame.params.alibi_slopes, frame.out, spec.scale, spec.causal,
            *window_sizes(spec), self.cap, True, plan.splits,
        )  # fmt: skip
        return frame.out, result[1]


class UpstreamFlashAttention2(FlashAttention2):
    """The flash-attn package: returns its output, and pages by 256 tokens."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func: Callable[..., Any] = flash_attn_varlen_func
        self.kvcache_func: Callable[..., Any] = flash_attn_with_kvcache
        self.options = {"softmax_scale": spec.scale, "softcap": spec.logit_soft_cap or 0.0}

    def varlen(self, plan: FlashPlan, frame: Frame) -> tuple[Tensor, Tensor]:
        batch, table, spec = plan.batch, None, self.spec_of(plan.batch)
        key, value, cache = frame.key, frame.value, frame.cache
        if cache is None:
            starts = batch.key_start_loc
        else:
            key, value = cache.key, cache.value
            starts, table = cumulative(batch.seq_lens), batch.block_table
        result, lse, _ = self.varlen_func(
            frame.query, key, value, batch.query_start_loc, starts, plan.longest, batch.max_seq_len,
            alibi_slopes=frame.params.alibi_slopes, return_attn_probs=True, block_table=table,
            causal=spec.causal, window_size=window_sizes(spec), **self.options,
        )  # fmt: skip
        return result, lse

    def split(self, plan: FlashPlan, frame: Frame, cache: KVCache) -> tuple[Tensor, Tensor]:
        batch, spec = plan.batch, self.spec_of(plan.batch)
        sizes = decode_window_sizes if frame.query.shape[1] == 1 else window_sizes
        result, lse = self.kvcache_func(
            frame.query, cache.key, cache.value, cache_seqlens=batch.seq_lens,
            block_table=batch.block_table, alibi_slopes=frame.params.alibi_slopes,
            num_splits=plan.splits, return_softmax_lse=True, causal=spec.causal,
            window_size=sizes(spec), **self.options,
        )  # fmt: skip
        return result, lse


class TorchFlashAttention2(FlashAttention2):
    """torch's own build, from the release whose `varlen_attn` reads pages (2.13).

    Its one function splits the keys by itself.
    """

    splits_short: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        self.func: Callable[..., Any] = varlen_attn
        self.aux = AuxRequest(lse=True)

    def varlen(self, plan: FlashPlan, frame: Frame) -> tuple[Tensor, Tensor]:
        batch, spec = plan.batch, self.spec_of(plan.batch)
        key, value, cache = frame.key, frame.value, frame.cache
        if cache is None:
            starts, where = batch.key_start_loc, {}
        else:
            key, value, starts = cache.key, cache.value, None
            where = {"seqused_k": batch.seq_lens, "block_table": batch.block_table}
        result, lse = self.func(
            frame.query, key, value, batch.query_start_loc, starts, plan.longest, batch.max_seq_len,
            return_aux=self.aux, scale=spec.scale, window_size=window_sizes(spec),
            enable_gqa=spec.gqa_ratio > 1, **where,
        )  # fmt: skip
        return result, lse

    def split(self, plan: FlashPlan, frame: Frame, cache: KVCache) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("torch has one function for all queries")
