"""flash-attn 2's functions. Tensors, arguments and results as in its documentation.

The LSE of a query that sees nothing is -inf. `deterministic` and `num_splits` change no result.
"""

from __future__ import annotations

from typing import Any

from polyattn.families.attention.packed import Keys
from torch import Tensor

from polyattn_flash_attn.calls import (
    FlashAsked,
    Rotary,
    Window,
    attend,
    by_rows,
    dense,
    lens_of,
    refuse,
)
from polyattn_flash_attn.device_lens import Cache, decode_on_device
from polyattn_flash_attn.kv_cache import stays_on_device, with_kvcache

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend for (batch, seqlen, heads, size). Returns the output, or (output, LSE, None)."""
    refuse(dropout_p=dropout_p)
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, alibi_slopes, needs_lse=return_attn_probs
    )
    out, lse = dense(q, k, v, asked)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend for packed (total, heads, size), or over pages. Returns as `flash_attn_func`."""
    refuse(dropout_p=dropout_p)
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, alibi_slopes, needs_lse=return_attn_probs
    )
    keys = Keys(k, v, lens_of(cu_seqlens_k), None, block_table)
    out, lse = attend(q, lens_of(cu_seqlens_q), keys, asked)
    return (out, lse, None) if return_attn_probs else out


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
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`flash_attn_varlen_func` of q and (total, 2, heads, size)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append `k`, `v` to the cache in place and attend. Returns the output, or (output, LSE)."""
    rows, count = q.shape[:2]
    asked = FlashAsked(
        softmax_scale, causal, window_size, softcap, alibi_slopes, needs_lse=return_softmax_lse
    )
    plain = k is None and rotary_cos is None and count == 1
    if plain and stays_on_device(cache_seqlens, cache_leftpad, alibi_slopes):
        cache = Cache(k_cache, v_cache, block_table, cache_batch_idx)
        found = decode_on_device(q.squeeze(1), cache, None, cache_seqlens, None, asked)  # type: ignore[arg-type]
        if found is not None:
            out, lse = found[0].unsqueeze(1), found[1]
            return (out, by_rows(lse, rows, 1)) if return_softmax_lse else out
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    new = None
    if k is not None and v is not None:
        new = k.flatten(0, 1), v.flatten(0, 1), [k.shape[1]] * rows
    out, lse = with_kvcache(
        q.reshape(rows * count, *q.shape[2:]), [count] * rows, k_cache, v_cache, new, cache_seqlens,
        cache_batch_idx, cache_leftpad, block_table, rotary, asked,
    )  # fmt: skip
    out = out.view(rows, count, *out.shape[1:])
    return (out, by_rows(lse, rows, count)) if return_softmax_lse else out
