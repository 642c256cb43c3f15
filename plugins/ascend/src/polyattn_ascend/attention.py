"""ASCEND_ATTN: CANN's fused attention over pages, long and short queries in one call."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    blank,
    empty_rows,
    store_lse,
)

LOWER_RIGHT = 3
"""The `sparse_mode` of a causal mask whose last query sees the last key."""
MASK = 2048
"""Rows and columns of the mask that `LOWER_RIGHT` takes, whatever the lengths are."""


class FusedPlan(Plan):
    """Where each sequence's queries end and how many keys it has, on the host as CANN reads them."""

    __slots__ = ("empty", "ends", "lens")

    def __init__(self, batch: Batch, causal: bool):
        super().__init__(batch)
        self.empty = empty_rows(batch, causal)
        self.ends = list(accumulate(batch.query_lens))
        # A causal mask takes no more queries than keys. Only padding rows have: theirs are blanked.
        pairs = zip(batch.query_lens, batch.lens, strict=True)
        self.lens = [max(queries, keys, 1) for queries, keys in pairs]


class FusedAttention(AttentionBackend):
    """`npu_fused_infer_attention_score_v2` with packed queries, which its documents call TND."""

    name: ClassVar[str] = "ASCEND_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        where = torch.device(str(device.torch_device))
        self._mask = torch.ones(MASK, MASK, dtype=torch.bool, device=where).triu(1)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FusedPlan:
        return FusedPlan(batch, self.spec_of(batch).causal)

    def run(self, plan: FusedPlan, frame: Frame) -> None:
        import torch_npu

        cache, batch, spec = frame.cache, plan.batch, self.spec_of(plan.batch)
        assert cache is not None
        if not batch.num_tokens:
            return
        key, value, table = cache.key, cache.value, batch.block_table
        if not (key.is_contiguous() and value.is_contiguous()) and table is not None:
            # CANN reads only caches without gaps. From others this step's pages are copied for it.
            pages = table.flatten().long().clamp(0, len(key) - 1)
            key, value = key[pages], value[pages]
            table = torch.arange(len(pages), dtype=torch.int32, device=table.device).view_as(table)
        sinks = frame.params.sinks
        result, lse = torch_npu.npu_fused_infer_attention_score_v2(
            frame.query.contiguous(), key.flatten(2), value.flatten(2),
            atten_mask=self._mask if spec.causal else None, actual_seq_qlen=plan.ends,
            actual_seq_kvlen=plan.lens, block_table=table,
            learnable_sink=None if sinks is None else sinks.to(frame.query.dtype),
            num_query_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
            softmax_scale=spec.scale, input_layout="TND", block_size=cache.block_size,
            sparse_mode=LOWER_RIGHT if spec.causal else 0,
            return_softmax_lse=frame.lse is not None,
        )  # fmt: skip
        frame.set_out(result)
        if frame.lse is not None:
            store_lse(frame.lse, lse.squeeze(-1).T)
        blank(plan.empty, frame.out, frame.lse)
