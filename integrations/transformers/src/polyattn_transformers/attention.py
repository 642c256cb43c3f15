"""The function behind `attn_implementation="polyattn"`: one layer's attention of one forward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from polyattn import LayerGroup, PolyattnError
from polyattn.families.attention.dense import as_tokens, group_for, keys_as_tokens, plan_for, run
from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polyattn_transformers import paged
from polyattn_transformers.masks import Part, UnreadableMask, read
from polyattn_transformers.reporting import count, count_fallback

Found = tuple[Tensor, Tensor | None]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> Found:
    """Attend as the model's eager attention does.

    `query` (batch, heads, queries, size), `key`, `value` (batch, KV heads, keys, size). Returns the
    output (batch, queries, heads, size) and, where the model's own attention had to serve, its weights.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sinks = kwargs.get("s_aux")
    if sinks is None and "sinks" in module._parameters:
        sinks = module._parameters["sinks"]
    own = _own_attention(type(module).__module__)
    why = _refused(module, own, (query, key, value, sinks), dropout, kwargs)
    if isinstance(kwargs.get("cache"), PagedAttentionCache):
        if why is not None:
            raise PolyattnError(f"continuous batching of {type(module).__name__}: {why}")
        return paged.attend(module, query, key, value, scaling, softcap, sinks, kwargs), None
    if why is None and torch.compiler.is_compiling():
        out = torch.ops.polyattn_transformers.attention(
            query, key, value, attention_mask, sinks, is_causal, scaling, softcap
        )
        return out, None
    if why is None:
        try:
            return _attend(
                query, key, value, attention_mask, sinks, is_causal, scaling, softcap
            ), None
        except (UnreadableMask, PolyattnError) as error:
            why = str(error)
    if not torch.compiler.is_compiling():
        count_fallback(type(module).__name__, why)
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        attention_mask = attention_mask.tril()[None, None]
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, hidden
        )
    if softcap is not None:
        kwargs["softcap"] = softcap
    return own(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


@lru_cache(maxsize=256)
def _own_attention(module: str) -> Callable[..., Any]:
    """Return the eager attention of a model's file."""
    found = getattr(sys.modules.get(module), "eager_attention_forward", None)
    return sdpa_attention_forward if found is None else found


SERVED = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "s_aux",
    "sinks", "is_causal", "sliding_window", "cache", "kwargs",
}  # fmt: skip
"""Arguments of models' eager functions that are understood here (windows are in the mask)."""


@lru_cache(maxsize=256)
def _other_arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters) - SERVED


def _refused(
    module: nn.Module,
    own: Callable[..., Any],
    tensors: tuple[Tensor | None, ...],
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """Return why a call can't be served, None where it can, for all but its mask."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return "gradients are asked for"
    if dropout and module.training:
        return f"dropout={dropout}"
    if kwargs.get("output_attentions"):
        return "output_attentions=True"
    for name in _other_arguments(own):
        if kwargs.get(name) is not None:
            return f"the argument {name}"
    return None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    rows, _, queries, _ = query.shape
    keys, values, apart = keys_as_tokens(key, value, heads_first=True)
    flat, between = as_tokens(query, heads_first=True)
    if between != queries:
        flat = query.transpose(1, 2).flatten(0, 1)
    causal = is_causal and queries > 1
    if mask is None:
        group = _group(query, key, value, (causal, None, None), scaling, softcap, sinks)
        lens = (min(key.shape[2], queries) if causal else key.shape[2],) * rows
        step = plan_for(group, (queries,) * rows, lens, apart)
        out = run(step, flat, keys, values, sinks=sinks)[0]
        count(group)
        return out.view(rows, queries, *out.shape[1:])
    if mask.shape[3] != key.shape[2] or mask.shape[2] not in (1, queries):
        raise UnreadableMask(f"a mask of {tuple(mask.shape)} over {key.shape[2]} keys")
    out = flat.new_empty(*flat.shape[:2], value.shape[3])
    for part in read(mask.expand(-1, -1, queries, -1) if mask.shape[2] != queries else mask, rows):
        group = _group(query, key, value, part.kind, scaling, softcap, sinks)
        step = _plan(group, part, apart)
        if part.rows is None:
            out = run(step, flat, keys, values, sinks=sinks)[0]
        else:
            at = part.rows.to(flat.device)
            out[at] = run(step, flat[at], keys, values, sinks=sinks)[0]
        count(group)
    return out.view(rows, queries, *out.shape[1:])


def _plan(group: LayerGroup, part: Part, apart: int) -> Any:
    found = part.plans.get((group, apart))
    if found is None:
        starts = tuple(row * apart + first for row, first in part.firsts)
        found = plan_for(group, tuple(part.query_lens), tuple(part.key_lens), starts)
        part.plans[group, apart] = found
    return found


def _group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: tuple[bool, int | None, int | None],
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> LayerGroup:
    causal, window, right = kind
    return group_for(
        query.device, num_heads=query.shape[1], num_kv_heads=key.shape[1],
        head_size=query.shape[3], v_head_size=value.shape[3], scale=float(scaling),
        dtype=query.dtype, causal=causal, sliding_window=window, window_right=right,
        logit_soft_cap=softcap, learned_sinks=sinks is not None, cached=False,
    )  # fmt: skip


@torch.library.custom_op("polyattn_transformers::attention", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """The same as one operator, so that compiled graphs don't break: it plans when it runs."""
    try:
        return _attend(query, key, value, mask, sinks, is_causal, scaling, softcap)
    except UnreadableMask as error:
        raise PolyattnError(
            f"a compiled model has {error}, which its eager attention would have to serve; compile it "
            "with another attn_implementation"
        ) from error


@_operator.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None,
    is_causal: bool, scaling: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[3])
