"""FlashInfer's decode: one query token a sequence, or `q_len_per_req` of them, causal."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import PolyattnError
from polyattn.host import CallerCache, attend_cached, refuse, untraced, values_of
from torch import Tensor

from polyattn_flashinfer.calls import (
    LOG2E,
    Result,
    Scores,
    Step,
    block_table,
    checked_layout,
    differences,
    offsets_of,
    pages,
    product,
    result,
)
from polyattn_flashinfer.wrappers import Wrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None,
    v_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False,
) -> Result:  # fmt: skip
    """Attend for (heads, size) over whole keys. Returns the output, or (output, LSE (heads,))."""
    if checked_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    scores = Scores(
        True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    step = Step([1], [k.shape[0]], scores, q.device)
    scale = product(q_scale=q_scale, k_scale=k_scale)
    out, lse = step.attend(
        q[None], (k.to(q.dtype), v.to(q.dtype)), scale=scale, needs_lse=return_lse
    )
    return result(out[0], None if lse is None else lse[0], None, None, v_scale)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decode over pages. Arguments, tensors and results as in FlashInfer's documentation.

    With `use_cuda_graph`, `paged_kv_last_page_len_buffer` sets the number of sequences, and each has an
    equal share of `paged_kv_indices_buffer`'s pages. `plan` then refills the buffers that a replay reads.
    """

    captured = True

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)
        self.use_tensor_cores = use_tensor_cores
        if not use_cuda_graph:
            return
        if kv_layout == "HND":
            raise PolyattnError(
                "kv_layout='HND' with use_cuda_graph=True isn't served; use NHD for captured decodes"
            )
        if paged_kv_indices_buffer is None or paged_kv_last_page_len_buffer is None:
            raise PolyattnError(
                "use_cuda_graph=True needs paged_kv_indices_buffer and paged_kv_last_page_len_buffer"
            )
        count = len(paged_kv_last_page_len_buffer)
        columns = len(paged_kv_indices_buffer) // count
        self._table = torch.zeros(count, columns, dtype=torch.int32, device=self.device)
        self._lens = torch.zeros(count, dtype=torch.int32, device=self.device)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, o_data_type: Any = None, data_type: Any = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
        block_tables: Tensor | None = None, seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1, window_right: int = 0,
    ) -> None:  # fmt: skip
        """Plan a step. polyattn chooses how to split keys; `batch_invariant` fixes the split."""
        refuse("decode is causal; leave it out", window_right=window_right)
        scores = Scores(
            True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        offsets = offsets_of(indptr)
        counts = differences(offsets)
        lens = paged_lens(counts, last_page_len, page_size)
        table = block_table(offsets, counts, indices, self.device)
        if self.is_cuda_graph_enabled:
            table = self._refilled(table, lens)
        step = Step([q_len_per_req] * len(lens), lens, scores, self.device, table)
        sizes = planned_sizes(num_qo_heads, num_kv_heads, head_dim, page_size)
        sizes["q_len_per_req"] = q_len_per_req
        self._planned(step, sizes, o_data_type, q_data_type, kv_data_type, data_type)

    begin_forward = plan

    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None,
        q_len_per_req: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:  # fmt: skip
        """Attend for (tokens, heads, size). Returns the output, or (output, LSE (tokens, heads))."""
        refuse(
            args=args or None,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        if q_len_per_req is not None:
            self._check({"q_len_per_req": q_len_per_req})
        keys, scales = pages(paged_kv_cache, self.layout), (q_scale, k_scale, v_scale)
        return self._run(q, keys, out, lse, return_lse, scales, window_left, sinks)

    @untraced
    def _attend(
        self,
        query: Tensor,
        keys: Any,
        scale: float,
        needs_lse: bool,
        window_left: int | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.is_cuda_graph_enabled:
            return super()._attend(query, keys, scale, needs_lse, window_left, sinks)
        scores = self._planned_step.scores
        refuse("captured decodes don't serve it", sinks=sinks)
        if scores.pos_encoding_mode != "NONE":
            raise PolyattnError(
                f"pos_encoding_mode={scores.pos_encoding_mode!r} isn't served with "
                "use_cuda_graph=True; rotate queries and keys before, or pass False"
            )
        options = scores.options(query.shape[2], window_left, scale, needs_lse)
        rows = query.unflatten(0, (len(self._lens), -1))
        cache = CallerCache(keys.key, keys.value, self._table)
        values, sums = attend_cached(rows, None, cache, self._lens, options)
        return values.flatten(0, 1), None if sums is None else sums.flatten(0, 1) * LOG2E

    def _refilled(self, table: Tensor, lens: list[int]) -> Tensor:
        """Copy a step to the captured kernels' buffers. Raises `PolyattnError` if it is too large."""
        if len(lens) != len(self._lens) or table.shape[1] > self._table.shape[1]:
            raise PolyattnError(
                f"the step has {len(lens)} sequences of up to {table.shape[1]} pages; the buffers of "
                f"use_cuda_graph=True have room for {len(self._lens)} of {self._table.shape[1]}"
            )
        self._table[:, : table.shape[1]] = table
        self._lens.copy_(torch.tensor(lens, device="cpu"))
        return self._table


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph`."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ):
        buffers = indptr_buffer, indices_buffer, last_page_len_buffer
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def planned_sizes(heads: int, kv_heads: int, size: int, page: int | None = None) -> dict[str, int]:
    """Return what a plan says of the tensors of its runs."""
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": size}
    return sizes if page is None else sizes | {"page_size": page}


def paged_lens(counts: list[int], last_page_len: Tensor, page_size: int) -> list[int]:
    """Return the lengths of sequences of these pages."""
    last = values_of(last_page_len)
    if len(last) != len(counts):
        raise PolyattnError(
            f"last_page_len has {len(last)} entries, and the indptr of pages {len(counts)} sequences"
        )
    return [n and (n - 1) * page_size + m for n, m in zip(counts, last, strict=True)]
