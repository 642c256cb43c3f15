"""flash-attn 2's functions. Tensors, arguments and results as in its documentation.

The LSE of a query that sees nothing is -inf. `deterministic` and `num_splits` change no result.
"""

from __future__ import annotations

from typing import Any

from polyattn.families.attention.dense import Asked
from polyattn.families.attention.packed import Keys
from polyattn.runtime.host_copies import lens_between
from polyattn.runtime.stand_in import refuse
from torch import Tensor

from polyattn_flash_attn.calls import Found, Window, asked_of, attend, dense, in_rows, sides_of
from polyattn_flash_attn.device_lens import Cache, New
from polyattn_flash_attn.kv_cache import rotary_of, with_kvcache

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


def _asked(
    scale: float | None, causal: bool, window_size: Window, softcap: float, slopes: Tensor | None,
    needs_lse: bool,
) -> Asked:  # fmt: skip
    return asked_of(scale, causal, sides_of(window_size), softcap, slopes is not None, needs_lse)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attend for (batch, seqlen, heads, size). Returns the output, or (output, LSE, None)."""
    if dropout_p:
        refuse(dropout_p=dropout_p)
    asked = _asked(softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    found = dense(q, k, v, asked, alibi_slopes)
    return (*found, None) if return_attn_probs else found[0]


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
    asked = _asked(softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    keys = Keys(k, v, lens_between(cu_seqlens_k), None, block_table)
    found = attend(q, lens_between(cu_seqlens_q), keys, asked, alibi_slopes)
    return (*found, None) if return_attn_probs else found[0]


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
    rows, count = q.shape[:2]
    asked = _asked(softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse)
    new = None
    if k is not None and v is not None:
        new = New(k.flatten(0, 1), v.flatten(0, 1), [k.shape[1]] * rows)
    found = with_kvcache(
        q.flatten(0, 1), [count] * rows,
        Cache(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad), cache_seqlens, asked,
        alibi_slopes, new, rotary_of(rotary_cos, rotary_sin, rotary_interleaved),
    )  # fmt: skip
    found = in_rows(found, rows, count)
    return found if return_softmax_lse else found[0]
