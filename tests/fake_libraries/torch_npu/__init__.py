"""A fake torch-npu: binds the operator's recorded schema, computes with the reference."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from polyattn_fakes import attend_paged, bind
from torch import Tensor


def npu_fused_infer_attention_score_v2(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Packed queries over pages (blocks, block, KV heads * size); LSE (tokens, heads, 1), natural."""
    a = bind("torch_npu", "npu_fused_infer_attention_score_v2", args, kwargs)
    query, key, value = a["query"], a["key"], a["value"]
    ends, lens = a["actual_seq_qlen"], a["actual_seq_kvlen"]
    assert a["input_layout"] == "TND" and all(t.is_contiguous() for t in (query, key, value))
    assert query.shape[1:] == (a["num_query_heads"], 128) and ends[-1] == len(query)
    assert key.shape == value.shape and key.shape[2] == a["num_key_value_heads"] * 128
    assert a["block_size"] == key.shape[1] and a["block_size"] % 128 == 0
    assert a["block_table"].shape[0] == len(lens) and all(isinstance(n, int) for n in ends + lens)
    starts = [0, *ends]
    counts = [b - a for a, b in itertools.pairwise(starts)]
    assert all(n > 0 for n in lens) and a["pre_tokens"] is a["next_tokens"] is None
    causal = a["sparse_mode"] == 3
    if causal:
        assert a["atten_mask"].dtype == torch.bool
        assert torch.equal(a["atten_mask"], torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        assert all(q <= k for q, k in zip(counts, lens, strict=True))
    else:
        assert a["sparse_mode"] == 0 and a["atten_mask"] is None
    sinks = a["learnable_sink"]
    assert sinks is None or sinks.dtype == torch.bfloat16
    heads = (a["num_key_value_heads"], 128)
    out, lse = attend_paged(
        query, key.unflatten(2, heads), value.unflatten(2, heads), starts, lens, a["block_table"],
        scale=a["softmax_scale"], window=(-1, 0 if causal else -1), soft_cap=0.0, slopes=None,
        sinks=sinks,
    )  # fmt: skip
    return out, lse.T[..., None] if a["return_softmax_lse"] else torch.zeros(1)
