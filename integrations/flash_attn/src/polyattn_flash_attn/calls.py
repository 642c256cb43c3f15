"""The calls behind both versions' functions: the options, and dense, packed or cached keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from polyattn import PolyattnError, attention
from polyattn.errors import CacheError
from polyattn.host import (
    CallerCache,
    CallOptions,
    NewKeys,
    PackedKeys,
    RotaryTables,
    asks_gradients,
    attend_cached,
    attend_dense,
    attend_packed,
    compiling,
    flash_window,
    lens_between,
    untraced,
    values_of,
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
    make = _options.__wrapped__ if compiling() else _options  # a trace ignores caches, and warns
    return make(scale, causal, int(left), int(right), softcap, slopes is not None, needs_lse, chunk)


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
    """Attend for (batch, seqlen, heads, size). The LSE is (batch, heads, seqlen).

    `torch.compile` traces it as one operator, unless it needs gradients or slopes of each row.
    """
    plain = not asks_gradients(query, key, value) and (slopes is None or slopes.dim() == 1)
    lse: Tensor | None
    if plain and compiling():
        fields = options._asdict()
        fields["return_lse"] = fields.pop("needs_lse")
        result = attention(query, key, value, alibi_slopes=slopes, **fields)
        out, lse = (result, None) if isinstance(result, Tensor) else result
    elif plain:
        out, lse = attend_dense(query, key, value, options, alibi_slopes=slopes)
    else:
        out, lse = _as_packed(query, key, value, options, slopes)
    return out, None if lse is None else lse.transpose(1, 2)


@untraced
def _as_packed(
    query: Tensor, key: Tensor, value: Tensor, options: CallOptions, slopes: Tensor | None
) -> Found:
    rows, count = query.shape[:2]
    keys = PackedKeys(key.flatten(0, 1), value.flatten(0, 1), [key.shape[1]] * rows)
    out, lse = attend_packed(
        query.flatten(0, 1), [count] * rows, keys, options, alibi_slopes=slopes
    )
    out = out.unflatten(0, (rows, count))
    return out, None if lse is None else lse.unflatten(0, (rows, count))


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    options: CallOptions,
    *,
    slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    used: tuple[Tensor | None, Tensor | None] = (None, None),
    gap: bool = False,
) -> Found:
    """Attend for packed queries. The LSE is (heads, tokens).

    `torch.compile` traces it as one operator, unless it needs gradients.

    Args:
        query: (tokens, heads, size).
        key: (keys, KV heads, size), or pages of `block_table`.
        value: likewise.
        starts: cumulative lengths of queries and of keys.
        options: the options of the call.
        slopes: (heads,) or (sequences, heads).
        block_table: the pages of each sequence.
        used: how many queries and keys of each sequence count; the other queries give 0.
        gap: whether keys may lie before the first sequence's.

    """
    tensors = query, key, value, *starts, slopes, block_table, *used
    if not compiling():
        out, lse = _varlen(options, *tensors, gap)
    elif asks_gradients(query, key, value):
        out, lse = untraced(_varlen)(options, *tensors, gap)
    else:
        out, *rest = torch.ops.polyattn_flash_attn.varlen(*tensors, gap, *options[:7])
        lse = rest[0] if rest else None
    return out, None if lse is None else lse.T


def _varlen(
    options: CallOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    slopes: Tensor | None,
    block_table: Tensor | None,
    used_queries: Tensor | None,
    used_keys: Tensor | None,
    gap: bool,
) -> Found:
    queries: Sequence[int] = lens_between(query_starts)
    keys: Sequence[int] = queries
    if used_keys is not None:
        keys = values_of(used_keys)
    elif key_starts is not query_starts:
        keys = lens_between(key_starts, gap)
    starts = values_of(key_starts)[:-1] if gap else None
    if used_queries is not None and starts is not None:
        # The unused queries become a sequence without keys.
        pairs = zip(values_of(used_queries), queries, strict=True)
        queries = [n for count, length in pairs for n in (count, length - count)]
        keys = [n for length in keys for n in (length, 0)]
        starts = [start for start in starts for _ in range(2)]
    packed = PackedKeys(key, value, keys, starts, block_table)
    return attend_packed(query, queries, packed, options, alibi_slopes=slopes)


def _run_varlen(*args: Any) -> list[Tensor]:
    out, lse = _varlen(CallOptions(*args[10:]), *args[:10])
    return [out] if lse is None else [out, lse]


def _fake_varlen(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> list[Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return [out, lse] if more[-1] else [out]


library = torch.library.Library("polyattn_flash_attn", "DEF")
# It reads lengths on the host: Inductor leaves it out of the CUDA graphs that it captures.
library.define(
    "varlen(Tensor query, Tensor key, Tensor value, Tensor query_starts, Tensor key_starts, "
    "Tensor? slopes, Tensor? block_table, Tensor? used_queries, Tensor? used_keys, bool gap, "
    "bool causal, float? scale, SymInt? sliding_window, SymInt? window_right, float? logit_soft_cap, "
    "SymInt? chunk_size, bool needs_lse) -> Tensor[]",
    tags=[torch.Tag.cudagraph_unsafe],
)
library.impl("varlen", _run_varlen, "CompositeExplicitAutograd")
torch.library.register_fake("polyattn_flash_attn::varlen", _fake_varlen, lib=library)


@untraced
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
