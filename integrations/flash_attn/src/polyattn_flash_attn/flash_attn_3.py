"""flash-attn 3's functions (`flash_attn_interface`), as in its documentation.

`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata` and `deterministic` change no result.
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import AttentionState, PolyattnError, merge_states
from polyattn.host import CallerCache, refuse
from torch import Tensor

from polyattn_flash_attn.calls import Found, Window, dense, options_of, varlen, with_kvcache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Found | Tensor:  # fmt: skip
    """Attend for (batch, seqlen, heads, size). Returns the output, or (output, LSE)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = options_of(
        softmax_scale, causal, window_size, softcap, None, return_attn_probs, attention_chunk
    )
    result = dense(q, k, v, options)
    return result if return_attn_probs else result[0]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Found | Tensor:  # fmt: skip
    """Attend for packed (total, heads, size). Queries beyond `seqused_q` give 0."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = options_of(
        softmax_scale, causal, window_size, softcap, None, return_attn_probs, attention_chunk
    )
    starts, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    result = varlen(q, k, v, starts, options, used=used, gap=True)
    return result if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor, *args: Any, num_heads_q: int | None = None, **kwargs: Any
) -> Any:
    """`flash_attn_func` of (batch, seqlen, 3, heads, size), or of all heads side by side."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise PolyattnError(
                f"qkv {tuple(qkv.shape)} has all heads side by side; pass num_heads_q"
            )
        others = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, others, others], dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Found | Tensor:  # fmt: skip
    """Append `k`, `v` to the cache in place and attend; rows padded, or packed by `cu_seqlens_q`."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if rotary_cos is not None and rotary_seqlens is not cache_seqlens:
        refuse(rotary_seqlens=rotary_seqlens)
    options = options_of(
        softmax_scale, causal, window_size, softcap, None, return_softmax_lse, attention_chunk
    )
    if page_table is not None and cache_batch_idx is not None:  # here it names rows of the table
        page_table, cache_batch_idx = page_table[cache_batch_idx], None
    cache = CallerCache(k_cache, v_cache, page_table, cache_batch_idx, cache_leftpad)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    starts = cu_seqlens_q, cu_seqlens_k_new
    result = with_kvcache(q, k, v, cache, cache_seqlens, options, rotary, starts=starts)
    return result if return_softmax_lse else result[0]


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge (splits, batch, seqlen, heads, size) with LSEs (splits, batch, seqlen, heads)."""
    parts = zip(out_partial.to(lse_partial.dtype), lse_partial, strict=True)
    merged = merge_states([AttentionState(part, lse) for part, lse in parts])
    result = merged.output.to(out_dtype or out_partial.dtype)
    return (result if out is None else out.copy_(result)), merged.lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the call itself makes a plan."""
