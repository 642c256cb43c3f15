"""ROCM_ATTN: AITER's varlen kernel over gathered pages or given keys, its paged attention for decode."""

from __future__ import annotations

from typing import ClassVar

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
    at_least,
    blank,
    store_lse,
    window_sizes,
)
from torch import Tensor

from polyattn_rocm.keys import KeysPlan

PARTITION = 256
"""Keys that one workgroup of the paged decode takes."""


class AiterPlan(KeysPlan):
    """`decode`: by the paged kernel. Else `slots`, where the cache has each key, of a layer with one.

    Of pages the varlen function reads only those of 128 tokens, and its assembly none at all: it takes
    no notice of the table (`fmha_v3_varlen_fwd`, csrc/py_itfs_cu/asm_mha_varlen_fwd.cu).
    """

    __slots__ = ("decode", "slots")
    decode: bool
    slots: Tensor

    def keys(self, frame: Frame) -> tuple[Tensor, Tensor]:
        cache = frame.cache
        if cache is None:
            return super().keys(frame)
        at = self.slots // cache.block_size, self.slots % cache.block_size
        return cache.key[at], cache.value[at]


class AiterAttention(AttentionBackend):
    """CK or assembly kernels, as AITER chooses."""

    name: ClassVar[str] = "ROCM_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        self._outgrown: list[Tensor] = []
        self._scales: dict[float, Tensor] = {}

    def plan(self, batch: Batch, reuse: Plan | None = None) -> AiterPlan:
        # The paged decode returns no LSE, and claims none: with one, rows of a token are a prefill.
        cached = self.cache is not None
        plan = AiterPlan(batch, cached, self.spec_of(batch).causal)
        plan.decode = cached and batch.all_decode and not self.spec.needs_lse
        if plan.decode:
            self._size_workspace(batch)
        elif self.cache is not None:
            whole = Batch.from_lens(
                batch.lens, batch.lens, batch.block_table, self.cache.block_size
            )
            assert whole.slot_mapping is not None
            plan.slots = whole.slot_mapping
        return plan

    def _size_workspace(self, batch: Batch) -> None:
        """Partial outputs in the query's dtype, and a sum and a maximum each in float32."""
        spec = self.spec
        parts = batch.num_seqs * spec.num_heads * -(-batch.max_seq_len // PARTITION)
        size = parts * (spec.head_size * 2 + 2 * 4)
        self._workspace = at_least(self._workspace, size, self._outgrown)

    def run(self, plan: AiterPlan, frame: Frame) -> None:
        cache = frame.cache
        if not plan.batch.num_tokens:
            return
        if plan.decode:
            assert cache is not None
            self._decode(plan, frame, cache)
        else:
            self._varlen(plan, frame)
        blank(plan.empty, frame.out, frame.lse)

    def _varlen(self, plan: AiterPlan, frame: Frame) -> None:
        from aiter import flash_attn_varlen_func

        spec, batch, out = self.spec_of(plan.batch), plan.batch, frame.out
        key, value = plan.keys(frame)
        window, slopes = window_sizes(spec), frame.params.alibi_slopes
        if window == (0, 0) and slopes is None and not spec.logit_soft_cap:
            # AITER reads this as no window, and its assembly has a causal mask or none (`swa` in
            # `_flash_attn_varlen_forward`, aiter/ops/mha.py). A cap leads to CK's kernels, and so do
            # slopes, though 0.
            slopes = torch.zeros(spec.num_heads, dtype=torch.float32, device=self.torch_device)
        result = flash_attn_varlen_func(
            frame.query, key, value, batch.query_start_loc, plan.key_starts, plan.longest,
            batch.max_seq_len, softmax_scale=spec.scale, logits_soft_cap=spec.logit_soft_cap or 0.0,
            causal=spec.causal, window_size=window, alibi_slopes=slopes, return_lse=True, out=out,
        )  # fmt: skip
        if result[0].data_ptr() != out.data_ptr():  # some of its paths return a tensor of their own
            frame.set_out(result[0])
        store_lse(frame.lse, result[1])

    def _decode(self, plan: AiterPlan, frame: Frame, cache: KVCache) -> None:
        from aiter import paged_attention_v1

        spec, batch, params = self.spec, plan.batch, frame.params
        quantized = cache.key.dtype.itemsize == 1
        assert batch.block_table is not None
        paged_attention_v1(
            frame.out, self._workspace, frame.query.contiguous(), cache.key, cache.value, spec.scale,
            batch.block_table.contiguous(),  # the kernel goes by the number of its columns
            None, batch.seq_lens, batch.max_seq_len, params.alibi_slopes,
            "fp8" if quantized else "auto", "NHD", spec.logit_soft_cap or 0.0,
            self._scale(params.k_scale), self._scale(params.v_scale), None, PARTITION, 1,
            spec.sliding_window or 0,
        )  # fmt: skip

    def _scale(self, value: float) -> Tensor:
        tensor = self._scales.get(value)
        if tensor is None:
            tensor = self._scales[value] = torch.tensor(
                value, dtype=torch.float32, device=self.torch_device
            )
        return tensor
