"""A fake of the XPU kernels' interface: binds the recorded signature, computes with the reference."""

from __future__ import annotations

from typing import Any

import torch
from polyattn_fakes import attend_packed, attend_paged, bind, by_columns, lengths
from torch import Tensor


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Varlen over pages, or over packed keys; LSE (heads, tokens), natural, of prefills alone."""
    a = bind("vllm_xpu_kernels", "flash_attn_varlen_func", args, kwargs)
    query, key, value = a["q"], a["k"], a["v"]
    starts, queries = lengths(a["cu_seqlens_q"])
    assert a["max_seqlen_q"] >= max(queries)
    # The kernel for single tokens writes no LSE, of a mixed batch's rows neither.
    assert not a["return_softmax_lse"] or (a["max_seqlen_q"] > 1 and not a["is_mix_batch"])
    left, right = a["window_size"]
    assert right == -1 or left > -1, "kernels of windows, for a causal mask alone"
    right = 0 if a["causal"] else right
    assert a["s_aux"] is None or a["s_aux"].dtype == query.dtype
    options = {
        "scale": a["softmax_scale"], "window": (left, right), "soft_cap": 0.0, "slopes": None,
        "sinks": a["s_aux"],
    }  # fmt: skip
    if a["block_table"] is None:
        assert a["seqused_k"] is None and key.dtype == query.dtype
        key_starts, lens = lengths(a["cu_seqlens_k"])
        out, lse = attend_packed(query, key, value, starts, key_starts, **options)
    else:
        assert a["cu_seqlens_k"] is None and a["seqused_k"].dtype == torch.int32
        lens, scales = a["seqused_k"].tolist(), (1.0, 1.0)
        if key.dtype != query.dtype:
            for name in ("k_descale", "v_descale"):
                assert a[name].untyped_storage().nbytes() == a[name].element_size()
                assert a[name].shape == (len(lens), key.shape[2])
            scales = (a["k_descale"], a["v_descale"])
        else:
            assert a["k_descale"] is a["v_descale"] is None
        assert key.shape[1] % 16 == 0
        out, lse = attend_paged(
            query, key, value, starts, lens, by_columns(a["block_table"]), scales=scales, **options
        )
    assert a["max_seqlen_k"] >= max(lens)
    return (out, lse) if a["return_softmax_lse"] else out
