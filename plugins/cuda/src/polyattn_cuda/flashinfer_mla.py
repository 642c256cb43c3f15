"""FLASHINFER_MLA, FLASHINFER_MLA_SPARSE and CUTLASS_MLA: FlashInfer's kernels over a latent cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    SparseBackend,
    blank,
)
from torch import Tensor

from polyattn_cuda.flashinfer_wrappers import WORKSPACE_BYTES, Lease, WrapperPool, raising
from polyattn_cuda.latent import LatentAdapter, LatentPlan
from polyattn_cuda.paging import page_lists


class WrapperPlan(LatentPlan):
    """A plan with a wrapper of its own."""

    __slots__ = ("__weakref__", "lease")

    lease: Lease


class FlashInferMLA(LatentAdapter):
    """FlashInfer's planned wrapper; FA3 on Hopper. Its LSE is in base 2 unless told otherwise.

    Latents in e4m3 are made bf16, times their scale, next to the multiplication.
    """

    name: ClassVar[str] = "FLASHINFER_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.pool = WrapperPool(self._make, self.torch_device)
        self.raised = raising(spec.scale)  # by which queries are divided

    def _make(self, kind: Any, capacity: int) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        buffer = self.workspaces.scratch(self.torch_device, WORKSPACE_BYTES)
        if kind == "decode":
            return BatchMLAPagedAttentionWrapper(buffer, backend="auto")
        count = kind[1]

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.torch_device)

        return BatchMLAPagedAttentionWrapper(
            buffer, use_cuda_graph=True, qo_indptr=ints(count + 1), kv_indptr=ints(count + 1),
            kv_indices=ints(capacity), kv_len_arr=ints(count), backend="auto",
        )  # fmt: skip

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Plan for one token, because FlashInfer compiles kernels at their first plan."""
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.torch_device)
        self.plan(Batch([0, 1], [1], table, device=self.torch_device))

    def plan(self, batch: Batch, reuse: Plan | None = None) -> WrapperPlan:
        spec, cache, plan = self.spec, self.cache, WrapperPlan(batch, reuse)
        assert cache is not None
        plan.lease = self.pool.lease_of_step(plan, reuse, spec, cache)
        indptr, indices, _ = page_lists(batch, cache.block_size, plan.lease.room)
        dtype = STORAGE_DTYPES[spec.dtype]
        stored = torch.float8_e4m3fn if cache.item_bytes == 1 else dtype
        plan.lease.plan(
            torch.tensor(batch.starts, dtype=torch.int32, device="cpu"), indptr, indices,
            torch.tensor(batch.lens, dtype=torch.int32, device="cpu"), spec.num_heads,
            self.rank, self.rope,
            cache.block_size, True, spec.scale * self.raised, dtype, stored,
        )  # fmt: skip
        return plan

    def run(self, plan: Plan, frame: Frame) -> None:
        lse = frame.lse
        assert isinstance(plan, WrapperPlan) and frame.cache is not None
        rows, scales, query = frame.cache.key[:, :, 0], {}, frame.query
        if self.raised > 1.0:
            query = query / self.raised
        if rows.dtype.itemsize == 1:
            scales = {"ckv_scale": frame.params.k_scale, "kpe_scale": frame.params.k_scale}
        plan.lease.wrapper.run(
            query[..., : self.rank], query[..., self.rank :], rows[..., : self.rank],
            rows[..., self.rank :], out=frame.out, lse=lse, return_lse=lse is not None,
            return_lse_base_on_e=True, **scales,
        )  # fmt: skip
        blank(plan.empty, frame.out, lse)


class CutlassMLA(LatentAdapter):
    """CUTLASS's MLA decode for Blackwell, through FlashInfer's wrapper: pages of 128, no LSE."""

    name: ClassVar[str] = "CUTLASS_MLA"

    @cached_property
    def wrapper(self) -> Any:
        """FlashInfer's workspace. It holds no plan: lengths and pages come with each call."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        buffer = self.workspaces.scratch(self.torch_device, WORKSPACE_BYTES)
        return BatchMLAPagedAttentionWrapper(buffer, backend="cutlass")

    def run(self, plan: Plan, frame: Frame) -> None:
        assert isinstance(plan, LatentPlan) and frame.cache is not None and frame.lse is None
        rows, table = frame.cache.key[:, :, 0], plan.batch.block_table
        assert table is not None
        self.wrapper.run(
            frame.query[..., : self.rank],
            frame.query[..., self.rank :],
            rows[..., : self.rank],
            rows[..., self.rank :],
            out=frame.out,
            kv_len=plan.batch.seq_lens,
            page_table=table.contiguous(),
        )
        blank(plan.empty, frame.out, frame.lse)


class FlashInferSparseMLA(SparseBackend):
    """FlashInfer's trtllm-gen kernel for Blackwell, which takes the chosen rows as a block table."""

    name: ClassVar[str] = "FLASHINFER_MLA_SPARSE"

    def run(self, plan: Plan, frame: Frame) -> None:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        spec, cache, slots = self.spec, frame.cache, frame.choice
        assert spec.latent is not None and cache is not None and slots is not None
        # The kernel takes a number of rows, and the first so many: -1 may stand anywhere.
        slots, topk = slots.sort(1, descending=True).values, slots.shape[1]
        rank, rope = spec.latent.rank, spec.latent.rope_head_size
        buffer = self.workspaces.counters(frame.query.device, WORKSPACE_BYTES)
        trtllm_batch_decode_with_kv_cache_mla(
            query=frame.query[:, None], kv_cache=cache.key[:, None, :, 0],
            workspace_buffer=buffer, qk_nope_head_dim=spec.head_size - rope,
            kv_lora_rank=rank, qk_rope_head_dim=rope, block_tables=slots[:, None],
            seq_lens=(slots >= 0).sum(1).int(), max_seq_len=topk, sparse_mla_top_k=topk,
            out=frame.out[:, None], bmm1_scale=spec.scale, bmm2_scale=1.0,
        )  # fmt: skip
        blank((slots < 0).all(1), frame.out, frame.lse)
