"""FlashInfer's cascade: attention to several levels of pages, and merges of partial results."""

from __future__ import annotations

import math
from typing import Any

import torch
from polyattn import AttentionState
from polyattn import merge_states as merged
from torch import Tensor

from polyattn_flashinfer.calls import LOG2E
from polyattn_flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge outputs (tokens, parts, heads, size) and LSEs (tokens, parts, heads), to base 2."""
    parts = zip(v.unbind(1), (s.float() * math.log(2)).unbind(1), strict=True)
    state = merged([AttentionState(out, lse) for out, lse in parts])
    return state.output, state.lse * LOG2E


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two outputs (tokens, heads, size) and their LSEs (tokens, heads), to base 2."""
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge another part into `v`, `s`, for the tokens that `mask` (tokens,) names, or all."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        out = torch.where(mask.bool()[:, None, None], out, v)
        lse = torch.where(mask.bool()[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


class MultiLevelCascadeAttentionWrapper:
    """Attends to levels of pages that several sequences share. Each level is read once, then merged."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ):
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph)
            for _ in range(num_levels)
        ]

    is_cuda_graph_enabled = False

    def reset_workspace_buffer(self, *buffers: Any) -> None:
        """Do nothing: the workspace isn't used."""

    def plan(
        self, qo_indptr_arr: list[Tensor], paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor], paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Plan each level; only the last one is causal. `args` follow FlashInfer's order."""
        names = (
            "pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left",
            "logits_soft_cap", "rope_scale", "rope_theta", "q_data_type", "kv_data_type",
        )  # fmt: skip
        kwargs |= dict(zip(names, args, strict=False))
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        for level, wrapper in enumerate(self._levels):
            wrapper.plan(
                qo_indptr_arr[level],
                paged_kv_indptr_arr[level],
                paged_kv_indices_arr[level],
                paged_kv_last_page_len[level],
                *sizes,
                causal=causal and level == len(self._levels) - 1,
                **kwargs,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        """Attend for (tokens, heads, size), over all levels."""
        parts = [level.run_return_lse(q, paged_kv_cache) for level in self._levels]
        outs, sums = zip(*parts, strict=True)
        return merge_states(torch.stack(outs, 1), torch.stack(sums, 1))[0]

    forward = run

    def end_forward(self) -> None:
        """Do nothing, as FlashInfer's."""
