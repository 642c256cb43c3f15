"""Attention over a caller's own cache: new tokens are rotated and appended in place, then all attend.

It is for callers that keep nothing else between calls. On a GPU, with few tokens for each sequence,
lengths stay on the device. Nothing is copied to the host then, and a captured graph can be replayed
with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.calls.lengths_on_device import BoundPages, bind_pages, find_bound
from polyattn.calls.packed import PackedKeys, attend_packed
from polyattn.calls.plans import CallOptions
from polyattn.calls.views import as_pages, keys_as_tokens
from polyattn.errors import CacheError
from polyattn.runtime.inputs import capturing
from polyattn.runtime.rotation import Rotation
from polyattn.runtime.step.host_copies import values_of

FEW = 16
"""Tokens of a row that are taken as a decode: drafts that are verified."""
BY_DEVICE = frozenset({"cuda"})
"""Devices on which lengths stay; reading them costs nothing on a CPU."""


class CallerCache(NamedTuple):
    """A cache that the caller owns: pages with a block table, or dense rows.

    Attributes:
        key: pages (pages, page size, KV heads, size), or rows (rows, seqlen, KV heads, size).
        value: as `key`, with the values' size.
        block_table: int32 (num_seqs, columns): each sequence's pages; None for rows.
        rows: integers (num_seqs,): each sequence's row; None: its own number.
        starts: integers (num_seqs,): the token of the row that is the sequence's first; None: 0.

    Examples:
        >>> rows = torch.zeros(2, 3, 128, 2, 64)  # 3 sequences of up to 128 tokens
        >>> CallerCache(*rows).block_table is None
        True

    """

    key: Tensor
    value: Tensor
    block_table: Tensor | None = None
    rows: Tensor | None = None
    starts: Tensor | None = None


class NewKeys(NamedTuple):
    """The keys and values that a call appends to the caller's cache.

    Attributes:
        key: (tokens, KV heads, size), sequences one after another.
        value: as `key`, with the values' size.
        lens: the number of new tokens of each sequence, on the host.

    Examples:
        >>> NewKeys(torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), [2, 1]).lens
        [2, 1]

    """

    key: Tensor
    value: Tensor
    lens: Sequence[int]


class RotaryTables(NamedTuple):
    """A rotary embedding (Su et al., 2021) as tables.

    Attributes:
        cos: (positions, rotary size / 2), the cosines of the angles.
        sin: the sines, as `cos`.
        pairing: `"neox"` or `"gptj"`, as in `Rotation`.

    Examples:
        >>> angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.01])
        >>> tables = RotaryTables(angles.cos(), angles.sin(), "neox")
        >>> tables.applied(torch.ones(1, 1, 4), torch.tensor([0])).tolist()
        [[[1.0, 1.0, 1.0, 1.0]]]

    """

    cos: Tensor
    sin: Tensor
    pairing: str

    def applied(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return tokens rotated by their positions.

        Args:
            tokens: (tokens, heads, size), packed.
            position: int64 (tokens,).

        """
        turns = torch.cat([self.cos[position], self.sin[position]], -1).float()
        return Rotation(turns, None, self.pairing, turns.shape[1]).applied(tokens).to(tokens.dtype)


def attend_cached(
    query: Tensor,
    query_lens: Sequence[int] | None,
    cache: CallerCache,
    cache_seqlens: int | Tensor | None,
    options: CallOptions,
    *,
    new: NewKeys | None = None,
    turns: RotaryTables | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Append new keys to a caller's own cache, and attend over it for packed queries.

    Queries that see by position (a causal mask, a window, chunks) are rotated from their sequence's
    length on, others all by that length. If lengths stay on the device, only POLYATTN_CHECKS=1 checks
    that a sequence has room.

    Args:
        query: (tokens, heads, size), sequences one after another; without `query_lens`, rows (num_seqs,
            tokens of each, heads, size).
        query_lens: query tokens of each sequence, or None.
        cache: keys and values in pages or in dense rows, in the query's dtype.
        cache_seqlens: tokens of each sequence before the new ones: int32 or int64 (num_seqs,), one
            number for all, or None for all of dense rows.
        options: the options of the call.
        new: the keys and values to append after those tokens; None: nothing is appended.
        turns: the rotary tables that queries and new keys are rotated by; None: neither is.
        alibi_slopes: float32 (heads,) or (num_seqs, heads).

    Returns:
        The output, of the query's shape with the values' size, and the LSE where the options need it,
        else None: float32 (tokens, heads) or (num_seqs, tokens of each, heads), natural logarithm.

    Raises:
        CacheError: dtypes differ or a sequence has no room; the cache is unchanged.
        BatchError, SelectionError: as `attend_packed`.

    Examples:
        >>> from polyattn.host import CallerCache, CallOptions, attend_cached
        >>> pages = torch.randn(2, 4, 16, 2, 64)  # keys and values: 4 pages of 16 tokens, 2 KV heads
        >>> cache = CallerCache(pages[0], pages[1], block_table=torch.tensor([[3, 1]]).int())
        >>> out, lse = attend_cached(torch.randn(1, 1, 4, 64), None, cache, 20, CallOptions(causal=True))
        >>> out.shape, lse
        (torch.Size([1, 1, 4, 64]), None)

    """
    if new is None and turns is None:
        bound = _bound(query, query_lens, cache, cache_seqlens, options, alibi_slopes)
        if bound is not None:
            assert isinstance(cache_seqlens, Tensor)
            return bound(query, *cache[:3], cache_seqlens, alibi_slopes=alibi_slopes)  # type: ignore[arg-type]
    lens_of = [query.shape[1]] * query.shape[0] if query_lens is None else query_lens
    if cache.key.dtype != query.dtype:
        raise CacheError(
            f"the cache is {cache.key.dtype}, the query {query.dtype}; convert one of them, or read a "
            "quantised cache by a layer (polyattn.Attention), which has its scales"
        )
    lens = _lens(cache_seqlens, len(lens_of), cache, new)
    sides = options.sliding_window, options.window_right, options.chunk_size
    step = 1 if options.causal or sides != (None, None, None) else 0
    bound, pages = None, _pages_by_device(query, lens_of, cache, lens, new, turns, alibi_slopes)
    if pages is not None:
        assert isinstance(lens, Tensor)
        bound = bind_pages(query, *pages, lens, options, alibi_slopes=alibi_slopes)
    ends: list[int] = []
    if bound is None:
        host = [lens] * len(lens_of) if isinstance(lens, int) else values_of(lens)
        ends = _ends(cache, host, new)
        if turns is not None:
            last = (n + max(0, count - 1) * step for n, count in zip(host, lens_of, strict=True))
            _check_turns(turns, max([*last, *(n - 1 for n in ends)], default=-1))
    tokens = query.flatten(0, 1) if query_lens is None else query
    if turns is not None:
        tokens = turns.applied(tokens, _positions(lens, lens_of, query.device, step)[1])
        query = tokens.view(query.shape)
    if new is not None:
        _append(cache, new, lens, turns, checked=bound is None)
    if bound is not None and pages is not None:
        assert isinstance(lens, Tensor)
        after = lens if new is None else bound.after(lens, new.lens[0])
        return bound(query, *pages, after, alibi_slopes=alibi_slopes)
    out, lse = attend_packed(
        tokens, lens_of, _keys(cache, ends), options, alibi_slopes=alibi_slopes
    )
    return _as(out, query), None if lse is None else _as(lse, query)


def _bound(
    query: Tensor,
    query_lens: Sequence[int] | None,
    cache: CallerCache,
    lens: int | Tensor | None,
    options: CallOptions,
    slopes: Tensor | None,
) -> BoundPages | None:
    """Return what serves plain decodes over pages that lie as earlier ones did, which were checked."""
    if (
        not isinstance(lens, Tensor)
        or cache.block_table is None
        or cache.rows is not None
        or cache.starts is not None
        or (query_lens is not None and not (len(query_lens) == len(lens) and _alike(query_lens)))
        or (slopes is not None and slopes.dim() != 1)
    ):
        return None
    return find_bound(query, *cache[:3], lens, options, alibi_slopes=slopes)  # type: ignore[arg-type]


def _as(result: Tensor, query: Tensor) -> Tensor:
    """View packed results in rows, where the queries came in rows."""
    return result.view(*query.shape[:2], *result.shape[1:]) if query.dim() == 4 else result


def _lens(
    seqlens: int | Tensor | None, count: int, cache: CallerCache, new: NewKeys | None
) -> int | Tensor:
    """Return the lengths, their form checked. Raises `CacheError`."""
    if seqlens is None:
        if cache.block_table is not None or new is not None:
            raise CacheError(
                "cache_seqlens is missing; pass each sequence's length, because the "
                "cache has free room"
            )
        return cache.key.shape[1]
    if not isinstance(seqlens, int) and (
        not isinstance(seqlens, Tensor) or seqlens.shape != (count,)
    ):
        form = (
            tuple(seqlens.shape) if isinstance(seqlens, Tensor) else f"a {type(seqlens).__name__}"
        )
        raise CacheError(f"cache_seqlens is {form}; it is a number, or a tensor ({count},)")
    for name, lens in (("rows", cache.rows), ("starts", cache.starts)):
        if lens is not None and lens.shape != (count,):
            raise CacheError(f"{name} of the cache is {tuple(lens.shape)}; it must be ({count},)")
    if cache.rows is not None and cache.block_table is not None:
        raise CacheError(
            "rows go with dense rows; of pages, pass those sequences' rows of block_table"
        )
    if new is not None and len(new.lens) != count:
        raise CacheError(f"new keys are of {len(new.lens)} sequences; the queries are of {count}")
    return seqlens


def _pages_by_device(
    query: Tensor,
    query_lens: Sequence[int],
    cache: CallerCache,
    lens: int | Tensor,
    new: NewKeys | None,
    turns: RotaryTables | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return keys, values and block table where lengths needn't be copied to the host, else None.

    They needn't for as many tokens of each row, few unless captured: of many, a plan by exact lengths
    is worth the wait for them.
    """
    if not (
        isinstance(lens, Tensor)
        and lens.device.type in BY_DEVICE
        and lens.dtype == torch.int32
        and lens.is_contiguous()
        and cache.starts is None
        and (turns is None or turns.cos.shape[0] >= _room(cache))
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


def _room(cache: CallerCache) -> int:
    """Return how many tokens a sequence may have."""
    table = cache.block_table
    return cache.key.shape[1] * (1 if table is None else table.shape[1])


def _check_turns(turns: RotaryTables, last: int) -> None:
    if last >= turns.cos.shape[0]:
        raise CacheError(
            f"cos and sin have {turns.cos.shape[0]} positions; a token stands at {last}"
        )


def _ends(cache: CallerCache, lens: list[int], new: NewKeys | None) -> list[int]:
    """Return each sequence's length with its new tokens, for which there is room. Raises `CacheError`."""
    table, room = cache.block_table, _room(cache)
    where = "the cache has" if table is None else f"block_table has {table.shape[1]} pages, so"
    more = [0] * len(lens) if new is None else new.lens
    for row, (length, count) in enumerate(zip(lens, more, strict=True)):
        if not 0 <= length <= room - count:
            raise CacheError(
                f"cache_seqlens[{row}]={length} and {count} new tokens: {where} room for {room} tokens"
            )
    starts = [0] * len(lens) if cache.starts is None else values_of(cache.starts)
    if table is not None and any(starts):
        raise CacheError("starts (left padding) go with dense rows; leave them out with pages")
    ends = [length + count for length, count in zip(lens, more, strict=True)]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not 0 <= start <= end:
            raise CacheError(f"starts[{row}]={start} (left padding) is outside its {end} tokens")
    for row, place in enumerate([] if cache.rows is None else values_of(cache.rows)):
        if not 0 <= place < cache.key.shape[0]:
            raise CacheError(f"rows[{row}]={place}: the cache has {cache.key.shape[0]} rows")
    return ends


def _append(
    cache: CallerCache, new: NewKeys, lens: int | Tensor, turns: RotaryTables | None, checked: bool
) -> None:
    """Store new tokens where each sequence ends. `checked`: whether to check their pages first."""
    key, value, table, rows, _ = cache
    seq, position = _positions(lens, new.lens, key.device)
    if table is None:
        at = seq if rows is None else rows[seq].long(), position
    else:
        at = table[seq, position // key.shape[1]].long(), position % key.shape[1]
        if checked and len(at[0]):
            _check_pages(at[0], seq, key.shape[0])
    turned = new.key if turns is None else turns.applied(new.key, position)
    key[at], value[at] = turned.to(key.dtype), new.value.to(value.dtype)


def _check_pages(pages: Tensor, seq: Tensor, count: int) -> None:
    outside = ((pages < 0) | (pages >= count)).nonzero()
    if len(outside):
        first = outside[0]
        raise CacheError(
            f"block_table[{int(seq[first])}] gives a new token page {int(pages[first])}; the cache has "
            f"{count} pages, and each sequence needs its own for what it appends"
        )


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
        offset = torch.cat([torch.arange(n, device="cpu") for n in counts]).to(device)
    first = lens if isinstance(lens, int) else lens.to(device)[seq].long()
    return seq, first + offset * step


def _keys(cache: CallerCache, lens: list[int]) -> PackedKeys:
    """Return where each sequence's keys lie."""
    key, value, table, rows, starts = cache
    if table is not None:
        return PackedKeys(key, value, lens, None, table)
    keys, values, apart = keys_as_tokens(key, value)
    of_rows = range(len(lens)) if rows is None else values_of(rows)
    skipped = [0] * len(lens) if starts is None else values_of(starts)
    firsts = [row * apart + skip for row, skip in zip(of_rows, skipped, strict=True)]
    return PackedKeys(
        keys, values, [n - skip for n, skip in zip(lens, skipped, strict=True)], firsts
    )
