"""What can a captured graph hold? `flash_attn_with_kvcache`, its lengths left on the GPU."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from polyattn.families.attention.device_lens import way_of
from torch import Tensor

from polyattn_flash_attn.calls import FlashAsked, Rotary, asked_of

LEAST_PAGE, MOST_PAGE = 16, 256
"""Tokens of the pages that a dense cache is read in."""


class Cache(NamedTuple):
    """A cache as flash-attn is given one: pages and their `block_table`, or dense rows.

    `rows`: which row of a dense cache is a sequence's; None: its own.
    """

    key: Tensor
    value: Tensor
    block_table: Tensor | None
    rows: Tensor | None


def decode_on_device(
    query: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    lens: Tensor,
    rotary: Rotary | None,
    asked: FlashAsked,
) -> tuple[Tensor, Tensor | None] | None:
    """Append tokens, as many to each sequence, and attend. Returns the output and, where asked, the LSE.

    None, and nothing has changed, where no backend goes by the device's lengths or a dense cache
    can't be viewed as pages. Whether a sequence has room nobody looks at, but for POLYATTN_CHECKS=1.
    """
    key, value, table = cache.key, cache.value, cache.block_table
    rows = lens.shape[0]
    if table is None:
        paged = _as_pages(cache, rows)
        if paged is None:
            return None
        key, value, table = paged
    slopes, size = asked.alibi_slopes, key.shape[1]
    way = way_of(query, key, value, table, lens, asked_of(asked), alibi_slopes=slopes)
    if way is None:
        return None
    if rotary is not None:
        local = asked.causal or asked.window_size != (-1, -1)
        query = rotary(query, _positions(lens, query.shape[0] // rows, 1 if local else 0).flatten())
    if new is not None:
        count = new[0].shape[0] // rows
        position = _positions(lens, count)
        page, at = table.gather(1, position // size).long().flatten(), position.flatten() % size
        new_key = new[0] if rotary is None else rotary(new[0], position.flatten())
        key[page, at], value[page, at] = new_key.to(key.dtype), new[1].to(value.dtype)
        lens = way.after(lens, count)
    out, lse = way(query, key, value, table, lens, alibi_slopes=slopes)
    return out, None if lse is None else lse.T


def _positions(lens: Tensor, count: int, step: int = 1) -> Tensor:
    """Return int64 (rows, count): each row's length, and by `step` on from there."""
    return lens[:, None].long() + torch.arange(count, device=lens.device) * step


def _as_pages(cache: Cache, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dense keys and values in pages, and a block table; None where strides allow no view."""
    seqlen = cache.key.shape[1]
    page = gcd(seqlen, MOST_PAGE)
    if page < LEAST_PAGE or any(t.stride(0) != seqlen * t.stride(1) for t in cache[:2]):
        return None
    key, value = (t.unflatten(1, (-1, page)).flatten(0, 1) for t in cache[:2])
    each = seqlen // page
    table = torch.arange(cache.key.shape[0] * each, dtype=torch.int32, device=key.device)
    table = table.view(-1, each)
    return key, value, table[:count] if cache.rows is None else table[cache.rows.long()]
