"""A fake of FlashAttention-3's interface: binds the recorded signatures, computes with the reference."""

from __future__ import annotations

from typing import Any

import torch
from polyattn_fakes import attend_packed, attend_paged, bind, lengths
from torch import Tensor


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A packed batch over pages; LSE (heads, tokens), natural; from e4m3 comes bf16."""
    a = bind("flash_attn_3", "flash_attn_with_kvcache", args, kwargs)
    query, key = a["q"], a["k_cache"]
    assert a["return_softmax_lse"] is True and key.dtype == a["v_cache"].dtype == query.dtype
    starts, queries = lengths(a["cu_seqlens_q"])
    # A captured plan holds the most rows that its size may have.
    assert a["max_seqlen_q"] >= max(queries)
    scales: tuple[Any, Any] = (1.0, 1.0)
    dtype = query.dtype
    if dtype.itemsize == 1:
        shape, dtype = (len(queries), key.shape[2]), torch.bfloat16
        descales = [a[f"{name}_descale"] for name in "qkv"]
        assert all(d.shape == shape and d.dtype == torch.float32 for d in descales)
        each, *rest = (d.double() for d in descales)
        scales = (rest[0], rest[1])
        # One scale for a sequence and the heads that share its KV head.
        each = each.repeat_interleave(torch.tensor(queries), 0)
        each = each.repeat_interleave(query.shape[1] // key.shape[2], 1)
        query = query.to(torch.float64) * each[:, :, None]
    out, lse = attend_paged(
        query, key, a["v_cache"], starts, a["cache_seqlens"].tolist(), a["page_table"],
        scale=a["softmax_scale"], window=_window(a), soft_cap=a["softcap"], slopes=None,
        scales=scales,
    )  # fmt: skip
    return out.to(dtype), lse, torch.empty(0), torch.empty(0)


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Varlen over packed keys; LSE (heads, tokens), natural."""
    a = bind("flash_attn_3", "flash_attn_varlen_func", args, kwargs)
    assert a["return_attn_probs"] is True
    starts, queries = lengths(a["cu_seqlens_q"])
    key_starts, lens = lengths(a["cu_seqlens_k"])
    assert (a["max_seqlen_q"], a["max_seqlen_k"]) == (max(queries), max(lens))
    return attend_packed(
        a["q"], a["k"], a["v"], starts, key_starts, scale=a["softmax_scale"], window=_window(a),
        soft_cap=a["softcap"],
    )  # fmt: skip


def _window(a: dict[str, Any]) -> tuple[int, int]:
    left, right = a["window_size"]
    return (left, 0) if a["causal"] else (left, right)
