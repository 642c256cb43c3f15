"""flash-attn 3's functions (`flash_attn_interface`), as in its documentation.

`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata` and `deterministic` change no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from polyattn.families.attention.packed import Keys
from torch import Tensor

from polyattn_flash_attn.calls import (
    FlashAsked,
    Rotary,
    Window,
    attend,
    by_rows,
    dense,
    host,
    lens_of,
    refuse,
)
from polyattn_flash_attn.kv_cache import with_kvcache

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend for (batch, seqlen, heads, size). Returns the output, or (output, LSE)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, None, attention_chunk, return_attn_probs
    )
    found = dense(q, k, v, asked)
    return found if return_attn_probs else found[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend for packed (total, heads, size). Queries beyond `seqused_q` give 0."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, None, attention_chunk, return_attn_probs
    )
    queries: Sequence[int] = lens_of(cu_seqlens_q)
    keys: Sequence[int] = lens_of(cu_seqlens_k)
    starts = tuple(host(cu_seqlens_k)[:-1])
    if seqused_k is not None:
        keys = host(seqused_k)
    if seqused_q is not None:  # what is not used: a sequence without keys
        used = host(seqused_q)
        queries = [n for u, q_ in zip(used, queries, strict=True) for n in (u, q_ - u)]
        keys = [n for length in keys for n in (length, 0)]
        starts = tuple(s for start in starts for s in (start, start))
    found = attend(q, queries, Keys(k, v, keys, starts), asked)
    return found if return_attn_probs else found[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor, *args: Any, num_heads_q: int | None = None, **kwargs: Any
) -> Any:
    """`flash_attn_func` of (batch, seqlen, 3, heads, size), or of all heads side by side."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        assert num_heads_q is not None, "num_heads_q says how many of the heads are queries'"
        others = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, others, others], dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append `k`, `v` to the cache in place and attend; rows padded, or packed by `cu_seqlens_q`."""
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, None, attention_chunk, return_softmax_lse
    )
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    flat, lens = _packed(q, cu_seqlens_q)
    new = None
    if k is not None and v is not None:
        new = _packed(k, cu_seqlens_k_new)[0], *_packed(v, cu_seqlens_k_new)
    out, lse = with_kvcache(
        flat, lens, k_cache, v_cache, new, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        rotary, asked,
    )  # fmt: skip
    if cu_seqlens_q is None:
        rows, count = q.shape[:2]
        out, lse = out.view(rows, count, *out.shape[1:]), by_rows(lse, rows, count)
    return (out, lse) if return_softmax_lse else out


def _packed(tensor: Tensor, cumulative: Tensor | None) -> tuple[Tensor, Sequence[int]]:
    if cumulative is not None:
        return tensor, lens_of(cumulative)
    return tensor.flatten(0, 1), [tensor.shape[1]] * tensor.shape[0]


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge (splits, batch, seqlen, heads, size) with LSEs (splits, batch, seqlen, heads)."""
    lse = lse_partial.logsumexp(0)
    weight = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    merged = (out_partial * weight[..., None]).sum(0).to(out_dtype or out_partial.dtype)
    return (merged if out is None else out.copy_(merged)), lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """There is nothing to prepare: a plan is made by the call."""
