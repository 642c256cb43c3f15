"""The libraries' MLA kernels over one latent cache: FlashInfer, FlashMLA, CUTLASS, FlashAttention-3.

Each takes the absorbed query `[latent, rope]` (tokens, heads, 576) and rows of 512 + 64.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.runtime.conventions import blank, empty_rows, store_lse
from polyattn.runtime.kv_cache import STORAGE_DTYPES
from torch import Tensor

from polyattn_cuda.base import CudaAttention, workspace, zeroed_workspace
from polyattn_cuda.paging import page_lists
from polyattn_cuda.providers import fa3_provider, flashmla_provider, vllm_library


class LatentAdapter(CudaAttention):
    """A library's decode over the latent cache; an MLA prefill is expanded and never comes here."""

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        assert spec.latent is not None
        self.rank, self.rope = spec.latent.rank, spec.latent.rope_head_size
        self.torch_device = torch.device(str(device.torch_device))

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.empty = empty_rows(batch)


class FlashInferMLA(LatentAdapter):
    """FlashInfer's planned wrapper; FA3 on Hopper. Its LSE is in base 2 unless told otherwise."""

    name: ClassVar[str] = "FLASHINFER_MLA"

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        self._block_size: int | None = None
        self._wrapper: Any = getattr(self, "_wrapper", None)

    def _plan(self, block_size: int) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        batch, spec = self.batch, self.spec
        if self._wrapper is None:
            self._wrapper = BatchMLAPagedAttentionWrapper(
                workspace(self.torch_device), backend="auto"
            )
        indptr, indices, _ = page_lists(batch, block_size)
        dtype = STORAGE_DTYPES[spec.dtype]
        self._wrapper.plan(
            torch.tensor(batch.starts, dtype=torch.int32), indptr, indices,
            torch.tensor(batch.lens, dtype=torch.int32), spec.num_heads, self.rank, self.rope,
            block_size, True, spec.scale, dtype, dtype,
        )  # fmt: skip
        self._block_size = block_size

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if self._block_size != cache.block_size:
            self._plan(cache.block_size)
        rows = cache.key[:, :, 0]
        self._wrapper.run(
            query[..., : self.rank], query[..., self.rank :], rows[..., : self.rank],
            rows[..., self.rank :], out=out, lse=lse, return_lse=lse is not None,
            return_lse_base_on_e=True,
        )  # fmt: skip
        blank(self.empty, out, lse)


class FlashInferSparseMLA(LatentAdapter):
    """FlashInfer's trtllm-gen kernel for Blackwell, which takes the chosen rows as a block table."""

    name: ClassVar[str] = "FLASHINFER_MLA_SPARSE"

    def forward_sparse(
        self,
        query: Tensor,
        cache: KVCache,
        slots: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        spec, topk = self.spec, slots.shape[1]
        trtllm_batch_decode_with_kv_cache_mla(
            query=query[:, None], kv_cache=cache.key[:, None, :, 0],
            workspace_buffer=zeroed_workspace(self.torch_device),
            qk_nope_head_dim=spec.head_size - self.rope, kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope, block_tables=slots[:, None],
            seq_lens=(slots >= 0).sum(1).int(), max_seq_len=topk, sparse_mla_top_k=topk,
            out=out[:, None], bmm1_scale=spec.scale, bmm2_scale=1.0,
        )  # fmt: skip
        blank((slots < 0).all(1), out, lse)


class FlashMLA(LatentAdapter):
    """FlashMLA's dense decode for Hopper: pages of 64. Its scheduler's plan is made once a step."""

    name: ClassVar[str] = "FLASHMLA"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.from_vllm = flashmla_provider() == "vllm"
        if self.from_vllm:
            torch.ops.load_library(str(vllm_library("_flashmla_C")))

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        self._schedule: Any = None

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        call = self._vllm if self.from_vllm else self._upstream
        found, found_lse = call(query[:, None], cache.key)
        out.copy_(found[:, 0])
        if lse is not None:
            lse.copy_(found_lse[:, :, 0])
        blank(self.empty, out, lse)

    def _vllm(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        schedule, splits = self._schedule or (None, None)
        found, lse, *self._schedule = torch.ops._flashmla_C.dense_decode_fwd(
            query, rows, self.rank, self.batch.seq_lens, self.batch.block_table, self.spec.scale,
            False, schedule, splits, None,
        )  # fmt: skip
        return found, lse

    def _upstream(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if self._schedule is None:
            self._schedule = get_mla_metadata()[0]
        found, lse = flash_mla_with_kvcache(
            query, rows, self.batch.block_table, self.batch.seq_lens, self.rank, self._schedule,
            softmax_scale=self.spec.scale, causal=False,
        )  # fmt: skip
        return found, lse


class FlashSparseMLA(LatentAdapter):
    """FlashMLA's kernel for chosen rows of a bf16 cache; invalid rows are -1."""

    name: ClassVar[str] = "FLASHMLA_SPARSE"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.from_vllm = flashmla_provider() == "vllm"
        if self.from_vllm:
            torch.ops.load_library(str(vllm_library("_flashmla_C")))

    def forward_sparse(
        self,
        query: Tensor,
        cache: KVCache,
        slots: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        rows = cache.key.reshape(-1, 1, cache.key.shape[3])
        call = self._vllm if self.from_vllm else self._upstream
        found, found_lse = call(query.contiguous(), rows, slots[:, None].contiguous())
        out.copy_(found)
        if lse is not None:
            lse.copy_(found_lse)
        blank((slots < 0).all(1), out, lse)

    def _vllm(self, query: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        found, _, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
            query, rows, slots, self.spec.scale, self.rank, None, None, None
        )
        return found, lse

    def _upstream(self, query: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_sparse_fwd

        found, _, lse = flash_mla_sparse_fwd(query, rows, slots, self.spec.scale, self.rank)
        return found, lse


class CutlassMLA(LatentAdapter):
    """CUTLASS's MLA decode for Blackwell, through FlashInfer's wrapper: pages of 128, no LSE."""

    name: ClassVar[str] = "CUTLASS_MLA"

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        self._wrapper: Any = getattr(self, "_wrapper", None)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        if self._wrapper is None:
            buffer = workspace(self.torch_device)
            self._wrapper = BatchMLAPagedAttentionWrapper(buffer, backend="cutlass")
        rows = cache.key[:, :, 0]
        self._wrapper.run(
            query[..., : self.rank], query[..., self.rank :], rows[..., : self.rank],
            rows[..., self.rank :], out=out, kv_len=self.batch.seq_lens,
            page_table=self.batch.block_table,
        )  # fmt: skip
        blank(self.empty, out, lse)


class FlashAttentionMLA(LatentAdapter):
    """FlashAttention-3 with a second query: rope parts as q and k, latents as q_v and v."""

    name: ClassVar[str] = "FLASH_ATTN_MLA"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.from_vllm = fa3_provider() == "vllm"
        if self.from_vllm:
            torch.ops.load_library(str(vllm_library("_vllm_fa3_C")))

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        self.starts, self.lens = batch.query_start_loc, batch.seq_lens

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        latent, rope = query[..., : self.rank], query[..., self.rank :]
        rope_keys = cache.key[..., self.rank :]
        call = self._vllm if self.from_vllm else self._upstream
        store_lse(lse, call(rope, latent, rope_keys, cache.value, out))
        blank(self.empty, out, lse)

    def _vllm(
        self, rope: Tensor, latent: Tensor, rope_keys: Tensor, latents: Tensor, out: Tensor
    ) -> Tensor:
        batch = self.batch
        return torch.ops._vllm_fa3_C.fwd(
            rope, rope_keys, latents, None, None, latent, out, self.starts, None, None, None,
            self.lens, batch.max_query_len, batch.max_seq_len, batch.block_table, None, None, None,
            None, None, None, None, None, self.spec.scale, True, -1, -1, 0.0, True, None, 0, None,
            0, None, 1, 0, None,
        )[1]  # fmt: skip

    def _upstream(
        self, rope: Tensor, latent: Tensor, rope_keys: Tensor, latents: Tensor, out: Tensor
    ) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        batch = self.batch
        found, lse, *_ = flash_attn_with_kvcache(
            rope, rope_keys, latents, qv=latent, cache_seqlens=self.lens,
            page_table=batch.block_table, cu_seqlens_q=self.starts,
            max_seqlen_q=batch.max_query_len, softmax_scale=self.spec.scale, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        out.copy_(found)
        return lse
