"""XFORMERS: memory-efficient attention by CUTLASS, for GPUs that are older than the other kernels.

It reads packed keys, so cached sequences are copied out of their pages first, and it knows no KV
heads that serve several query heads, so keys and values are repeated. Slow, and right, where nothing
else runs.
"""

from __future__ import annotations

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
    blank,
    upload,
)
from torch import Tensor

from polyattn_cuda.paging import PackedPlan, ragged


class XFormersPlan(PackedPlan):
    """The mask, and which tokens take part.

    `rows` (2, tokens that take part): the LSE comes as (sequences, heads, queries), and this is where
    each packed row is found in it.
    """

    __slots__ = ("mask", "rows")

    def __init__(
        self, batch: Batch, cache: CacheFormat | None, causal: bool, mask: Any, queries: list[int]
    ):
        super().__init__(batch, cache, causal)
        self.mask = mask
        row, column = ragged(np.asarray(queries, dtype=np.int64))
        self.rows = upload(np.stack([row, column]), batch.device)


class XFormersAttention(AttentionBackend):
    """One block-diagonal call for a packed batch, prefill and decode alike."""

    name: ClassVar[str] = "XFORMERS"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        from xformers.ops import fmha

        self.fmha = fmha
        self.operator = fmha.cutlass.FwOp

    def plan(self, batch: Batch, reuse: Plan | None = None) -> XFormersPlan:
        # A token that sees no key takes no part: the masks forbid it.
        causal = self.spec_of(batch).causal
        lengths = zip(batch.query_lens, batch.lens, strict=True)
        queries = [min(q, n) if causal else q if n else 0 for q, n in lengths]
        mask = self._mask(queries, batch.lens, causal, batch.device)
        return XFormersPlan(batch, self.cache, causal, mask, queries)

    def _mask(self, queries: list[int], lens: list[int], causal: bool, device: torch.device) -> Any:
        masks = self.fmha.attn_bias
        if not causal:
            return masks.BlockDiagonalMask.from_seqlens(queries, list(lens), device=device)
        kind = masks.BlockDiagonalCausalFromBottomRightMask
        mask = kind.from_seqlens(queries, list(lens), device=device)
        if self.spec.sliding_window is None:
            return mask
        return mask.make_local_attention_from_bottomright(self.spec.sliding_window)

    def run(self, plan: XFormersPlan, frame: Frame) -> None:
        key, value = frame.key, frame.value
        key, value = plan.keys.read(key, value, frame.cache)
        taken = frame.query if plan.empty is None else frame.query[~plan.empty]
        if len(taken):
            inputs = self.fmha.Inputs(
                query=taken.contiguous()[None],
                key=self._repeat(key),
                value=self._repeat(value),
                attn_bias=plan.mask,
                scale=self.spec.scale,
            )
            # The operator itself: the functions around it refuse where xFormers' own library was
            # built for another torch, though this kernel is torch's (xFormers 0.0.35).
            result, context = self.operator.apply(inputs, needs_gradient=True)
            self._store(plan, result[0], context.lse, frame)
        blank(plan.empty, frame.out, frame.lse)

    def _repeat(self, tensor: Tensor) -> Tensor:
        ratio = self.spec.gqa_ratio
        return (tensor.repeat_interleave(ratio, 1) if ratio > 1 else tensor.contiguous())[None]

    def _store(self, plan: XFormersPlan, result: Tensor, own_lse: Tensor, frame: Frame) -> None:
        lse = frame.lse
        if plan.empty is None:
            frame.set_out(result)
        else:
            frame.out[~plan.empty] = result
        if lse is not None:
            packed = own_lse[plan.rows[0], :, plan.rows[1]]
            packed = packed.masked_fill(packed == torch.inf, -torch.inf)  # no key at all
            if plan.empty is None:
                lse.copy_(packed)
            else:
                lse[~plan.empty] = packed
