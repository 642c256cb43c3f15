"""`flash_attn_with_kvcache`: append to a cache in place, rotate, attend; caches dense or in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from polyattn import PolyattnError
from polyattn.families.attention.dense import Asked
from polyattn.families.attention.packed import Keys
from polyattn.families.attention.views import keys_as_tokens
from polyattn.runtime.host_copies import values_of
from polyattn.runtime.inputs import capturing
from polyattn.runtime.rotation import Rotation
from torch import Tensor

from polyattn_flash_attn.calls import Found, attend
from polyattn_flash_attn.device_lens import Cache, New, decode_on_device, is_local

FEW = 16
"""Tokens of a row that are taken as a decode: drafts that are verified."""
BY_DEVICE = frozenset({"cuda"})
"""Devices whose lengths are left where they are; a CPU's cost nothing to read."""


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of new queries and keys: cos, sin (positions, rotary size / 2)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Rotate packed tokens (tokens, heads, size)."""
        turns = torch.cat([self.cos[position], self.sin[position]], -1).float()
        pairing = "gptj" if self.interleaved else "neox"
        return Rotation(turns, None, pairing, turns.shape[1]).applied(tokens).to(tokens.dtype)


def rotary_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotary | None:
    """Return the rotary embedding, None without one."""
    return None if cos is None or sin is None else Rotary(cos, sin, interleaved)


def with_kvcache(
    query: Tensor,
    query_lens: Sequence[int],
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    asked: Asked,
    slopes: Tensor | None = None,
    new: New | None = None,
    rotary: Rotary | None = None,
) -> Found:
    """Append, and attend for packed `query`. The LSE is (heads, tokens)."""
    key, value, table, rows_given, leftpad = cache
    count, device = len(query_lens), query.device
    if cache_seqlens is None:
        if table is not None or new is not None:
            raise PolyattnError("cache_seqlens is missing; a cache with room needs it")
        cache_seqlens = key.shape[1]
    if _by_device(query, query_lens, cache, cache_seqlens, slopes, new):
        assert isinstance(cache_seqlens, Tensor)
        found = decode_on_device(query, cache, new, cache_seqlens, rotary, asked, slopes)
        if found is not None:
            return found
    lens = [cache_seqlens] * count if isinstance(cache_seqlens, int) else values_of(cache_seqlens)
    pads = [0] * count if leftpad is None else values_of(leftpad)
    rows = list(range(count)) if rows_given is None else values_of(rows_given)
    if table is not None and any(pads):
        raise PolyattnError("cache_leftpad goes with a dense cache; paged sequences start at 0")
    _check_room(cache, lens, [0] * count if new is None else new.lens)
    if rotary is not None:
        query = rotary(query, _positions(lens, query_lens, device, 1 if is_local(asked) else 0))
    if new is not None:
        position = _positions(lens, new.lens, device)
        seq = torch.repeat_interleave(torch.tensor(new.lens)).to(device)
        if table is None:
            at = torch.tensor(rows, device=device)[seq], position
        else:
            at = table[seq, position // key.shape[1]].long(), position % key.shape[1]
        turned = new.key if rotary is None else rotary(new.key, position)
        key[at], value[at] = turned.to(key.dtype), new.value.to(value.dtype)
        lens = [a + b for a, b in zip(lens, new.lens, strict=True)]
    if table is not None:
        return attend(query, query_lens, Keys(key, value, lens, None, table), asked, slopes)
    keys, values, apart = keys_as_tokens(key, value)
    starts = tuple(row * apart + pad for row, pad in zip(rows, pads, strict=True))
    used = [a - b for a, b in zip(lens, pads, strict=True)]
    return attend(query, query_lens, Keys(keys, values, used, starts), asked, slopes)


def _by_device(
    query: Tensor, query_lens: Sequence[int], cache: Cache, cache_seqlens: int | Tensor,
    slopes: Tensor | None, new: New | None,
) -> bool:  # fmt: skip
    """Whether lengths needn't be copied to the host: rows of as many tokens, few unless captured.

    Of many, a plan by exact lengths is worth the wait for them.
    """
    return (
        isinstance(cache_seqlens, Tensor)
        and cache_seqlens.device.type in BY_DEVICE
        and cache_seqlens.dtype == torch.int32
        and cache.leftpad is None
        and (slopes is None or slopes.dim() == 1)
        and _alike(query_lens)
        and (new is None or _alike(new.lens))
        and 0 < query_lens[0] <= (query_lens[0] if capturing(query) else FEW)
    )


def _alike(lens: Sequence[int]) -> bool:
    return len(lens) > 0 and lens.count(lens[0]) == len(lens)


def _check_room(cache: Cache, lens: list[int], new_lens: Sequence[int]) -> None:
    """Check, before anything changes, that each sequence fits. Raises `RuntimeError`, as flash-attn."""
    table = cache.block_table
    room = cache.key.shape[1] * (1 if table is None else table.shape[1])
    for row, (length, new) in enumerate(zip(lens, new_lens, strict=True)):
        if length + new > room:
            where = (
                "the cache has" if table is None else f"block_table has {table.shape[1]} pages, so"
            )
            raise RuntimeError(
                f"cache_seqlens[{row}]={length} and {new} new tokens: {where} room for {room} tokens"
            )


def _positions(
    lens: list[int], counts: Sequence[int], device: torch.device, step: int = 1
) -> Tensor:
    """Return each new token's position, int64: its sequence's length and, by `step`, on from there."""
    parts = [torch.arange(n) * step + first for first, n in zip(lens, counts, strict=True)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64)]).to(device)
