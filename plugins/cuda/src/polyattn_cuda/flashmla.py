"""FLASHMLA and FLASHMLA_SPARSE: DeepSeek's kernels, from the flash_mla package or vLLM's build."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    SparseBackend,
    UniformRows,
    blank,
)
from torch import Tensor

from polyattn_cuda.latent import LatentAdapter, LatentPlan
from polyattn_cuda.providers import vllm_library
from polyattn_cuda.splits import capturing


class FlashMLAPlan(LatentPlan):
    """`schedule` is made by the first layer's kernel, on the device, for all layers of the step.

    A captured step makes one of its own, each time that it is replayed.
    """

    __slots__ = ("_schedules", "rows")

    def __init__(self, batch: Batch, reuse: Plan | None = None):
        super().__init__(batch, reuse)
        self.rows = UniformRows(batch)
        self._schedules: dict[bool, Any] = {}

    @property
    def schedule(self) -> Any:
        """The schedule of an earlier layer of this step or capture; None for the first layer."""
        return self._schedules.get(capturing())

    @schedule.setter
    def schedule(self, made: Any) -> None:
        self._schedules[capturing()] = made


class FlashMLA(LatentAdapter):
    """FlashMLA's dense decode for Hopper: pages of 64."""

    name: ClassVar[str] = "FLASHMLA"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FlashMLAPlan:
        return FlashMLAPlan(batch, reuse)

    def run(self, plan: Plan, frame: Frame) -> None:
        lse = frame.lse
        assert isinstance(plan, FlashMLAPlan) and frame.cache is not None
        result, found_lse = self.attend(plan, plan.rows.spread(frame.query), frame.cache.key)
        frame.set_out(plan.rows.collect(result))
        if lse is not None:
            lse.copy_(plan.rows.collect(found_lse.transpose(1, 2)))
        blank(plan.empty, frame.out, lse)

    @abstractmethod
    def attend(self, plan: FlashMLAPlan, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Attend for (num_seqs, tokens, heads, 576) over pages of rows.

        Returns (num_seqs, tokens, heads, 512) and the LSE (num_seqs, heads, tokens).
        """


class VllmFlashMLA(FlashMLA):
    """vLLM's build: the schedule comes back as two tensors."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        torch.ops.load_library(str(vllm_library("_flashmla_C")))

    def attend(self, plan: FlashMLAPlan, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        schedule, splits = plan.schedule or (None, None)
        result, lse, *plan.schedule = torch.ops._flashmla_C.dense_decode_fwd(
            query, rows, self.rank, plan.batch.seq_lens, plan.batch.block_table, self.spec.scale,
            query.shape[1] > 1, schedule, splits, None,
        )  # fmt: skip
        return result, lse


class UpstreamFlashMLA(FlashMLA):
    """The flash_mla package: the schedule is an object that the first call fills."""

    def attend(self, plan: FlashMLAPlan, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if plan.schedule is None:
            plan.schedule = get_mla_metadata()[0]
        result, lse = flash_mla_with_kvcache(
            query, rows, plan.batch.block_table, plan.batch.seq_lens, self.rank, plan.schedule,
            softmax_scale=self.spec.scale, causal=query.shape[1] > 1,
        )  # fmt: skip
        return result, lse


class FlashSparseMLA(SparseBackend):
    """FlashMLA's kernels for chosen rows, bf16 or of 656 bytes; invalid rows are -1."""

    name: ClassVar[str] = "FLASHMLA_SPARSE"

    def run(self, plan: Plan, frame: Frame) -> None:
        cache, slots, lse = frame.cache, frame.choice, frame.lse
        assert cache is not None and slots is not None
        query, chosen = frame.query.contiguous(), slots[:, None].contiguous()
        if cache.key.dtype is torch.uint8:
            by = frame.params.k_scale  # of rows that have scales of their own mostly 1
            scale = self.spec.scale * by
            result, found_lse = self.attend_bytes(query[:, None], cache.key, chosen, scale)
            result, found_lse = result[:, 0] if by == 1.0 else result[:, 0] * by, found_lse[..., 0]
        else:
            rows = cache.key.reshape(-1, 1, cache.key.shape[3])
            result, found_lse = self.attend(query, rows, chosen)
        frame.set_out(result)
        if lse is not None:
            lse.copy_(found_lse)
        blank((slots < 0).all(1), frame.out, lse)

    @property
    def rank(self) -> int:
        """Elements of a row that are its value."""
        assert self.spec.latent is not None
        return self.spec.latent.rank

    @abstractmethod
    def attend(self, query: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to rows (slots, 1, 576); returns (tokens, heads, 512) and the LSE."""

    @abstractmethod
    def attend_bytes(
        self, query: Tensor, pages: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend for (tokens, 1, heads, 576) to rows of pages (pages, slots, 1, 656), uint8.

        Returns (tokens, 1, heads, 512) and the LSE (tokens, heads, 1).
        """


class VllmFlashSparseMLA(FlashSparseMLA):
    """vLLM's build."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        torch.ops.load_library(str(vllm_library("_flashmla_C")))

    def attend(self, query: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        result, _, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
            query, rows, slots, self.spec.scale, self.rank, None, None, None
        )
        return result, lse

    def attend_bytes(
        self, query: Tensor, pages: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        result, lse, *_ = torch.ops._flashmla_C.sparse_decode_fwd(
            query, pages, slots, None, None, None, None, None, None, None, self.rank, scale, None
        )
        return result, lse


class UpstreamFlashSparseMLA(FlashSparseMLA):
    """The flash_mla package."""

    def attend(self, query: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_sparse_fwd

        result, _, lse = flash_mla_sparse_fwd(query, rows, slots, self.spec.scale, self.rank)
        return result, lse

    def attend_bytes(
        self, query: Tensor, pages: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        schedule, how = get_mla_metadata()[0], {"is_fp8_kvcache": True, "indices": slots}
        result, lse = flash_mla_with_kvcache(
            query, pages, None, None, self.rank, schedule, softmax_scale=scale, **how
        )
        return result, lse
