"""A fake AITER: binds the recorded signatures and computes with the reference."""

from __future__ import annotations

from typing import Any

import torch
from polyattn_fakes import FP8, attend_packed, attend_paged, bind, by_columns, lengths
from torch import Tensor


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Varlen over packed keys; LSE (heads, tokens), natural."""
    a = bind("aiter", "flash_attn_varlen_func", args, kwargs)
    assert a["return_lse"] is True and a["k"].dtype == a["q"].dtype
    assert a["block_table"] is None, "its assembly would ignore it"
    assert a["alibi_slopes"] is None or not a["logits_soft_cap"], "CK's ALiBi leaves the cap out"
    starts, queries = lengths(a["cu_seqlens_q"])
    key_starts, lens = lengths(a["cu_seqlens_k"])
    assert a["max_seqlen_q"] >= max(queries) and a["max_seqlen_k"] == max(lens)
    assert a["max_seqlen_q"] > 1, "it would take one token of each sequence for granted"
    left, right = a["window_size"][:2]
    # Without a causal mask its CK kernels take any two sizes, (0, 0) too (csrc/py_itfs_ck/
    # mha_varlen_fwd_kernels.cu). Its assembly knows no window, and gets what has neither side above 0
    # (`swa` in aiter/ops/mha.py), unless slopes keep it away.
    assert a["causal"] == (right == 0) or (left, right) == (0, 0)
    to_ck = a["alibi_slopes"] is not None or a["logits_soft_cap"]
    assert left or right or to_ck, "its assembly would ignore the window"
    options = {
        "scale": a["softmax_scale"], "window": a["window_size"], "soft_cap": a["logits_soft_cap"],
        "slopes": a["alibi_slopes"],
    }  # fmt: skip
    out, lse = attend_packed(a["q"], a["k"], a["v"], starts, key_starts, **options)
    a["out"].copy_(out)
    return a["out"], lse


def paged_attention_v1(*args: Any, **kwargs: Any) -> Tensor:
    """One query token a sequence; writes `out`, returns no LSE."""
    a = bind("aiter", "paged_attention_v1", args, kwargs)
    query, key, value = a["query"], a["key_cache"], a["value_cache"]
    count, heads, size = query.shape
    assert a["kv_cache_layout"] == "NHD" and a["mtp"] == 1 and a["cu_query_lens"] is None
    assert a["context_lens"].dtype == torch.int32 and key.shape[1] in (16, 32)
    lens = a["context_lens"].tolist()
    assert a["max_context_len"] >= max(lens)
    parts = count * heads * -(-a["max_context_len"] // a["partition_size"])
    assert a["workspace_buffer"].numel() >= parts * (size * query.element_size() + 8)
    a["workspace_buffer"].fill_(0xFF)
    scales = (1.0, 1.0)
    if a["kv_cache_dtype"] == "fp8":
        # The hardware computes its own e4m3, whatever the tensor's dtype claims.
        key, value = key.view(torch.uint8).view(FP8), value.view(torch.uint8).view(FP8)
        scales = (float(a["k_scale"]), float(a["v_scale"]))
    else:
        assert a["kv_cache_dtype"] == "auto" and key.dtype == query.dtype
    window = a["sliding_window"]
    # It adds slopes and hides keys before it caps, so that a hidden key has the logit -cap.
    assert not a["logits_soft_cap"] or (a["alibi_slopes"] is None and not window)
    out, _ = attend_paged(
        query, key, value, list(range(count + 1)), lens, by_columns(a["block_tables"]), scale=a["scale"],
        window=(window - 1, 0) if window else (-1, 0), soft_cap=a["logits_soft_cap"],
        slopes=a["alibi_slopes"], scales=scales,
    )  # fmt: skip
    a["out"].copy_(out)
    return a["out"]
