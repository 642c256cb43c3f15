"""What can a captured graph hold? `flash_attn_with_kvcache`, its lengths left on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
from polyattn.families.attention.dense import Asked
from polyattn.families.attention.device_lens import way_of
from torch import Tensor

from polyattn_flash_attn.calls import Found

LEAST_PAGE, MOST_PAGE = 16, 256
"""Tokens of the pages that a dense cache is read in."""


class Cache(NamedTuple):
    """A cache as flash-attn is given one: pages and their `block_table`, or dense rows.

    `rows`: which row of a dense cache is a sequence's; None: its own. `leftpad`: where each starts in it.
    """

    key: Tensor
    value: Tensor
    block_table: Tensor | None
    rows: Tensor | None
    leftpad: Tensor | None


class New(NamedTuple):
    """New keys and values (tokens, heads, size), and how many are each sequence's."""

    key: Tensor
    value: Tensor
    lens: Sequence[int]


def is_local(asked: Asked) -> bool:
    """Whether a row's queries stand at positions of their own, by which they are rotated."""
    return asked.causal or asked.sliding_window is not None or asked.window_right is not None


def decode_on_device(
    query: Tensor, cache: Cache, new: New | None, lens: Tensor,
    rotary: Callable[[Tensor, Tensor], Tensor] | None, asked: Asked, slopes: Tensor | None,
) -> Found | None:  # fmt: skip
    """Append tokens, as many to each sequence, and attend. The LSE is (heads, tokens).

    None, and nothing has changed, where no backend goes by the device's lengths or a dense cache
    can't be viewed as pages. Whether a sequence has room nobody looks at, but for POLYATTN_CHECKS=1.
    """
    key, value, table = cache[:3]
    rows = lens.shape[0]
    if table is None:
        paged = _as_pages(cache, rows)
        if paged is None:
            return None
        key, value, table = paged
    way = way_of(query, key, value, table, lens, asked, alibi_slopes=slopes)
    if way is None:
        return None
    if rotary is not None:
        each = query.shape[0] // rows
        query = rotary(query, _positions(lens, each, 1 if is_local(asked) else 0).flatten())
    if new is not None:
        count, size = new.key.shape[0] // rows, key.shape[1]
        position = _positions(lens, count)
        page, at = table.gather(1, position // size).long().flatten(), position.flatten() % size
        turned = new.key if rotary is None else rotary(new.key, position.flatten())
        key[page, at], value[page, at] = turned.to(key.dtype), new.value.to(value.dtype)
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
