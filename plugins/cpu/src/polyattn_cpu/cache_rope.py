"""Rotates keys when they are read, at their places within the cache (StreamingLLM)."""

from __future__ import annotations

import torch
from polyattn.kernel import LayerSpec, rotation_at
from torch import Tensor

from polyattn_cpu.gather import Span


def turned_in_cache(
    spec: LayerSpec, query: Tensor, keys: Tensor, span: Span, first: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products are those at places within the cache.

    `query` (queries, num_heads, size), the first one at place `first` of its sequence; `keys` (KV
    heads, keys, size). What the window has left between the first tokens and itself is gone from the
    cache. Rotations depend on differences only, and only the first tokens are nearer than in the
    sequence. For them the queries rotate again, and each key has zeros in the other half. What comes
    back is twice as wide then, in at least float32.
    """
    places = torch.arange(first, first + query.shape[0], device=query.device)
    positions = span.positions().to(query.device)
    gone = torch.zeros_like(places)
    if spec.causal and spec.sliding_window is not None:
        held = spec.sliding_window - 1 + spec.sink_tokens
        gone = (places - held).clamp(min=0)
        length = min(length, held + 1)
    rotated = rotation_at(spec, positions, length).applied(keys.transpose(0, 1)).transpose(0, 1)
    at_place = rotation_at(spec, places, length).applied(query)
    in_cache = rotation_at(spec, places - gone, length)
    if in_cache.query_scale is not None:
        at_place = at_place * in_cache.query_scale[:, None, None]
    if not spec.sink_tokens or spec.sliding_window is None:
        return at_place, rotated
    sink = (positions < spec.sink_tokens)[None, :, None]
    wide = torch.cat([rotated.masked_fill(sink, 0.0), rotated.masked_fill(~sink, 0.0)], dim=2)
    return torch.cat([at_place, in_cache.applied_to_query(query)], dim=2), wide
