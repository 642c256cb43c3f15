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
    """Two ranges of keys, `[kept_start, kept_stop)` and `[near_start, near_stop)`.

    Keys count from the sequence's first, 0. Either range may be empty (stop == start). The ranges don't
    overlap, and the kept one lies left of the near one; they may touch.
    """

    kept_start: Any
    kept_stop: Any
    near_start: Any
    near_stop: Any


def window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return flash-attn's (left, right): keys beside the query, itself not counted; -1 is none."""
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

    The union of what each query sees, exactly: every key in the ranges is seen by some query, and no
    other is. `spec.dense_context` isn't considered: for a whole prompt pass the spec without its window.

    Args:
        spec: the layer; `causal`, `sliding_window`, `window_right`, `sink_tokens` and `chunk_size` count.
        first: position of the first query. Negative where queries outnumber keys. Int or int64 array.
        last: position of the last query, at least `first`.
        length: number of keys.
        minimum: elementwise minimum; for arrays `numpy.minimum`, for tensors `torch.minimum`.
        maximum: likewise.
        floor_divide: division that rounds down, by a positive number; for where `//` isn't that.

    Example:
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
