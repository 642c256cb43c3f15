"""How are dense tensors packed tokens, without a copy? By their strides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyattn.runtime.kv_cache import KVCache

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


def ordered(tensor: Tensor, heads_first: bool) -> Tensor:
    """Return dense rows as packed tokens, one after another, copied where they don't lie so."""
    if heads_first:
        tensor = tensor.transpose(1, 2)
    rows, count, heads, size = tensor.shape
    return tensor.reshape(rows * count, heads, size).contiguous()


def as_tokens(tensor: Tensor, heads_first: bool = False) -> tuple[Tensor, int]:
    """View one dense tensor as tokens; a copy only where its strides allow no view."""
    view = token_view(tensor.shape, tensor.stride(), heads_first)
    if view is None:
        return ordered(tensor, heads_first), tensor.shape[2 if heads_first else 1]
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
        keys, values = ordered(key, heads_first), ordered(value, heads_first)
        apart = key.shape[2 if heads_first else 1]
    return keys, values, apart


def pages_of(key: Tensor, value: Tensor) -> KVCache:
    """Return pages (pages, page size, KV heads, size) as a cache; the same one for the same tensors.

    It is kept on `key`, over detached tensors: those themselves, or views of them, were a circle.
    """
    where = (
        key.data_ptr(), value.data_ptr(), key.shape, value.shape, key.stride(), value.stride(),
        key.dtype, value.dtype,
    )  # fmt: skip
    known: tuple[object, KVCache] | None = getattr(key, "_polyattn_pages", None)
    if known is None or known[0] != where:
        known = where, KVCache(key.detach(), value.detach())
        key._polyattn_pages = known  # type: ignore[attr-defined]
    return known[1]
