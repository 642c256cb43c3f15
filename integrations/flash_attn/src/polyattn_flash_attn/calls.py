"""The calls behind both versions' functions: the options, and dense, packed or cached keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from polyattn import PolyattnError
from polyattn.errors import CacheError
from polyattn.host import (
    CallerCache,
    CallOptions,
    NewKeys,
    PackedKeys,
    RotaryTables,
    attend_cached,
    attend_dense,
    attend_packed,
    flash_window,
    lens_between,
)
from torch import Tensor

Window = tuple[int, int]
Found = tuple[Tensor, Tensor | None]


def options_of(
    scale: float | None,
    causal: bool,
    sides: Window,
    softcap: float,
    slopes: Tensor | None,
    needs_lse: bool,
    chunk: int = 0,
) -> CallOptions:
    """Return what a call asks for in polyattn's words. `sides`, a window's numbers, may be tensors."""
    left, right = sides
    if left is None or right is None:
        raise PolyattnError(f"window_size={sides}: write -1 for a side without a bound")
    return _options(
        scale, causal, int(left), int(right), softcap, slopes is not None, needs_lse, chunk
    )


@lru_cache(maxsize=1024)
def _options(
    scale: float | None, causal: bool, left: int, right: int, softcap: float, alibi: bool,
    needs_lse: bool, chunk: int,
) -> CallOptions:  # fmt: skip
    causal, before, after = flash_window(causal, left, right)
    if alibi and not causal:
        raise PolyattnError(
            "alibi_slopes without causal=True: flash-attn's bias falls off to both sides there, "
            "polyattn's doesn't; nothing serves that yet"
        )
    cap = softcap if softcap > 0 else None
    return CallOptions(causal, scale, before, after, cap, chunk or None, needs_lse)


def dense(
    query: Tensor, key: Tensor, value: Tensor, options: CallOptions, slopes: Tensor | None = None
) -> Found:
    """Attend for (batch, seqlen, heads, size). The LSE is (batch, heads, seqlen)."""
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if not training and (slopes is None or slopes.dim() == 1):
        out, lse = attend_dense(query, key, value, options, alibi_slopes=slopes)
        return out, None if lse is None else lse.transpose(1, 2)
    rows, count = query.shape[:2]
    keys = PackedKeys(key.flatten(0, 1), value.flatten(0, 1), [key.shape[1]] * rows)
    out, lse = attend_packed(
        query.flatten(0, 1), [count] * rows, keys, options, alibi_slopes=slopes
    )
    out = out.unflatten(0, (rows, count))
    return out, None if lse is None else lse.unflatten(0, (rows, count)).transpose(1, 2)


def varlen(
    query: Tensor,
    query_lens: Sequence[int],
    keys: PackedKeys,
    options: CallOptions,
    slopes: Tensor | None = None,
) -> Found:
    """Attend for packed queries. The LSE is (heads, tokens)."""
    out, lse = attend_packed(query, query_lens, keys, options, alibi_slopes=slopes)
    return out, None if lse is None else lse.T


def with_kvcache(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: CallerCache,
    lens: int | Tensor | None,
    options: CallOptions,
    rotary: tuple[Tensor | None, Tensor | None, bool],
    slopes: Tensor | None = None,
    starts: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Found:
    """Append and attend. Queries and new keys come in rows, or packed by `starts`.

    `rotary`: cos, sin, interleaved. Raises `RuntimeError`, as flash-attn does, if the cache has no room.
    """
    query_lens = None if starts[0] is None else lens_between(starts[0])
    new = turns = None
    cos, sin, interleaved = rotary
    if (key is None) != (value is None) or (cos is None) != (sin is None):
        raise PolyattnError(
            "k and v, rotary_cos and rotary_sin: one of a pair is missing; pass both"
        )
    if key is not None and value is not None:
        new = NewKeys(_tokens(key, starts[1])[0], *_tokens(value, starts[1]))
    if cos is not None and sin is not None:
        turns = RotaryTables(cos, sin, "gptj" if interleaved else "neox")
    try:
        out, lse = attend_cached(
            query, query_lens, cache, lens, options, new=new, turns=turns, alibi_slopes=slopes
        )
    except CacheError as error:
        raise RuntimeError(str(error)) from error
    return out, None if lse is None else lse.transpose(-1, -2)


def _tokens(tensor: Tensor, starts: Tensor | None) -> tuple[Tensor, Sequence[int]]:
    """Return tokens one after another, and how many are each sequence's."""
    if starts is not None:
        return tensor, lens_between(starts)
    return tensor.flatten(0, 1), [tensor.shape[1]] * tensor.shape[0]
