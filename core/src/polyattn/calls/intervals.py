"""What does a mask say? Which interval of keys each query sees. Kernels get these intervals.

Frameworks compose masks of causal, sliding, chunked, packed and padded parts, of image blocks. Whatever
they were composed of, most come down to intervals, and neighbouring queries' intervals to what kernels
serve: all keys, causal, a window. A mask is read once and remembered by its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.step.host_copies import stored

AT_A_TIME = 1 << 24
"""Entries of a mask that are read at a time."""

Kind = tuple[bool, int | None, int | None]
"""A call's options: causal, sliding_window, window_right."""


@dataclass
class Part:
    """Queries that one call serves: runs of neighbours, `firsts` the row and first key of each."""

    kind: Kind
    rows: Tensor | None = None  # which queries of the flattened batch; None is all, in order
    query_lens: list[int] = field(default_factory=list)
    key_lens: list[int] = field(default_factory=list)
    firsts: list[tuple[int, int]] = field(default_factory=list)
    plans: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What a mask says: its parts, and the number that it adds where it hides all keys by a finite one.

    Such a query attends to these keys as if nothing hid them. `least` is float32 (rows * queries,), 0
    elsewhere, or None. `even`: the number swallows the scores, so that all keys weigh the same.
    """

    parts: list[Part]
    least: Tensor | None
    even: bool


class UnreadableMask(BatchError):
    """The mask is no choice of one interval of keys for each query.

    `where`: an entry that shows it, for the mask's author; hosts count fallbacks by the message alone.
    """

    def __init__(self, what: str, where: str = ""):
        super().__init__(what)
        self.where = where


def read(mask: Tensor, rows: int, queries: int, *, sinks: bool = False) -> Reading:
    """Return which keys the mask shows, (rows or 1, 1, queries or 1, keys). Raises `UnreadableMask`.

    Bool, True to attend; or float, 0 to attend and the dtype's least value not to. What it says is
    stored on the tensor until that changes. `sinks` outweigh keys that a finite number hides.
    """
    state = rows, queries, sinks
    return stored(mask, "_polyattn_parts", True, state, lambda: _read(mask, *state))


def _read(mask: Tensor, rows: int, queries: int, sinks: bool) -> Reading:
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise UnreadableMask(f"a mask of shape {tuple(mask.shape)}, which differs between heads")
    low, high, least = _intervals(mask[:, 0], sinks)
    if low.shape != (rows, queries):
        low, high, least = (
            np.ascontiguousarray(np.broadcast_to(t, (rows, queries))) for t in (low, high, least)
        )
    added = torch.from_numpy(least).flatten().float() if least.any() else None
    return Reading(_parts(low, high), added, mask.dtype != torch.float16)


def _intervals(mask: Tensor, sinks: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first key that each query sees, the one after the last, and `Reading.least`.

    Each is (rows, queries).
    """
    rows, queries, keys = mask.shape
    least = torch.zeros(rows, queries, dtype=torch.float64, device=mask.device)
    if not keys:
        return np.zeros((rows, queries), int), np.zeros((rows, queries), int), least.cpu().numpy()
    step = max(1, AT_A_TIME // max(1, rows * keys))
    intervals = []
    for at in range(0, queries, step):
        seen = mask[:, at : at + step]
        if seen.dtype != torch.bool:
            if not seen.is_floating_point():
                raise UnreadableMask(f"a mask of {seen.dtype}")
            hidden = seen <= torch.finfo(seen.dtype).min / 2
            if not ((seen == 0) | hidden).all():
                raise UnreadableMask("a mask that adds numbers to the scores")
            most = seen.amax(-1, keepdim=True)
            even = hidden.all(-1, keepdim=True) & most.isfinite()
            if even.any() and not sinks:
                if seen.dtype == torch.float16 and (even & (seen < most) & seen.isfinite()).any():
                    raise UnreadableMask("a mask that hides keys by several numbers of float16")
                least[:, at : at + step] = torch.where(even, most, 0)[..., 0]
                hidden &= ~even | (seen != most)
            seen = ~hidden
        bits = seen.to(torch.uint8)
        count = bits.sum(-1, dtype=torch.int64)
        first = bits.argmax(-1)
        last = keys - bits.flip(-1).argmax(-1)
        intervals.append(torch.stack([first * (count > 0), last * (count > 0), count]))
    low, high, count_ = (
        torch.cat(intervals, dim=2).cpu().numpy() if intervals else np.zeros((3, rows, 0), int)
    )
    gaps = high - low != count_
    if gaps.any():
        row, query = (int(at) for at in np.unravel_index(gaps.argmax(), gaps.shape))
        shows = f"{count_[row, query]} of keys {low[row, query]} to {high[row, query] - 1}"
        raise UnreadableMask("a mask with holes", f" (mask[{row}, 0, {query}] shows {shows})")
    return low, high, least.cpu().numpy()


def _parts(low: np.ndarray, high: np.ndarray) -> list[Part]:
    runs = [(row, *run) for row in range(len(low)) for run in _runs(low[row], high[row])]
    kinds: list[Kind] = list(dict.fromkeys(kind for *_, kind in runs if kind))
    kinds.sort(key=lambda kind: kind[1] is None)
    parts: dict[Kind, Part] = {}
    queries = low.shape[1]
    chosen: dict[Kind, list[np.ndarray]] = {}
    # If a run fits several kinds, it joins one that another run needs.
    for row, first, count, start, stop, kind in runs:
        if kind is None or kind == (True, None, None):
            causal = [k for k in kinds if k[0] or count == 1]
            fits = [k for k in causal if k[1] is None or k[1] >= stop - start]
            kind = fits[0] if fits else (True, None, None)
        part = parts.setdefault(kind, Part(kind))
        part.query_lens.append(int(count))
        part.key_lens.append(int(stop - start))
        part.firsts.append((row, int(start)))
        chosen.setdefault(kind, []).append(np.arange(count) + row * queries + first)
    if len(parts) > 1:
        for kind, part in parts.items():
            part.rows = torch.from_numpy(np.concatenate(chosen[kind]))
    return list(parts.values())


Run = tuple[int, int, int, int, Kind | None]
"""First query, queries, first key, key after the last, and what serves them; None is anything."""

GROW, SLIDE, SAME, SHRINK, OTHER = range(5)


def _runs(low: np.ndarray, high: np.ndarray) -> list[Run]:
    """Cut a row's queries into runs that one sequence of a kernel's batch serves."""
    if len(low) == 1:
        return [(0, 1, int(low[0]), int(high[0]), None)]
    down, up = np.diff(low), np.diff(high)
    step = np.full(len(down), OTHER)
    for kind, (a, b) in enumerate([(0, 1), (1, 1), (0, 0), (1, 0)]):
        step[(down == a) & (up == b)] = kind
    cuts = [0, *(np.flatnonzero(step == OTHER) + 1), len(low)]
    runs: list[Run] = []
    for first, after in pairwise(cuts):
        band = None
        if (step[first : after - 1] == SHRINK).any():
            band = _band(low, high, first, after)
        if band is None:
            runs += _causal_runs(low, high, step, first, after)
        else:
            at, count = band[:2]
            runs += [(q, 1, int(low[q]), int(high[q]), None) for q in range(first, at)]
            runs.append(band)
            runs += [(q, 1, int(low[q]), int(high[q]), None) for q in range(at + count, after)]
    return runs


def _causal_runs(
    low: np.ndarray, high: np.ndarray, step: np.ndarray, first: int, after: int
) -> list[Run]:
    runs: list[Run] = []
    at = first
    while at < after:
        last = at
        kind: Kind | None = None
        if at + 1 < after and step[at] == SAME:
            last, kind = _end(step, at, after, SAME), (False, None, None)
        elif at + 1 < after and step[at] in (GROW, SLIDE):
            last, kind = _end(step, at, after, GROW), (True, None, None)
            if last + 1 < after and step[last] == SLIDE:
                last = _end(step, last, after, SLIDE)
                kind = (True, int(high[last] - low[last]), None)
        runs.append((at, last + 1 - at, int(low[at]), int(high[last]), kind))
        at = last + 1
    return runs


def _end(step: np.ndarray, at: int, after: int, kind: int) -> int:
    """Return the last query of a run of steps of one kind from query `at`."""
    others = np.flatnonzero(step[at : after - 1] != kind)
    return at + int(others[0]) if len(others) else after - 1


def _band(low: np.ndarray, high: np.ndarray, first: int, after: int) -> Run | None:
    """Return the window to both sides of each of a sequence's own tokens, if the mask is one."""
    start, stop = int(low[first:after].min()), int(high[first:after].max())
    if start < first or stop > after:
        return None
    at = np.arange(start, stop)
    left, right = int(stop - 1 - low[stop - 1]), int(high[start] - 1 - start)
    same = (low[at] == np.maximum(start, at - left)) & (
        high[at] == np.minimum(stop, at + right + 1)
    )
    kind = (False, left + 1, None if left == right else right)
    return (start, stop - start, start, stop, kind) if same.all() else None
