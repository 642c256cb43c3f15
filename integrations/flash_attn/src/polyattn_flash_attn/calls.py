"""What the functions of both versions come down to: packed queries, keys where they lie, a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from polyattn import PolyattnError
from polyattn.families.attention.dense import Asked, window
from polyattn.families.attention.dense import dense as attend_dense
from polyattn.families.attention.packed import Keys, packed
from polyattn.families.attention.views import ordered
from torch import Tensor

Window = tuple[int, int]
Found = tuple[Tensor, Tensor | None]


def sides_of(window: Window) -> Window:
    """Return a window's two numbers, which may be tensors."""
    left, right = window
    return int(left), int(right)


@lru_cache(maxsize=1024)
def asked_of(
    scale: float | None, causal: bool, sides: Window, softcap: float, alibi: bool,
    needs_lse: bool, chunk: int = 0,
) -> Asked:  # fmt: skip
    """Return what a call asks for in polyattn's words; `alibi`: with slopes. Raises `PolyattnError`."""
    causal, left, right = window(causal, *sides)
    if alibi and not causal:
        raise PolyattnError(
            "alibi_slopes without causal=True: flash-attn's bias falls off to both sides there, "
            "polyattn's doesn't; nothing serves that yet"
        )
    cap = softcap if softcap > 0 else None
    return Asked(causal, scale, left, right, cap, chunk or None, needs_lse)


def dense(
    query: Tensor, key: Tensor, value: Tensor, asked: Asked, slopes: Tensor | None = None
) -> Found:
    """Attend for (batch, seqlen, heads, size). The LSE is (batch, heads, seqlen)."""
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if not training and (slopes is None or slopes.dim() == 1):
        out, lse = attend_dense(query, key, value, asked, alibi_slopes=slopes)
        return out, None if lse is None else lse.transpose(1, 2)
    rows, count = query.shape[:2]
    # Gradients of views that overlap would be counted twice.
    keys, values = (ordered(t, heads_first=False) for t in (key, value))
    where = Keys(keys, values, [key.shape[1]] * rows)
    found = attend(query.flatten(0, 1), [count] * rows, where, asked, slopes)
    return in_rows(found, rows, count)


def attend(
    query: Tensor, query_lens: Sequence[int], keys: Keys, asked: Asked, slopes: Tensor | None = None
) -> Found:
    """Attend for packed queries. The LSE is (heads, tokens)."""
    out, lse = packed(query, query_lens, keys, asked, alibi_slopes=slopes)
    return out, None if lse is None else lse.T


def in_rows(found: Found, rows: int, count: int) -> Found:
    """View packed results as (batch, seqlen, heads, size) and (batch, heads, seqlen)."""
    out, lse = found
    out = out.view(rows, count, *out.shape[1:])
    return out, None if lse is None else lse.view(-1, rows, count).transpose(0, 1)
