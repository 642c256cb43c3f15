"""FlashInfer's prefill and append: any number of query tokens a sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn.host import refuse
from torch import Tensor

from polyattn_flashinfer.calls import (
    Result,
    Scores,
    Step,
    block_table,
    checked_layout,
    differences,
    offsets_of,
    pages,
    plain_dtype,
    product,
    result,
    token_counts,
    unpacked,
)
from polyattn_flashinfer.decode import paged_lens, planned_sizes
from polyattn_flashinfer.wrappers import Wrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None,
    scale_v: Tensor | None = None, o_dtype: Any = None, custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, backend: str = "auto",
    return_lse: bool = False, kv_cache_sf: Any = None, k_scale: float | None = None,
    v_scale: float | None = None,
) -> Result:  # fmt: skip
    """Attend for (tokens, heads, size) over whole keys. Returns the output, or (output, LSE)."""
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    if checked_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    lens = [q.shape[0]], [k.shape[0]]
    mask = unpacked(packed_custom_mask, custom_mask, *lens)
    scores = Scores(
        causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        mask,
    )  # fmt: skip
    keys, scale = (k.to(q.dtype), v.to(q.dtype)), product(k_scale=k_scale)
    step = Step(*lens, scores, q.device)
    out, lse = step.attend(q, keys, scale=scale, needs_lse=return_lse)
    return result(out, lse, None, None, v_scale, plain_dtype("o_dtype", o_dtype))


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Prefill over pages. Arguments, tensors and results as in FlashInfer's documentation."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None, custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None, backend: str = "auto", jit_args: Any = None,
        jit_kwargs: Any = None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args or jit_kwargs)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, non_blocking: bool = True, prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        """Plan a step."""
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        offsets, query_lens = offsets_of(paged_kv_indptr), token_counts("qo_indptr", qo_indptr)
        counts = differences(offsets)
        lens = paged_lens(counts, paged_kv_last_page_len, page_size)
        scores = Scores(
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta, unpacked(packed_custom_mask, custom_mask, query_lens, lens),
        )  # fmt: skip
        table = block_table(offsets, counts, paged_kv_indices, self.device)
        sizes = planned_sizes(num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        step = Step(query_lens, lens, scores, self.device, table)
        self._planned(step, sizes, o_data_type, q_data_type, kv_data_type)

    begin_forward = plan

    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: int | None = None,
        sinks: Tensor | None = None, kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result:  # fmt: skip
        """Attend for (tokens, heads, size). Returns the output, or (output, LSE (tokens, heads))."""
        refuse(
            args=args or None,
            kv_cache_sf=kv_cache_sf,
            uses_spcompress=uses_spcompress,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        keys, scales = pages(paged_kv_cache, self.layout), (q_scale, k_scale, v_scale)
        return self._run(q, keys, out, lse, return_lse, scales, window_left, sinks)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Prefill over whole keys. Arguments, tensors and results as in FlashInfer's documentation."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None, mask_indptr_buf: Tensor | None = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args or jit_kwargs)

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, non_blocking: bool = True, prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan a step."""
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        query_lens, lens = (
            token_counts("qo_indptr", qo_indptr),
            token_counts("kv_indptr", kv_indptr),
        )
        scores = Scores(
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta, unpacked(packed_custom_mask, custom_mask, query_lens, lens),
        )  # fmt: skip
        sizes = planned_sizes(num_qo_heads, num_kv_heads, head_dim_qk)
        step = Step(query_lens, lens, scores, self.device)
        self._planned(step, sizes, o_data_type, q_data_type, kv_data_type)

    begin_forward = plan

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *args: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, o_scale: float | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, kv_cache_sf: Any = None,
    ) -> Result:  # fmt: skip
        """Attend for (tokens, heads, size). Returns the output, or (output, LSE (tokens, heads))."""
        refuse(args=args or None, kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        if self.layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        keys = k.to(q.dtype), v.to(q.dtype)
        return self._run(q, keys, out, lse, return_lse, (q_scale, k_scale, v_scale))
