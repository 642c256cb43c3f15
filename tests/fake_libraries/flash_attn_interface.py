"""A fake of FlashAttention-3's interface: binds the recorded signature, computes with the reference."""

from __future__ import annotations

from typing import Any

import torch
from polyattn_fakes import attend_paged, bind, lengths
from torch import Tensor


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A packed batch over pages; LSE (heads, tokens), natural; from e4m3 comes bf16."""
    a = bind("flash_attn_3", "flash_attn_with_kvcache", args, kwargs)
    query, key = a["q"], a["k_cache"]
    assert a["return_softmax_lse"] is True and key.dtype == a["v_cache"].dtype == query.dtype
    starts, queries = lengths(a["cu_seqlens_q"])
    assert a["max_seqlen_q"] == max(queries)
    scales = (1.0, 1.0)
    dtype = query.dtype
    if dtype.itemsize == 1:
        shape, dtype = (len(queries), key.shape[2]), torch.bfloat16
        descales = [a[f"{name}_descale"] for name in "qkv"]
        assert all(d.shape == shape and d.dtype == torch.float32 for d in descales)
        factor, *scales = (float(d[0, 0]) for d in descales)
        query = query.to(torch.float64) * factor
    left, right = a["window_size"]
    out, lse = attend_paged(
        query, key, a["v_cache"], starts, a["cache_seqlens"].tolist(), a["page_table"],
        scale=a["softmax_scale"], window=(left, 0) if a["causal"] else (left, right),
        soft_cap=a["softcap"], slopes=None, scales=tuple(scales),
    )  # fmt: skip
    return out.to(dtype), lse, torch.empty(0), torch.empty(0)
