"""Attention without a layer, as a function: dense `(batch, seqlen, heads, size)` or packed sequences.

What engines need whose interface keeps nothing between calls: groups by what is asked of them, tensors
as tokens without a copy, and plans by the lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyattn.api import select
from polyattn.errors import BatchError
from polyattn.families.attention.alibi import alibi_slopes as default_slopes
from polyattn.families.attention.planning import AttentionStep
from polyattn.registry.discovery import generation
from polyattn.runtime.backend import LayerParams
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.kv_cache import KVCache
from polyattn.runtime.plan import StepPlan
from polyattn.settings import Settings, current
from polyattn.spec.layer import LayerSpec


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    window_right: int | None = None,
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

    Other arguments as `LayerSpec`'s fields of that name. Returns the output in the query's shape with
    the value's size, and where asked the LSE, float32, natural logarithm, (batch, queries, num_heads)
    or (tokens, num_heads). `backend` names one. Raises `BatchError`, and what `select` raises.
    """
    _check_shapes(query, key, value)
    group = group_for(
        query.device, backend, num_heads=query.shape[-2], num_kv_heads=key.shape[-2],
        head_size=query.shape[-1], v_head_size=value.shape[-1], scale=scale or 0.0,
        dtype=query.dtype, causal=causal, sliding_window=sliding_window, window_right=window_right,
        logit_soft_cap=logit_soft_cap, alibi=alibi_slopes is not None,
        learned_sinks=sinks is not None, needs_lse=return_lse, cached=False,
    )  # fmt: skip
    if query.dim() == 3:
        if query_lens is None:
            raise BatchError("packed sequences need query_lens, the tokens of each")
        lens = query_lens if key_lens is None else key_lens
        step = plan_for(group, tuple(query_lens), tuple(lens))
        out, lse = run(step, query, key, value, sinks=sinks, alibi_slopes=alibi_slopes)
    else:
        if query_lens is not None or key.shape[0] != query.shape[0]:
            raise BatchError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} are dense: their first sizes "
                "agree, and query_lens is left out"
            )
        keys, values, apart = keys_as_tokens(key, value)
        rows, count = query.shape[:2]
        step = plan_for(group, (count,) * rows, _row_lens(key, key_lens), apart)
        flat = query.reshape(rows * count, *query.shape[2:])
        out, lse = run(step, flat, keys, values, sinks=sinks, alibi_slopes=alibi_slopes)
        out = out.view(rows, count, *out.shape[1:])
        lse = None if lse is None else lse.view(rows, count, -1)
    return out if lse is None else (out, lse)


def group_for(device: torch.device, backend: str | None = None, **fields: Any) -> LayerGroup:
    """Return the group that serves a `LayerSpec` of these fields; `dtype` is torch's.

    It is made once for each way of calling: what a caller pays who keeps nothing. Each thread, and on
    CUDA each stream, has its own, since groups share workspaces. Raises what `select` raises.
    """
    place: Any = threading.get_ident()
    if device.type == "cuda":
        place = (place, torch.cuda.current_stream(device).cuda_stream)
    return _group(current(), generation(), place, device, backend, **fields)


@lru_cache(maxsize=1024)
def _group(
    settings: Settings, plugins: int, place: Any, device: torch.device, backend: str | None,
    **fields: Any,
) -> LayerGroup:  # fmt: skip
    dtype = str(fields.pop("dtype")).removeprefix("torch.")
    spec = LayerSpec(dtype=dtype, **fields)
    return LayerGroup(select(spec, device, backend=backend, settings=settings))


@lru_cache(maxsize=1024)
def plan_for(
    group: LayerGroup,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    apart: int | tuple[int, ...] | None = None,
) -> AttentionStep:
    """Return the plan for these lengths; a plan is a value, so that equal calls share one.

    `apart`: how far apart sequences' keys start, or where each starts; default: one after another.
    """
    starts: Sequence[int] | None = None
    if isinstance(apart, int):
        starts = range(0, apart * len(key_lens), apart) if apart else [0] * len(key_lens)
    elif apart is not None:
        starts = apart
    batch = Batch.from_lens(query_lens, key_lens, key_starts=starts, device=group.torch_device)
    step = group.plan(batch)
    assert isinstance(step, AttentionStep)
    return step


def run(
    step: StepPlan,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a step with parameters that come with the call. Tensors as `Attention.forward` takes them.

    Returns the output and, where the spec asks for it, the LSE. Raises `BatchError`.
    """
    assert isinstance(step, AttentionStep)
    params = _PLAIN
    spec = step.group.spec
    if spec.learned_sinks or spec.alibi:
        if spec.alibi and alibi_slopes is None:
            alibi_slopes = default_slopes(spec.num_heads)
        params = LayerParams(
            _per_head("sinks", sinks, spec.learned_sinks, query, spec),
            _per_head("alibi_slopes", alibi_slopes, spec.alibi, query, spec),
        )
    lse = None
    if spec.needs_lse:
        lse = query.new_empty(step.lse_shape, dtype=torch.float32)
    return step.call(query, key, value, cache, params, None, lse), lse


_PLAIN = LayerParams()


def _per_head(
    name: str, given: Tensor | None, wanted: bool, like: Tensor, spec: LayerSpec
) -> Tensor | None:
    if (given is not None) != wanted or (given is not None and given.shape != (spec.num_heads,)):
        shape = None if given is None else tuple(given.shape)
        raise BatchError(f"{name} has shape {shape}; {spec} takes one number a query head")
    return None if given is None else given.detach().to(like.device, torch.float32).contiguous()


def keys_as_tokens(
    key: Tensor, value: Tensor, heads_first: bool = False
) -> tuple[Tensor, Tensor, int]:
    """View dense keys and values (batch, seqlen, heads, size) as tokens (tokens, heads, size).

    Any order of batch, seqlen and heads in memory is viewed without a copy. Also returns how many
    tokens lie from one row's first key to the next one's. `heads_first`: they are (batch, heads,
    seqlen, size).
    """
    keys, apart = as_tokens(key, heads_first)
    values, others = as_tokens(value, heads_first)
    if apart != others:
        (keys, apart), (values, _) = (as_tokens(t.contiguous(), heads_first) for t in (key, value))
    return keys, values, apart


def as_tokens(tensor: Tensor, heads_first: bool = False) -> tuple[Tensor, int]:
    """View one dense tensor as tokens; a copy only where its strides allow no view."""
    rows, count, heads, size = tensor.shape
    row, token, head, element = tensor.stride()
    if heads_first:
        count, heads, token, head = heads, count, head, token
    apart = count if rows == 1 else row // (token or 1)
    if element != 1 or token <= 0 or (rows > 1 and row % token) or not tensor.numel():
        ordered = tensor.transpose(1, 2) if heads_first else tensor
        return ordered.reshape(rows * count, heads, size).contiguous(), count
    return tensor.as_strided(((rows - 1) * apart + count, heads, size), (token, head, 1)), apart


def _row_lens(key: Tensor, lens: Sequence[int] | None) -> tuple[int, ...]:
    rows, keys = key.shape[:2]
    if lens is None:
        return (keys,) * rows
    if len(lens) != rows or any(not 0 <= n <= keys for n in lens):
        raise BatchError(f"key_lens={list(lens[:4])}… must be {rows} lengths of 0 to {keys}")
    return tuple(lens)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
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
