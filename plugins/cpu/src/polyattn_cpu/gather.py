"""Reads one sequence's keys and values out of a paged cache, touching only what is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from polyattn.kernel import Batch, KVCache, LayerSpec, raw
from torch import Tensor


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
    """Return what queries at positions `first` to `last` see of `length` keys."""
    start, stop = 0, length
    if spec.causal:
        stop = last + 1
    if spec.sliding_window is not None:
        start = max(start, first - spec.sliding_window + 1)
        if not spec.causal:
            stop = min(stop, last + spec.sliding_window)
    if spec.chunk_size is not None:
        start = max(start, first // spec.chunk_size * spec.chunk_size)
        stop = min(stop, (last // spec.chunk_size + 1) * spec.chunk_size)
    sinks = 0
    if spec.sink_tokens and start:
        low = first // spec.chunk_size * spec.chunk_size if spec.chunk_size else 0
        sinks = min(spec.sink_tokens, start) if low == 0 else 0
    return Span(sinks, start, max(start, stop))


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
        are left for the scores and the output, where they cost no rounding.
        """
        size = cache.block_size
        parts = [(span.start, span.stop)]
        if span.sinks:
            parts.insert(0, (0, span.sinks))
        found = []
        for stored in (cache.key,) if cache.value_in_key else (cache.key, cache.value):
            pieces = [self._piece(stored, index, a, b, size, cache.layout) for a, b in parts]
            tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            found.append(tokens.to(dtype))
        return found[0], found[-1][..., : cache.value.shape[3]]

    def _piece(
        self, stored: Tensor, index: int, start: int, stop: int, size: int, layout: str
    ) -> Tensor:
        first = start // size
        blocks = self._blocks(index, first, -(-stop // size))
        rows = slice(start - first * size, stop - first * size)
        if layout == "HND":
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


def _pick(stored: Tensor, blocks: Tensor | slice) -> Tensor:
    if isinstance(blocks, slice):  # side by side: no copy
        return stored[blocks]
    return raw(stored).index_select(0, blocks).view(stored.dtype)
