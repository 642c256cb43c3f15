"""Which keys may a query, or a block of neighbouring queries, see? `key_ranges` is the one answer.

Planners, kernels' work lists and costs take it from here, so that a window, kept first tokens, a chunk
and causality mean the same on every backend. It imports neither torch nor numpy: ints, numpy arrays and
torch tensors pass through the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import floordiv
from typing import Any, NamedTuple

from polyattn.spec.layer import LayerSpec


class KeyRanges(NamedTuple):
    """Two ranges of keys: the sink tokens and the window.

    Keys count from the sequence's first, 0. Either range may be empty (stop == start). The ranges don't
    overlap; the sink tokens are left of the window and may touch it.

    Attributes:
        kept_start: the first sink token: int, or int64 array or tensor.
        kept_stop: the key after the last sink token.
        near_start: the first key of the window.
        near_stop: the key after the window.

    Examples:
        >>> KeyRanges(0, 2, 6, 10).near_stop
        10

    """

    kept_start: Any
    kept_stop: Any
    near_start: Any
    near_stop: Any


def window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return a layer's window as flash-attn names it: keys to the left and to the right of the query.

    The query's own key isn't counted, and -1 means no bound.

    Args:
        spec: the layer; `causal`, `sliding_window` and `window_right` count.

    Returns:
        (left, right), in tokens.

    Examples:
        >>> window_sizes(LayerSpec(num_heads=1, head_size=64, sliding_window=128))
        (127, 0)

    """
    left = -1 if spec.sliding_window is None else spec.sliding_window - 1
    if spec.causal:
        return left, 0
    return left, left if spec.window_right is None else spec.window_right


def key_ranges(
    spec: LayerSpec,
    first: Any,
    last: Any,
    length: Any,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
    floor_divide: Callable[[Any, int], Any] = floordiv,
) -> KeyRanges:
    """Return the keys that the queries at positions `first` to `last` see of `length` keys.

    It is the exact union over these queries: each key in the ranges is seen by at least one of them, and
    no other key is. `spec.dense_context` doesn't count: for a whole prompt pass the spec without its
    window. Windows are Mistral's, kept first tokens StreamingLLM's (Xiao et al., 2024), chunks Llama 4's.

    Args:
        spec: the layer; `causal`, `sliding_window`, `window_right`, `sink_tokens` and `chunk_size` count.
        first: position of the first query. Negative where queries outnumber keys. Int or int64 array.
        last: position of the last query, at least `first`.
        length: number of keys.
        minimum: elementwise minimum; for arrays `numpy.minimum`, for tensors `torch.minimum`.
        maximum: elementwise maximum.
        floor_divide: division that rounds down, by a positive number; for where `//` isn't that.

    Returns:
        The two ranges, of the arguments' type.

    Examples:
        >>> key_ranges(LayerSpec(num_heads=1, head_size=64, sliding_window=4, sink_tokens=2), 9, 9, 10)
        KeyRanges(kept_start=0, kept_stop=2, near_start=6, near_stop=10)

    """
    zero = length * 0
    start, stop = zero, length
    if spec.chunk_size is not None:  # floors, so that positions below 0 are in chunks of their own
        chunk = spec.chunk_size
        start = minimum(maximum(start, floor_divide(first, chunk) * chunk), length)
        stop = minimum(stop, (floor_divide(last, chunk) + 1) * chunk)
    if spec.causal:
        stop = minimum(stop, last + 1)
    stop = maximum(stop, start)
    kept_stop, near_start, near_stop = start, start, stop
    left, right = window_sizes(spec)
    if left >= 0:
        near_start = minimum(maximum(near_start, first - left), stop)
    if right >= 0 and not spec.causal:
        near_stop = maximum(minimum(near_stop, last + right + 1), near_start)
    if spec.sink_tokens and (left >= 0 or right > 0):
        kept_stop = maximum(minimum(stop, zero + spec.sink_tokens), start)
        near_start = maximum(near_start, kept_stop)
        near_stop = maximum(near_stop, near_start)
    return KeyRanges(start, kept_stop, near_start, near_stop)


def all_seen(spec: LayerSpec) -> int:
    """Return up to how many queries and keys of each sequence a window and chunks hide none.

    Args:
        spec: the layer.

    Returns:
        The shorter of both; 0 where a kernel must keep them anyway. What is captured, or planned by
        bounds, runs for other lengths, too. Other kernels may round otherwise, where no step may change a
        bit. A layer's functions are compiled before the first step. Without a causal mask, queries may
        lie before the first key, in another chunk.

    Examples:
        >>> all_seen(LayerSpec(num_heads=8, head_size=64, sliding_window=1024))
        1024

    """
    widths = [n for n in (spec.sliding_window, spec.chunk_size) if n]
    bounded = spec.graph_capture or spec.length_bounds or (spec.chunk_size and not spec.causal)
    if not widths or bounded or spec.batch_invariant or spec.variant or spec.mask:
        return 0
    return min(widths)
