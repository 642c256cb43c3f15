"""Attention without a cache, as a function: dense `(batch, seqlen, heads, size)` or packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyattn.api import select
from polyattn.errors import BatchError
from polyattn.families.attention.layer import Attention
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.spec.layer import LayerSpec


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_lens: Sequence[int] | None = None,
    key_lens: Sequence[int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to keys and values that are given whole. Forward only: gradients are refused.

    - Dense: `query` (batch, queries, num_heads, head_size), `key` and `value` (batch, keys,
      num_kv_heads, size). `key_lens`: how many keys of each row count, from its first; default: all.
    - Packed: `query` (tokens, num_heads, head_size) of sequences of `query_lens` one after another,
      `key` and `value` likewise of `key_lens` (default: `query_lens`).
    - `causal` is aligned to the bottom right: the last query sees the last key. A query that sees
      nothing gives 0.

    Returns the output in the query's shape with the value's size, and where asked the LSE, float32,
    natural logarithm, (batch, queries, num_heads) or (tokens, num_heads). `backend` names one. Raises
    `BatchError`, and what `select` raises.
    """
    batch = _batch(query, key, value, query_lens, key_lens)
    dtype = str(query.dtype).removeprefix("torch.")
    fields: tuple[Any, ...] = (
        query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1], scale or 0.0, dtype,
        causal, sliding_window, logit_soft_cap, alibi_slopes is not None, sinks is not None,
        return_lse, str(query.device), backend,
    )  # fmt: skip
    layer = Attention(_group(fields), sinks=sinks, alibi_slopes=alibi_slopes, checks=False)
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (query, key, value)]
    found = layer(flat[0], flat[1], flat[2], None, layer.group.plan(batch))
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.view(*query.shape[:-1], value.shape[-1])
    return out if lse is None else (out, lse.view(query.shape[:-1]))


def _batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int] | None,
    key_lens: Sequence[int] | None,
) -> Batch:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != query.dim() or tensor.dim() not in (3, 4):
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}; all three are (batch, seqlen, heads, size) or "
                "packed (tokens, heads, size)"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise BatchError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in more than their size"
        )
    if query.dim() == 3:
        if query_lens is None:
            raise BatchError("packed sequences need query_lens, the tokens of each")
        lens = list(query_lens if key_lens is None else key_lens)
        return Batch([0, *accumulate(query_lens)], lens, device=query.device)
    if query_lens is not None or key.shape[0] != query.shape[0]:
        raise BatchError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} are dense: their first sizes agree, "
            "and query_lens is left out"
        )
    count, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    given = [keys] * count if key_lens is None else list(key_lens)
    if len(given) != count or any(not 0 <= n <= keys for n in given):
        raise BatchError(f"key_lens={given[:4]}… must be {count} lengths of 0 to {keys}")
    starts = list(range(0, count * queries + 1, queries)) if queries else [0] * (count + 1)
    firsts = [row * keys for row in range(count)]
    return Batch(starts, given, key_starts=firsts, device=query.device)


@lru_cache(maxsize=256)
def _group(fields: tuple[Any, ...]) -> LayerGroup:
    """One group for each way of calling: a stateless caller pays for selection once."""
    (heads, kv_heads, size, v_size, scale, dtype, causal, window, cap, alibi, sinks, lse, device,
     backend) = fields  # fmt: skip
    spec = LayerSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, v_head_size=v_size, scale=scale,
        dtype=dtype, causal=causal, sliding_window=window, logit_soft_cap=cap, alibi=alibi,
        learned_sinks=sinks, needs_lse=lse, cached=False,
    )  # fmt: skip
    return LayerGroup(select(spec, torch.device(device), backend=backend))
