"""What the functions of both versions come down to: packed queries, keys where they lie, a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from polyattn import PolyattnError
from polyattn.families.attention.dense import Asked
from polyattn.families.attention.dense import dense as attend_dense
from polyattn.families.attention.packed import Keys, packed
from polyattn.families.attention.views import ordered
from polyattn.runtime.inputs import capturing
from torch import Tensor

Window = tuple[int, int]
UNBOUNDED = 1 << 30
"""Keys after a query that no window hides."""


class FlashAsked(NamedTuple):
    """What a call asks for beside its tensors, in flash-attn's words."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    attention_chunk: int = 0
    needs_lse: bool = False


class Rotary:
    """The rotary embedding of new queries and keys: cos, sin (positions, rotary size / 2)."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool):
        self.cos, self.sin, self.interleaved = cos, sin, interleaved

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Rotate packed tokens (tokens, heads, size)."""
        half = self.cos.shape[1]
        cos, sin = self.cos[position, None].float(), self.sin[position, None].float()
        turned, rest = tokens[..., : 2 * half].float(), tokens[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        pair = a * cos - b * sin, a * sin + b * cos
        whole = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([whole.to(tokens.dtype), rest], -1)


def refuse(**given: object) -> None:
    """Refuse arguments that change the result and have no counterpart. Raises `PolyattnError`."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            raise PolyattnError(
                f"{name} is given, which polyattn_flash_attn doesn't serve; leave it out"
            )


def lens_of(cumulative: Tensor) -> tuple[int, ...]:
    """Return the lengths between `cu_seqlens`, copied to the host once for each of its values."""
    starts = host(cumulative)
    known: tuple[list[int], tuple[int, ...]] | None = getattr(cumulative, "_polyattn_lens", None)
    if known is None or known[0] is not starts:
        known = starts, tuple([b - a for a, b in pairwise(starts)])
        cumulative._polyattn_lens = known  # type: ignore[attr-defined]
    return known[1]


def host(tensor: Tensor) -> list[int]:
    """Return a tensor's values, remembered by the tensor until it changes. Raises `PolyattnError`."""
    if capturing(tensor):
        raise PolyattnError(
            "a captured graph holds dense calls, and flash_attn_with_kvcache with as many tokens in each "
            "row and int32 cache_seqlens; this call's lengths are read on the host: run it outside"
        )
    version = None if tensor.is_inference() else tensor._version
    known = getattr(tensor, "_polyattn_host", None)
    if known is None or known[0] != version or version is None:
        known = (version, tensor.tolist())
        tensor._polyattn_host = known  # type: ignore[attr-defined]
    return known[1]


def dense(
    query: Tensor, key: Tensor, value: Tensor, asked: FlashAsked
) -> tuple[Tensor, Tensor | None]:
    """Attend for (batch, seqlen, heads, size).

    Returns the output and, where asked, the LSE (batch, heads, seqlen).
    """
    slopes = asked.alibi_slopes
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if not training and (slopes is None or slopes.dim() == 1):
        out, lse = attend_dense(query, key, value, asked_of(asked), alibi_slopes=slopes)
        return out, None if lse is None else lse.transpose(1, 2)
    rows, count = query.shape[:2]
    # Gradients of views that overlap would be counted twice.
    keys, values = (ordered(t, heads_first=False) for t in (key, value))
    where = Keys(keys, values, [key.shape[1]] * rows)
    out, lse = attend(query.reshape(rows * count, *query.shape[2:]), [count] * rows, where, asked)
    return out.view(rows, count, *out.shape[1:]), by_rows(lse, rows, count)


def by_rows(lse: Tensor | None, rows: int, count: int) -> Tensor | None:
    """View an LSE (heads, tokens) as (batch, heads, seqlen)."""
    return None if lse is None else lse.view(-1, rows, count).transpose(0, 1)


def attend(
    query: Tensor, query_lens: Sequence[int], keys: Keys, asked: FlashAsked
) -> tuple[Tensor, Tensor | None]:
    """Attend for packed queries. Returns the output and, where asked, the LSE (heads, tokens)."""
    out, lse = packed(query, query_lens, keys, asked_of(asked), alibi_slopes=asked.alibi_slopes)
    return out, None if lse is None else lse.T


def asked_of(asked: FlashAsked) -> Asked:
    """Return what is asked in polyattn's words. Raises `PolyattnError`."""
    scale, causal, window, softcap, slopes, chunk, needs_lse = asked
    return _asked(scale, causal, tuple(window), softcap, slopes is not None, chunk, needs_lse)


@lru_cache(maxsize=1024)
def _asked(
    scale: float | None, causal: bool, window: tuple[int, ...], softcap: float, alibi: bool,
    chunk: int, needs_lse: bool,
) -> Asked:  # fmt: skip
    left, right = window
    causal = causal or right == 0
    if alibi and not causal:
        raise PolyattnError(
            "alibi_slopes without causal=True: flash-attn's bias falls off to both sides there, "
            "polyattn's doesn't; nothing serves that yet"
        )
    after = None
    if not causal and (left >= 0 or right >= 0):
        after = int(right) if right >= 0 else UNBOUNDED
    return Asked(
        causal, scale, int(left) + 1 if left >= 0 else None, after,
        softcap if softcap > 0 else None, chunk or None, needs_lse,
    )  # fmt: skip
