"""`flash_attn_with_kvcache`: append to a cache in place, rotate, attend; caches dense or in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyattn import PolyattnError
from polyattn.families.attention.packed import Keys
from polyattn.families.attention.views import keys_as_tokens
from polyattn.runtime.inputs import capturing
from torch import Tensor

from polyattn_flash_attn.calls import FlashAsked, Rotary, attend, host
from polyattn_flash_attn.device_lens import Cache, decode_on_device


def with_kvcache(
    query: Tensor,
    query_lens: Sequence[int],
    k_cache: Tensor,
    v_cache: Tensor,
    new: tuple[Tensor, Tensor, Sequence[int]] | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    rotary: Rotary | None,
    asked: FlashAsked,
) -> tuple[Tensor, Tensor | None]:
    """Packed `query` and new keys. Returns the output and, where asked, the LSE (heads, tokens)."""
    count, device = len(query_lens), query.device
    if cache_seqlens is None:
        if block_table is not None or new is not None:
            raise PolyattnError("cache_seqlens is missing; a cache with room needs it")
        cache_seqlens = k_cache.shape[1]
    if _alike(query, query_lens, new) and stays_on_device(
        cache_seqlens, cache_leftpad, asked.alibi_slopes
    ):
        cache = Cache(k_cache, v_cache, block_table, cache_batch_idx)
        token = None if new is None else (new[0], new[1])
        found = decode_on_device(query, cache, token, cache_seqlens, rotary, asked)  # type: ignore[arg-type]
        if found is not None:
            return found
    lens = [cache_seqlens] * count if isinstance(cache_seqlens, int) else host(cache_seqlens)
    pads = [0] * count if cache_leftpad is None else host(cache_leftpad)
    rows = list(range(count)) if cache_batch_idx is None else host(cache_batch_idx)
    if block_table is not None and any(pads):
        raise PolyattnError("cache_leftpad goes with a dense cache; paged sequences start at 0")
    _check_room(k_cache, block_table, lens, [0] * count if new is None else new[2])
    if rotary is not None:
        local = asked.causal or asked.window_size != (-1, -1)
        query = rotary(query, _positions(lens, query_lens, device, 1 if local else 0))
    if new is not None:
        key, value, new_lens = new
        position = _positions(lens, new_lens, device)
        if rotary is not None:
            key = rotary(key, position)
        seq = torch.repeat_interleave(torch.tensor(new_lens)).to(device)
        if block_table is None:
            at = torch.tensor(rows, device=device)[seq], position
        else:
            page = k_cache.shape[1]
            at = block_table[seq, position // page].long(), position % page
        k_cache[at], v_cache[at] = key.to(k_cache.dtype), value.to(v_cache.dtype)
        lens = [a + b for a, b in zip(lens, new_lens, strict=True)]
    if block_table is not None:
        return attend(query, query_lens, Keys(k_cache, v_cache, lens, None, block_table), asked)
    keys, values, apart = keys_as_tokens(k_cache, v_cache)
    starts = tuple(row * apart + pad for row, pad in zip(rows, pads, strict=True))
    used = [a - b for a, b in zip(lens, pads, strict=True)]
    return attend(query, query_lens, Keys(keys, values, used, starts), asked)


def stays_on_device(
    cache_seqlens: int | Tensor | None, cache_leftpad: Tensor | None, slopes: Tensor | None
) -> bool:
    """Whether a call of as many tokens in each row can go by lengths that aren't copied to the host."""
    return (
        isinstance(cache_seqlens, Tensor)
        and cache_seqlens.device.type in BY_DEVICE
        and cache_seqlens.dtype == torch.int32
        and cache_leftpad is None
        and (slopes is None or slopes.dim() == 1)
    )


def _alike(
    query: Tensor, query_lens: Sequence[int], new: tuple[Tensor, Tensor, Sequence[int]] | None
) -> bool:
    """Whether rows have one number of tokens: few, unless a graph is captured.

    Of many, a plan by exact lengths is worth the wait for them.
    """
    same = len(set(query_lens)) == 1 and (new is None or len(set(new[2])) == 1)
    return same and 0 < query_lens[0] <= (query_lens[0] if capturing(query) else FEW)


FEW = 16
"""Tokens of a row that are taken as a decode: drafts that are verified."""
BY_DEVICE = frozenset({"cuda"})
"""Devices whose lengths are left where they are; a CPU's cost nothing to read."""


def _check_room(
    k_cache: Tensor, block_table: Tensor | None, lens: list[int], new_lens: Sequence[int]
) -> None:
    """Check, before anything changes, that each sequence fits. Raises `RuntimeError`, as flash-attn."""
    pages = 1 if block_table is None else block_table.shape[1]
    room = pages * k_cache.shape[1]
    for row, (length, new) in enumerate(zip(lens, new_lens, strict=True)):
        if length + new > room:
            where = "the cache has" if block_table is None else f"block_table has {pages} pages, so"
            raise RuntimeError(
                f"cache_seqlens[{row}]={length} and {new} new tokens: {where} room for {room} tokens"
            )


def _positions(
    lens: list[int], counts: Sequence[int], device: torch.device, step: int = 1
) -> Tensor:
    """Return each new token's position, int64: its sequence's length and, by `step`, on from there."""
    parts = [torch.arange(n) * step + first for first, n in zip(lens, counts, strict=True)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64)]).to(device)
