"""A fake of the NKI library's kernel: binds the recorded signature, computes in float64."""

from __future__ import annotations

from typing import Any

import torch
from polyattn_fakes import bind
from torch import Tensor


def attention_cte(*args: Any, **kwargs: Any) -> Tensor:
    """Attend (KV heads, rows, size) to (KV heads, keys, size), each row within its own bounds."""
    a = bind("nkilib", "attention_cte", args, kwargs)
    query, key, value = a["q"], a["k"], a["v"]
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert all(t.is_contiguous() for t in (query, key, value))
    assert a["causal_mask"] is False and a["tp_q"] is a["tp_k"] is True
    assert query.shape[1] % 128 == 0 and query.shape[2] <= 128 and query.shape[0] <= 512
    low, high = a["bound_min"], a["bound_max"]
    assert low.shape == high.shape == (query.shape[1], 1) and low.dtype == torch.float32
    at = torch.arange(key.shape[1])
    scores = query.double() @ key.double().transpose(1, 2) * a["scale"]
    scores = scores.masked_fill((at < low) | (at >= high), -torch.inf)
    return (scores.softmax(-1) @ value.double()).to(query.dtype)
