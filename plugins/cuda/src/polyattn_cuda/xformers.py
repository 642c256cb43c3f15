"""XFORMERS: memory-efficient attention by CUTLASS, for GPUs that are older than the other kernels.

It reads packed keys, so cached sequences are copied out of their pages first, and it knows no KV
heads that serve several query heads, so keys and values are repeated. Slow, and right, where nothing
else runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import blank, empty_rows
from torch import Tensor

from polyattn_cuda.base import CudaAttention
from polyattn_cuda.paging import ragged, read_slots, token_slots, upload


class XFormersAttention(CudaAttention):
    """One block-diagonal call for a packed batch, prefill and decode alike."""

    name: ClassVar[str] = "XFORMERS"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        from xformers.ops import fmha

        self.fmha = fmha
        self.operator = fmha.cutlass.FwOp

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.empty = empty_rows(batch)
        # A padding row has a query and no key, which the mask forbids: it takes no part.
        queries = [q if n else 0 for q, n in zip(batch.query_lens, batch.lens, strict=True)]
        self.mask = self._mask(queries, batch.lens, batch.device)
        # The LSE comes as (sequences, heads, queries): where each packed row is found in it.
        row, column = ragged(np.asarray(queries, dtype=np.int64))
        self.rows = upload(np.stack([row, column]), batch.device)
        self.slots: Tensor | None = None

    def _mask(self, queries: list[int], lens: Any, device: torch.device) -> Any:
        masks = self.fmha.attn_bias
        if not self.spec.causal:
            return masks.BlockDiagonalMask.from_seqlens(queries, list(lens), device=device)
        kind = masks.BlockDiagonalCausalFromBottomRightMask
        mask = kind.from_seqlens(queries, list(lens), device=device)
        if self.spec.sliding_window is None:
            return mask
        return mask.make_local_attention_from_bottomright(self.spec.sliding_window)

    def forward_prefill(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        batch = self.batch
        if cache is not None and (batch.lens != batch.query_lens or key is None):
            if self.slots is None:
                self.slots = token_slots(batch, cache.block_size)
            key, value = read_slots(cache, self.slots)
        assert key is not None and value is not None
        taken = query if self.empty is None else query[~self.empty]
        if len(taken):
            inputs = self.fmha.Inputs(
                query=taken.contiguous()[None], key=self._repeat(key), value=self._repeat(value),
                attn_bias=self.mask, scale=self.spec.scale,
            )  # fmt: skip
            # The operator itself: the functions around it refuse where xFormers' own library was
            # built for another torch, though this kernel is torch's.
            result, context = self.operator.apply(inputs, needs_gradient=True)
            self._store(result[0], context.lse, out, lse)
        blank(self.empty, out, lse)

    def _repeat(self, tensor: Tensor) -> Tensor:
        ratio = self.spec.gqa_ratio
        return (tensor.repeat_interleave(ratio, 1) if ratio > 1 else tensor.contiguous())[None]

    def _store(self, result: Tensor, found: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if self.empty is None:
            out.copy_(result)
        else:
            out[~self.empty] = result
        if lse is not None:
            packed = found[self.rows[0], :, self.rows[1]]
            packed = packed.masked_fill(packed == torch.inf, -torch.inf)  # no key at all
            if self.empty is None:
                lse.copy_(packed)
            else:
                lse[~self.empty] = packed

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.forward_prefill(query, None, None, cache, params, out, lse)
