"""What the functions of both versions come down to: what is asked, and dense, packed or cached keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from polyattn.errors import CacheError, PolyattnError
from polyattn.families.attention.stateless.cached import Cache, New, Turns, cached
from polyattn.families.attention.stateless.dense import Asked, window
from polyattn.families.attention.stateless.dense import dense as attend_dense
from polyattn.families.attention.stateless.packed import Keys, packed
from polyattn.families.attention.stateless.views import ordered
from polyattn.runtime.step.host_copies import lens_between
from torch import Tensor

Window = tuple[int, int]
Found = tuple[Tensor, Tensor | None]


def asked_of(
    scale: float | None, causal: bool, sides: Window, softcap: float, slopes: Tensor | None,
    needs_lse: bool, chunk: int = 0,
) -> Asked:  # fmt: skip
    """Return what a call asks for in polyattn's words. `sides`, a window's numbers, may be tensors."""
    left, right = sides
    return _asked(
        scale, causal, int(left), int(right), softcap, slopes is not None, needs_lse, chunk
    )


@lru_cache(maxsize=1024)
def _asked(
    scale: float | None, causal: bool, left: int, right: int, softcap: float, alibi: bool,
    needs_lse: bool, chunk: int,
) -> Asked:  # fmt: skip
    causal, before, after = window(causal, left, right)
    if alibi and not causal:
        raise PolyattnError(
            "alibi_slopes without causal=True: flash-attn's bias falls off to both sides there, "
            "polyattn's doesn't; nothing serves that yet"
        )
    cap = softcap if softcap > 0 else None
    return Asked(causal, scale, before, after, cap, chunk or None, needs_lse)


def dense(
    query: Tensor, key: Tensor, value: Tensor, asked: Asked, slopes: Tensor | None = None
) -> Found:
    """Attend for (batch, seqlen, heads, size). The LSE is (batch, heads, seqlen)."""
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if not training and (slopes is None or slopes.dim() == 1):
        out, lse = attend_dense(query, key, value, asked, alibi_slopes=slopes)
        return out, None if lse is None else lse.transpose(1, 2)
    # Gradients of views that overlap would be counted twice.
    keys, values = (ordered(t, heads_first=False) for t in (key, value))
    where = Keys(keys, values, [key.shape[1]] * key.shape[0])
    out, lse = packed(*_tokens(query, None), where, asked, alibi_slopes=slopes)
    return _in_rows(out, lse, *query.shape[:2])


def varlen(
    query: Tensor, query_lens: Sequence[int], keys: Keys, asked: Asked, slopes: Tensor | None = None
) -> Found:
    """Attend for packed queries. The LSE is (heads, tokens)."""
    out, lse = packed(query, query_lens, keys, asked, alibi_slopes=slopes)
    return out, None if lse is None else lse.T


def with_kvcache(
    query: Tensor, key: Tensor | None, value: Tensor | None, cache: Cache,
    lens: int | Tensor | None, asked: Asked,
    rotary: tuple[Tensor | None, Tensor | None, bool], slopes: Tensor | None = None,
    starts: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Found:  # fmt: skip
    """Append and attend. Queries and new keys in rows, or packed where `starts` are theirs.

    `rotary`: cos, sin, interleaved. Raises `RuntimeError`, as flash-attn does, where there is no room.
    """
    query_lens = None if starts[0] is None else lens_between(starts[0])
    new = turns = None
    cos, sin, interleaved = rotary
    if (key is None) != (value is None) or (cos is None) != (sin is None):
        raise PolyattnError("k and v, rotary_cos and rotary_sin: one of a pair is missing")
    if key is not None and value is not None:
        new = New(_tokens(key, starts[1])[0], *_tokens(value, starts[1]))
    if cos is not None and sin is not None:
        turns = Turns(cos, sin, "gptj" if interleaved else "neox")
    try:
        out, lse = cached(
            query, query_lens, cache, lens, asked, new=new, turns=turns, alibi_slopes=slopes
        )
    except CacheError as error:
        raise RuntimeError(str(error)) from error
    return out, None if lse is None else lse.transpose(-1, -2)


def _tokens(given: Tensor, starts: Tensor | None) -> tuple[Tensor, Sequence[int]]:
    """Return tokens one after another, and how many are each sequence's."""
    if starts is not None:
        return given, lens_between(starts)
    return given.flatten(0, 1), [given.shape[1]] * given.shape[0]


def _in_rows(out: Tensor, lse: Tensor | None, rows: int, count: int) -> Found:
    """View packed results as (batch, seqlen, heads, size) and (batch, heads, seqlen)."""
    out = out.view(rows, count, *out.shape[1:])
    return out, None if lse is None else lse.view(rows, count, -1).transpose(1, 2)
