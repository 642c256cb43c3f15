"""What can a captured graph hold? `flash_attn_with_kvcache` of one token, its lengths left on the GPU."""

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
    """Append one token a sequence, and attend. Returns the output and, where asked, the LSE.

    None, and nothing has changed, where no backend goes by the device's lengths or a dense cache
    can't be viewed as pages. Whether a sequence has room nobody looks at, but for POLYATTN_CHECKS=1.
    """
    key, value, table = cache.key, cache.value, cache.block_table
    if table is None:
        paged = _as_pages(cache, query.shape[0])
        if paged is None:
            return None
        key, value, table = paged
    slopes, size = asked.alibi_slopes, key.shape[1]
    way = way_of(query, key, value, table, lens, asked_of(asked), alibi_slopes=slopes)
    if way is None:
        return None
    if rotary is not None or new is not None:
        position = lens.long()
    if rotary is not None:
        query = rotary(query, position)
    if new is not None:
        page = table.gather(1, (position // size)[:, None])[:, 0].long()
        new_key = new[0] if rotary is None else rotary(new[0], position)
        key[page, position % size] = new_key.to(key.dtype)
        value[page, position % size] = new[1].to(value.dtype)
        lens = way.after(lens)
    out, lse = way(query, key, value, table, lens, alibi_slopes=slopes)
    return out, None if lse is None else lse.T


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
