"""How do the attention kernels rotate keys as they load them? At their places within the cache.

StreamingLLM's form (Xiao et al., 2023): keys are kept unrotated. A product knows the difference of two
places alone, so keys turn by their place within their tile, which is the same for all tiles and loaded
once, and by their tile's place: decode turns its few queries by that instead. The first tokens that stay
beyond a window are nearer than in the sequence by what is gone between: tiles of theirs and tiles of the
window's are gone through apart, each with queries turned for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEAD = tl.constexpr(4)
"""Numbers that a table of turns begins with: the temperature, its length and offset."""


@triton.jit
def load_pairs(P, row, ok, SPAN: tl.constexpr, BLOCK_H: tl.constexpr, ROPE: tl.constexpr):
    """Load rows' rotated elements: the first and the second of each pair. Rows without `ok` are zero."""
    HALF: tl.constexpr = SPAN // 2
    if ROPE == 1:
        pair = tl.arange(0, BLOCK_H)
        mask = ok[:, None]
        if HALF != BLOCK_H:
            mask = mask & (pair < HALF)[None, :]
        first = tl.load(P + row[:, None] + pair[None, :], mask=mask, other=0.0)
        second = tl.load(P + row[:, None] + (pair + HALF)[None, :], mask=mask, other=0.0)
    else:
        element = tl.arange(0, 2 * BLOCK_H)
        mask = ok[:, None]
        if HALF != BLOCK_H:
            mask = mask & (element < SPAN)[None, :]
        both = tl.load(P + row[:, None] + element[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [row.shape[0], BLOCK_H, 2]))
    return first, second


@triton.jit
def load_rest(P, row, ok, D: tl.constexpr, SPAN: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load rows' elements that aren't rotated."""
    element = SPAN + tl.arange(0, BLOCK_P)
    mask = ok[:, None]
    if SPAN + BLOCK_P != D:
        mask = mask & (element < D)[None, :]
    return tl.load(P + row[:, None] + element[None, :], mask=mask, other=0.0)


@triton.jit
def frequencies(TURNS, BLOCK_H: tl.constexpr):
    """Each pair's turns of a circle from a place to the next, in two parts."""
    pair = tl.arange(0, BLOCK_H)
    return tl.load(TURNS + HEAD + pair), tl.load(TURNS + HEAD + BLOCK_H + pair)


@triton.jit
def places_in_tile(TURNS, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):
    """The cosines and sines of a tile's places, (BLOCK_N, BLOCK_H) each."""
    place = tl.arange(0, BLOCK_N)[:, None] * (2 * BLOCK_H)
    at = TURNS + HEAD + 2 * BLOCK_H + place + tl.arange(0, BLOCK_H)[None, :]
    return tl.load(at), tl.load(at + BLOCK_H)


@triton.jit
def _sine(t):
    """sin(2 pi t) of a quarter turn at most, to 1e-7: fitted at the Chebyshev nodes of t^2."""
    z = t * t
    p = z * 39.760722073269854 - 76.58128455898559
    p = p * z + 81.6024807428489
    p = p * z - 41.34168066806291
    p = p * z + 6.2831852802614145
    return p * t


@triton.jit
def turn_by(places, high, low):
    """The cosine and the sine of the angles at places, up to 2^24 exactly: whole turns go first."""
    places = places.to(tl.float32)
    whole = tl.floor(places * high + 0.5)
    part = tl.fma(places, high, -whole) + places * low
    away = tl.abs(part)
    sin = _sine(0.25 - tl.abs(0.25 - away))
    return _sine(0.25 - away), tl.where(part < 0.0, -sin, sin)


@triton.jit
def turned(first, second, cos, sin):
    """Pairs, turned."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def row_places_in_cache(row_pos, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr):
    """Queries' places within the cache, which no longer has the keys before their windows."""
    if CAUSAL and WINDOW > 0:
        row_pos = tl.minimum(row_pos, WINDOW + SINK - 1)
    return row_pos


@triton.jit
def query_scale(TURNS, places):
    """What queries at these places within the cache are multiplied by."""
    steps = tl.floor((places.to(tl.float32) + tl.load(TURNS + 2)) / tl.load(TURNS + 1))
    return 1.0 + tl.load(TURNS) * tl.log(1.0 + steps)


@triton.jit
def turned_queries(
    Q, TURNS, q_row, row_ok, row_pos, origin, LIKE,
    D: tl.constexpr, SPAN: tl.constexpr, BLOCK_H: tl.constexpr, ROPE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Rows' pairs in float32, turned to their places after `origin`, then to those in the cache.

    The first are for the window's keys, whose places are counted from `origin`; the others for the kept
    first tokens', counted from zero. What isn't rotated comes last, in LIKE's type; without any, zero.
    """
    in_cache = row_places_in_cache(row_pos, CAUSAL, WINDOW, SINK)
    factor = query_scale(TURNS, in_cache)[:, None]
    high, low = frequencies(TURNS, BLOCK_H)
    first, second = load_pairs(Q, q_row, row_ok, SPAN, BLOCK_H, ROPE)
    first = first.to(tl.float32) * factor
    second = second.to(tl.float32) * factor
    cos, sin = turn_by((row_pos - origin)[:, None], high[None, :], low[None, :])
    own, own_second = turned(first, second, cos, sin)
    kept = own
    kept_second = own_second
    if SINK > 0:
        cos, sin = turn_by(in_cache[:, None], high[None, :], low[None, :])
        kept, kept_second = turned(first, second, cos, sin)
    rest = 0
    if SPAN < D:
        BLOCK_P: tl.constexpr = rest_block(D, SPAN)
        rest = load_rest(Q, q_row, row_ok, D, SPAN, BLOCK_P).to(tl.float32) * factor
        rest = rest.to(LIKE.dtype)
    return own, own_second, kept, kept_second, rest


@triton.constexpr_function
def pair_block(span: int) -> int:
    """Return how many columns hold the pairs of `span` elements; a product wants 16 at least."""
    return max(16, 1 << (span // 2 - 1).bit_length())


@triton.constexpr_function
def rest_block(size: int, span: int) -> int:
    """Return the number of columns for the unrotated part of `size` elements."""
    return max(16, 1 << (size - span - 1).bit_length())
