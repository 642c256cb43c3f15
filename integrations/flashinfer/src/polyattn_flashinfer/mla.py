"""FlashInfer's MLA: absorbed queries over latents in pages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from polyattn import KVCache, LatentAttention, LatentSpec, LayerGroup
from polyattn.host import group_for, refuse, untraced, values_of
from torch import Tensor

from polyattn_flashinfer.calls import (
    LOG2E,
    Result,
    Scores,
    Step,
    block_table,
    differences,
    offsets_of,
    result,
    token_counts,
)
from polyattn_flashinfer.wrappers import Wrapper

__all__ = ["BatchMLAPagedAttentionWrapper"]


class BatchMLAPagedAttentionWrapper(Wrapper):
    """MLA over pages. Arguments, tensors and results as in FlashInfer's documentation.

    Caches that are parts of one tensor's rows, the latent first, are read in place. Otherwise each run
    copies the step's pages to such rows.
    """

    def __init__(
        self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None, kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None, backend: str = "auto",
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, None)

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: Any = None, kv_data_type: Any = None,
        use_profiler: bool = False,
    ) -> None:  # fmt: skip
        """Plan a step."""
        refuse(use_profiler=use_profiler)
        query_lens, lens = token_counts("qo_indptr", qo_indptr), values_of(kv_len_arr)
        offsets = offsets_of(kv_indptr)
        counts = differences(offsets)[: len(lens)]  # FlashInfer reads no further
        scores = Scores(causal or all(n == 1 for n in query_lens), sm_scale=sm_scale)
        table = block_table(offsets, counts, kv_indices, self.device)
        sizes = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
        }
        step = Step(query_lens, lens, scores, self.device, table)
        self._planned(step, sizes, None, q_data_type, kv_data_type)

    @untraced
    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        profiler_buffer: Tensor | None = None, kv_len: Tensor | None = None,
        page_table: Tensor | None = None, return_lse_base_on_e: bool = False,
        o_scale: float | None = None, *, ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None, kpe_scale: float | None = None,
    ) -> Result:  # fmt: skip
        """Attend for q_nope (tokens, heads, rank). Returns the output, or (output, LSE)."""
        refuse(
            profiler_buffer=profiler_buffer,
            o_scale=o_scale,
            ckv_scale=ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=kpe_scale,
        )
        self._check(
            {
                "num_heads": q_nope.shape[1],
                "head_dim_ckv": ckv_cache.shape[2],
                "head_dim_kpe": kpe_cache.shape[2],
                "page_size": ckv_cache.shape[1],
            }
        )
        rank, query = ckv_cache.shape[2], torch.cat([q_nope, q_pe], -1)
        rows, step = _joined(ckv_cache, kpe_cache, self._planned_step)
        cache = KVCache(rows[:, :, None], rows[:, :, None, :rank])
        if step.scores.causal and max(step.query_lens, default=1) == 1:
            layer = _layer(query.device, query.dtype, query.shape[1], rank, query.shape[2],
                           rows.shape[1], step.scores.sm_scale, return_lse)  # fmt: skip
            output = layer(query, None, None, cache, step.paged)
            values, sums = output if return_lse else (output, None)
            sums = None if sums is None else sums * LOG2E
        else:  # as attention whose one KV head's values are parts of its keys
            values, sums = step.attend(query, cache, needs_lse=return_lse)
        if sums is not None and return_lse_base_on_e:
            sums = sums / LOG2E
        return result(values, sums, out, lse)


def _joined(ckv: Tensor, kpe: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Return rows of latent and rope key (pages, page size, size), and the step over these pages."""
    rank, size = ckv.shape[2], ckv.shape[2] + kpe.shape[2]
    beside = ckv.data_ptr() + rank * ckv.element_size() == kpe.data_ptr() or not kpe.shape[2]
    if beside and ckv.stride() == kpe.stride() and ckv.stride(2) == 1:
        return ckv.as_strided((*ckv.shape[:2], size), ckv.stride()), step
    assert step.table is not None
    used, table = step.table.unique(return_inverse=True)
    rows = torch.cat([ckv[used.long()], kpe[used.long()]], -1)
    return rows, Step(step.query_lens, step.lens, step.scores, step.device, table.int())


def _layer(
    device: torch.device, dtype: torch.dtype, heads: int, rank: int, size: int, page: int,
    scale: float | None, needs_lse: bool,
) -> LatentAttention:  # fmt: skip
    group = group_for(
        device, kind="mla", num_heads=heads, head_size=size, v_head_size=rank, dtype=dtype,
        latent=LatentSpec(rank=rank, rope_head_size=size - rank), scale=scale,
        block_size=page, needs_lse=needs_lse,
    )  # fmt: skip
    return _layer_of(group)


@lru_cache(maxsize=64)
def _layer_of(group: LayerGroup) -> LatentAttention:
    return LatentAttention(group)
