"""Reads one sequence's visible keys and values from a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from polyattn.kernel import Batch, KVCache, LayerSpec, decoded, key_ranges, raw
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The keys that a block of queries sees: one or two ranges of positions."""

    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def size(self) -> int:
        """Keys in the span."""
        return sum(stop - start for start, stop in self.ranges)

    def positions(self) -> Tensor:
        """Return each key's position in its sequence, int64."""
        return torch.cat([torch.arange(*each, device="cpu") for each in self.ranges])


@lru_cache(maxsize=4096)  # a step's layers ask alike
def seen(spec: LayerSpec, first: int, last: int, length: int) -> Span:
    """Return what queries at positions `first` to `last` see of `length` keys, as `key_ranges` says."""
    start, kept, near, stop = key_ranges(spec, first, last, length)
    if kept == near:  # they touch
        return Span(((start, stop),))
    return Span(((near, stop),) if kept == start else ((start, kept), (near, stop)))


def picked(
    cache: KVCache, pick: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what `pick` takes of the cache's keys and values, in `dtype`.

    Quantised values come as they are stored, and each is exact in bf16. The scales are left for the
    scores and the output, where they cost no rounding. Rows of bytes come as their format decodes them.
    """
    form = cache.format
    formats, sizes = form.rows, (form.head_size, form.v_head_size)
    parts = []
    for at, stored in enumerate((cache.key, cache.value)[: 1 if cache.value_in_key else 2]):
        tokens = pick(stored)
        if formats is not None:
            tokens = decoded(tokens, formats[at], sizes[at])
        parts.append(tokens.to(dtype))
    if not cache.value_in_key:
        return parts[0], parts[1]
    return parts[0], parts[0][..., : form.v_head_size]


class PagedReader:
    """Reads sequences of a batch. The plan finds once which blocks lie side by side."""

    def __init__(self, batch: Batch):
        self.table = batch.block_table
        self._runs: dict[tuple[int, int, int], Tensor | slice] = {}

    def read(
        self, cache: KVCache, index: int, span: Span, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of a span as (num_kv_heads, keys, size), as `picked` does."""
        size = cache.block_size

        def pick(stored: Tensor) -> Tensor:
            pieces = [self._piece(stored, index, a, b, size, cache.layout) for a, b in span.ranges]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

        return picked(cache, pick, dtype)

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
        blocks = self._runs.get(key)
        if blocks is None:
            assert self.table is not None
            row = self.table[index, first:last]
            ids = row.tolist()
            consecutive = bool(ids) and ids == list(range(ids[0], ids[0] + len(ids)))
            blocks = slice(ids[0], ids[0] + len(ids)) if consecutive else row
            self._runs[key] = blocks
        return blocks


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
    rows = raw(smaller).index_select(0, pieces).view(stored.dtype)
    return rows.view(len(blocks), *shape[1:])
