"""Attention over a caller's own cache: new tokens are appended in place and rotated, then all attend.

For callers that keep nothing else between calls. On a GPU few tokens of each sequence leave lengths
where they are: nothing is copied to the host, and what a graph captures can be replayed over others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.errors import CacheError
from polyattn.families.attention.dense import Asked
from polyattn.families.attention.device_lens import way_of
from polyattn.families.attention.packed import Keys, packed
from polyattn.families.attention.views import as_pages, keys_as_tokens
from polyattn.runtime.host_copies import values_of
from polyattn.runtime.inputs import capturing
from polyattn.runtime.rotation import Rotation

FEW = 16
"""Tokens of a row that are taken as a decode: drafts that are verified."""
BY_DEVICE = frozenset({"cuda"})
"""Devices whose lengths are left where they are; a CPU's cost nothing to read."""


class Cache(NamedTuple):
    """A cache in pages (pages, page size, KV heads, size) with an int32 `block_table`, or dense rows.

    Of dense rows (rows, seqlen, KV heads, size): `rows` says which is a sequence's, None: its own;
    `starts`, where in it each sequence's first key lies, None: at 0.
    """

    key: Tensor
    value: Tensor
    block_table: Tensor | None = None
    rows: Tensor | None = None
    starts: Tensor | None = None


class New(NamedTuple):
    """New keys and values (tokens, KV heads, size), and how many are each sequence's."""

    key: Tensor
    value: Tensor
    lens: Sequence[int]


class Turns(NamedTuple):
    """The rotary embedding: cos, sin (positions, rotary size / 2), paired as `Rotation` has it."""

    cos: Tensor
    sin: Tensor
    pairing: str

    def applied(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return packed tokens (tokens, heads, size) rotated by their positions, int64 (tokens,)."""
        turns = torch.cat([self.cos[position], self.sin[position]], -1).float()
        return Rotation(turns, None, self.pairing, turns.shape[1]).applied(tokens).to(tokens.dtype)


def cached(
    query: Tensor,
    query_lens: Sequence[int],
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    asked: Asked,
    *,
    new: New | None = None,
    turns: Turns | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Append `new` after each sequence's `cache_seqlens` tokens, and attend for packed `query`.

    `cache_seqlens`: int32 or int64 (num_seqs,), one number for all, or None: all of dense rows. Queries
    that see by position (a causal mask, a window) are rotated from there on, others all by that length.
    `alibi_slopes` as `packed` takes them. Where lengths stay on the device nobody looks whether a
    sequence has room, but for POLYATTN_CHECKS=1. Returns the output and, where asked, the LSE (tokens,
    heads), float32. Raises `CacheError` before anything has changed, and what `packed` raises.
    """
    lens = cache_seqlens
    if lens is None:
        if cache.block_table is not None or new is not None:
            raise CacheError("cache_seqlens is missing; a cache with room needs it")
        lens = cache.key.shape[1]
    way, pages = None, _pages_by_device(query, query_lens, cache, lens, new, alibi_slopes)
    if pages is not None:
        assert isinstance(lens, Tensor)
        way = way_of(query, *pages, lens, asked, alibi_slopes=alibi_slopes)
    host: list[int] = []
    if way is None:
        host = [lens] * len(query_lens) if isinstance(lens, int) else values_of(lens)
        _check(cache, host, new)
    if turns is not None:
        by_position = asked.causal or (asked.sliding_window, asked.window_right) != (None, None)
        _, position = _positions(lens, query_lens, query.device, 1 if by_position else 0)
        query = turns.applied(query, position)
    if new is not None:
        _append(cache, new, lens, turns)
    if way is not None and pages is not None:
        assert isinstance(lens, Tensor)
        after = lens if new is None else way.after(lens, new.lens[0])
        return way(query, *pages, after, alibi_slopes=alibi_slopes)
    if new is not None:
        host = [before + more for before, more in zip(host, new.lens, strict=True)]
    return packed(query, query_lens, _keys(cache, host), asked, alibi_slopes=alibi_slopes)


def _pages_by_device(
    query: Tensor, query_lens: Sequence[int], cache: Cache, lens: int | Tensor, new: New | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Return keys, values and block table where lengths needn't be copied to the host, else None.

    They needn't for as many tokens of each row, few unless captured: of many, a plan by exact lengths
    is worth the wait for them.
    """
    if not (
        isinstance(lens, Tensor)
        and lens.device.type in BY_DEVICE
        and lens.dtype == torch.int32
        and cache.starts is None
        and (slopes is None or slopes.dim() == 1)
        and _alike(query_lens)
        and (new is None or _alike(new.lens))
        and query_lens[0] > 0
        and (query_lens[0] <= FEW or capturing(query))
    ):
        return None
    if cache.block_table is not None:
        return cache[:3]  # type: ignore[return-value]
    return as_pages(cache.key, cache.value, cache.rows, len(query_lens))


def _alike(lens: Sequence[int]) -> bool:
    return len(lens) > 0 and lens.count(lens[0]) == len(lens)


def _check(cache: Cache, lens: list[int], new: New | None) -> None:
    """Check, before anything changes, that each sequence fits. Raises `CacheError`."""
    table, page = cache.block_table, cache.key.shape[1]
    if table is not None and cache.starts is not None and any(values_of(cache.starts)):
        raise CacheError("starts go with dense rows; sequences in pages start at 0")
    room, where = page, "the cache has"
    if table is not None:
        room, where = page * table.shape[1], f"block_table has {table.shape[1]} pages, so"
    for row, length in enumerate(lens):
        more = 0 if new is None else new.lens[row]
        if length + more > room:
            raise CacheError(
                f"cache_seqlens[{row}]={length} and {more} new tokens: {where} room for {room} tokens"
            )


def _append(cache: Cache, new: New, lens: int | Tensor, turns: Turns | None) -> None:
    """Store new tokens where each sequence ends."""
    key, value, table, rows, _ = cache
    seq, position = _positions(lens, new.lens, key.device)
    if table is None:
        at = seq if rows is None else rows[seq].long(), position
    else:
        at = table[seq, position // key.shape[1]].long(), position % key.shape[1]
    turned = new.key if turns is None else turns.applied(new.key, position)
    key[at], value[at] = turned.to(key.dtype), new.value.to(value.dtype)


def _positions(
    lens: int | Tensor, counts: Sequence[int], device: torch.device, step: int = 1
) -> tuple[Tensor, Tensor]:
    """Return each new token's sequence, and its position: that one's length and by `step` on.

    Both int64 (tokens,). Without the host where sequences have as many: a graph may capture that.
    """
    seq = torch.arange(len(counts), device=device)
    if _alike(counts):
        seq = seq.repeat_interleave(counts[0])
        offset = torch.arange(counts[0], device=device).repeat(len(counts))
    else:
        seq = seq.repeat_interleave(torch.tensor(counts, device=device))
        offset = torch.cat([torch.arange(n) for n in counts]).to(device)
    first = lens if isinstance(lens, int) else lens.to(device)[seq].long()
    return seq, first + offset * step


def _keys(cache: Cache, lens: list[int]) -> Keys:
    """Return where each sequence's keys lie."""
    key, value, table, rows, starts = cache
    if table is not None:
        return Keys(key, value, lens, None, table)
    keys, values, apart = keys_as_tokens(key, value)
    of_rows = range(len(lens)) if rows is None else values_of(rows)
    skipped = [0] * len(lens) if starts is None else values_of(starts)
    firsts = [row * apart + skip for row, skip in zip(of_rows, skipped, strict=True)]
    return Keys(keys, values, [n - skip for n, skip in zip(lens, skipped, strict=True)], firsts)
