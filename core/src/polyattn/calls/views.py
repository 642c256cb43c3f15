"""How are dense tensors packed tokens, without a copy? By their strides."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.step.host_copies import stored
from polyattn.selection.cache_format import CacheFormat

View = tuple[tuple[int, int, int], tuple[int, int, int], int]
"""Sizes and strides of (tokens, heads, size), and how many tokens lie between rows' first ones."""


def token_view(shape: Sequence[int], stride: Sequence[int], heads_first: bool) -> View | None:
    """Return dense (batch, seqlen, heads, size) as tokens; None where their strides allow no view.

    Rows may lie anywhere in memory, at a distance of whole tokens. `heads_first`: (batch, heads,
    seqlen, size).
    """
    rows, count, heads, size = shape
    row, token, head, element = stride
    if heads_first:
        count, heads, token, head = heads, count, head, token
    if element != 1 or token <= 0 or (rows > 1 and row % token) or 0 in shape:
        return None
    apart = count if rows == 1 else row // token
    return ((rows - 1) * apart + count, heads, size), (token, head, 1), apart


def packed_rows(tensor: Tensor, heads_first: bool) -> Tensor:
    """Return dense rows as packed tokens, one after another, copied where they don't lie so."""
    if heads_first:
        tensor = tensor.transpose(1, 2)
    rows, count, heads, size = tensor.shape
    return tensor.reshape(rows * count, heads, size).contiguous()


def as_tokens(tensor: Tensor, heads_first: bool = False) -> tuple[Tensor, int]:
    """View one dense tensor as tokens; a copy only where its strides allow no view."""
    view = token_view(tensor.shape, tensor.stride(), heads_first)
    if view is None:
        return packed_rows(tensor, heads_first), tensor.shape[2 if heads_first else 1]
    return tensor.as_strided(view[0], view[1]), view[2]


def keys_as_tokens(
    key: Tensor, value: Tensor, heads_first: bool = False
) -> tuple[Tensor, Tensor, int]:
    """View dense keys and values (batch, seqlen, heads, size) as tokens (tokens, heads, size).

    Any order of batch, seqlen and heads in memory is viewed without a copy. Also returns how many
    tokens lie from one row's first key to the next one's. `heads_first`: they are (batch, heads,
    seqlen, size).
    """
    keys, apart = as_tokens(key, heads_first)
    values, others = as_tokens(value, heads_first)
    if apart != others:
        keys, values = packed_rows(key, heads_first), packed_rows(value, heads_first)
        apart = key.shape[2 if heads_first else 1]
    return keys, values, apart


LEAST_PAGE, MOST_PAGE = 16, 256
"""Tokens of the pages that dense rows are read in."""


def as_pages(
    key: Tensor, value: Tensor, rows: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """View dense keys and values (rows, seqlen, heads, size) as pages; None where strides allow no view.

    Also returns the block table, int32 (count, pages), of sequences in `rows`; None: the first ones.
    """
    seqlen = key.shape[1]
    page = gcd(seqlen, MOST_PAGE)
    if page < LEAST_PAGE or any(t.stride(0) != seqlen * t.stride(1) for t in (key, value)):
        return None
    each = seqlen // page
    table = torch.arange(key.shape[0] * each, dtype=torch.int32, device=key.device).view(-1, each)
    keys, values = (t.unflatten(1, (-1, page)).flatten(0, 1) for t in (key, value))
    return keys, values, table[:count] if rows is None else table[rows.long()]


def pages_of(key: Tensor, value: Tensor) -> KVCache:
    """Return pages (pages, page size, KV heads, size) as a cache; the same one for the same tensors.

    It is stored on `key`, over detached tensors: those themselves, or views of them, were a circle.
    """
    where = (
        key.data_ptr(), value.data_ptr(), key.shape, value.shape, key.stride(), value.stride(),
        key.dtype, value.dtype,
    )  # fmt: skip
    return stored(
        key, "_polyattn_pages", False, where, lambda: KVCache(key.detach(), value.detach())
    )


def joined_pages(storage: Tensor, form: CacheFormat, heads_first: bool = False) -> KVCache:
    """Return a cache over an engine's joined storage, as `KVCache.joined` makes it.

    The cache is made once for a tensor and stored on it.

    Args:
        storage: (num_blocks, block_size, heads, size): a key, then its value, in the last dimension.
        form: the format of the cache.
        heads_first: whether heads come before tokens within a page.

    Returns:
        The cache; it views the storage.

    Raises:
        CacheError: the storage doesn't have the format's shape or dtype.

    Examples:
        >>> spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)
        >>> cache = LayerGroup(spec).allocate_cache(num_blocks=4)
        >>> storage = torch.zeros(4, 16, 2, 128)
        >>> joined_pages(storage, cache.format) is joined_pages(storage, cache.format)
        True

    """
    where = storage.data_ptr(), storage.shape, storage.stride(), form, heads_first
    return stored(
        storage,
        "_polyattn_pages",
        False,
        where,
        lambda: KVCache.joined(storage.detach(), form, heads_first),
    )
