"""Reads one sequence's keys and values out of a paged cache, touching only what is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from polyattn.kernel import Batch, KVCache, LayerSpec, raw, unpacked, window_sizes
from torch import Tensor, uint8


@dataclass(frozen=True)
class Span:
    """The keys that a block of queries can see: the first `sinks`, and `start` up to `stop`."""

    sinks: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Keys in the span."""
        return self.sinks + self.stop - self.start

    def positions(self) -> Tensor:
        """Return each key's position in its sequence, int64."""
        near = torch.arange(self.start, self.stop)
        return torch.cat([torch.arange(self.sinks), near]) if self.sinks else near


def seen(spec: LayerSpec, first: int, last: int, length: int) -> Span:
    """Return what queries at positions `first` to `last` see of `length` keys, or a little more.

    Positions below zero are of queries before the first key. It is exactly what one query sees, unless
    kept first tokens lie within its chunk but not its window.
    """
    low, high = 0, min(length, last + 1) if spec.causal else length
    if spec.chunk_size is not None:
        low = max(0, first // spec.chunk_size * spec.chunk_size)
        high = min(high, (last // spec.chunk_size + 1) * spec.chunk_size)
    start, stop, sinks = low, max(low, high), 0
    left, right = window_sizes(spec)
    if left >= 0 or right >= 0:
        start = low if left < 0 else min(max(low, first - left), stop)
        if right >= 0:
            stop = max(start, min(stop, last + right + 1))
        kept = min(spec.sink_tokens, high)
        if kept > low and (low > 0 or kept >= start):
            start, stop = low, max(stop, kept)
        elif kept > low:
            sinks = kept
    return Span(sinks, start, stop)


class PagedReader:
    """Reads sequences of a batch; which blocks lie side by side is found once, at the plan."""

    def __init__(self, batch: Batch):
        self.table = batch.block_table
        self._runs: dict[tuple[int, int, int], Tensor | slice] = {}

    def read(
        self, cache: KVCache, index: int, span: Span, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of a span as (num_kv_heads, keys, size).

        Quantised values come as they are stored: every one of them is exact in bf16, so the scales
        are left for the scores and the output, where they cost no rounding. So are 4-bit ones with
        their blocks' scales.
        """
        size = cache.block_size
        parts = [(span.start, span.stop)]
        if span.sinks:
            parts.insert(0, (0, span.sinks))
        found = []
        for stored in (cache.key,) if cache.value_in_key else (cache.key, cache.value):
            pieces = [self._piece(stored, index, a, b, size, cache.layout) for a, b in parts]
            tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            found.append(unpacked(tokens, dtype) if tokens.dtype == uint8 else tokens.to(dtype))
        if not cache.value_in_key:
            return found[0], found[1]
        return found[0], found[0][..., : cache.value.shape[3]]

    def _piece(
        self, stored: Tensor, index: int, start: int, stop: int, size: int, layout: str
    ) -> Tensor:
        first = start // size
        blocks = self._blocks(index, first, -(-stop // size))
        rows = slice(start - first * size, stop - first * size)
        if layout != "NHD":
            picked = _pick(stored.transpose(1, 2), blocks).transpose(0, 1)
            return picked.reshape(picked.shape[0], -1, picked.shape[3])[:, rows]
        picked = _pick(stored, blocks)
        return picked.reshape(-1, *picked.shape[2:])[rows].transpose(0, 1)

    def _blocks(self, index: int, first: int, last: int) -> Tensor | slice:
        key = (index, first, last)
        found = self._runs.get(key)
        if found is None:
            assert self.table is not None
            row = self.table[index, first:last]
            ids = row.tolist()
            consecutive = bool(ids) and ids == list(range(ids[0], ids[0] + len(ids)))
            found = slice(ids[0], ids[0] + len(ids)) if consecutive else row
            self._runs[key] = found
        return found


PARALLEL = 1 << 15
"""Elements of a block from which torch opens a parallel region for each one it copies: beside busy
neighbours that takes a hundred times as long as the copy."""


def _pick(stored: Tensor, blocks: Tensor | slice) -> Tensor:
    if isinstance(blocks, slice):  # side by side: no copy
        return stored[blocks]
    shape = stored.shape
    fewest = stored[0].numel() // PARALLEL + 1
    parts = next((n for n in range(fewest, shape[1] + 1) if shape[1] % n == 0), 1)
    if parts == 1 or not stored.is_contiguous():
        return raw(stored).index_select(0, blocks).view(stored.dtype)
    pieces = (blocks[:, None] * parts + torch.arange(parts, device=blocks.device)).flatten()
    smaller = stored.view(shape[0] * parts, shape[1] // parts, *shape[2:])
    found = raw(smaller).index_select(0, pieces).view(stored.dtype)
    return found.view(len(blocks), *shape[1:])
