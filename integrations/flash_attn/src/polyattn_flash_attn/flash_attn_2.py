"""flash-attn 2's functions. Tensors, arguments and results as in its documentation.

The LSE of a query that sees nothing is -inf. `deterministic` and `num_splits` change no result.
"""

from __future__ import annotations

from typing import Any

from polyattn.host import CallerCache, refuse
from torch import Tensor

from polyattn_flash_attn.calls import Found, Window, dense, options_of, varlen, with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attend for (batch, seqlen, heads, size). Returns the output, or (output, LSE, None)."""
    if dropout_p:
        refuse(dropout_p=dropout_p)
    options = options_of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    result = dense(q, k, v, options, alibi_slopes)
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attend for packed (total, heads, size), or over pages. Returns as `flash_attn_func`."""
    if dropout_p:
        refuse(dropout_p=dropout_p)
    options = options_of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    starts = cu_seqlens_q, cu_seqlens_k
    result = varlen(q, k, v, starts, options, slopes=alibi_slopes, block_table=block_table)
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` of (batch, seqlen, 3, heads, size)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_func` of q and (batch, seqlen, 2, heads, size)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """`flash_attn_varlen_func` of (total, 3, heads, size)."""
    q, k, v = qkv.unbind(1)
    lens = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lens, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_varlen_func` of q and (total, 2, heads, size)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Found | Tensor:  # fmt: skip
    """Append `k`, `v` to the cache in place and attend. Returns the output, or (output, LSE)."""
    options = options_of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse
    )
    cache = CallerCache(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    result = with_kvcache(q, k, v, cache, cache_seqlens, options, rotary, alibi_slopes)
    return result if return_softmax_lse else result[0]
