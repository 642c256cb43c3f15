"""ROCM_ATTN: AITER's varlen kernel over pages for prefill, its paged attention for decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import (
    at_least,
    blank,
    cumulative,
    empty_rows,
    store_lse,
    window_sizes,
)
from torch import Tensor

from polyattn_rocm.base import RocmAttention

PARTITION = 256
"""Keys that one workgroup of the paged decode takes."""


class AiterAttention(RocmAttention):
    """CK or assembly kernels, as AITER chooses."""

    name: ClassVar[str] = "ROCM_ATTN"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.torch_device = torch.device(str(device.torch_device))
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        self._outgrown: list[Tensor] = []
        self._scales: dict[float, Tensor] = {}

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.starts, self.lens = batch.query_start_loc, batch.seq_lens
        self.key_starts = cumulative(self.lens)
        self.empty = empty_rows(batch)
        if batch.num_decodes == batch.num_seqs:
            self._size_workspace(batch)

    def _size_workspace(self, batch: Batch) -> None:
        """Partial outputs in the query's dtype, and a sum and a maximum each in float32."""
        spec = self.spec
        parts = batch.num_seqs * spec.num_heads * -(-batch.max_seq_len // PARTITION)
        size = parts * (spec.head_size * 2 + 2 * 4)
        self._workspace = at_least(self._workspace, size, self._outgrown)

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
        from aiter import flash_attn_varlen_func

        assert cache is not None
        if not self.batch.num_tokens:
            return
        spec, batch = self.spec, self.batch
        result = flash_attn_varlen_func(
            query, cache.key, cache.value, self.starts, self.key_starts, batch.max_query_len,
            batch.max_seq_len, softmax_scale=spec.scale, logits_soft_cap=spec.logit_soft_cap or 0.0,
            causal=spec.causal, window_size=window_sizes(spec), alibi_slopes=params.alibi_slopes,
            return_lse=True, block_table=batch.block_table, out=out,
        )  # fmt: skip
        if result[0].data_ptr() != out.data_ptr():  # some of its paths return a tensor of their own
            out.copy_(result[0])
        store_lse(lse, result[1])
        blank(self.empty, out, lse)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from aiter import paged_attention_v1

        spec, batch = self.spec, self.batch
        quantized = cache.key.dtype.itemsize == 1
        paged_attention_v1(
            out, self._workspace, query.contiguous(), cache.key, cache.value, spec.scale,
            batch.block_table, None, self.lens, batch.max_seq_len, params.alibi_slopes,
            "fp8" if quantized else "auto", "NHD", spec.logit_soft_cap or 0.0,
            self._scale(params.k_scale), self._scale(params.v_scale), None, PARTITION, 1,
            spec.sliding_window or 0,
        )  # fmt: skip
        blank(self.empty, out, None)

    def _scale(self, value: float) -> Tensor:
        found = self._scales.get(value)
        if found is None:
            found = self._scales[value] = torch.tensor(
                value, dtype=torch.float32, device=self.torch_device
            )
        return found
