"""Plans the keys that each call of MLX gathers: a step's tiles, made on the host once for all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
from polyattn.kernel import Batch, KeyRanges, LayerSpec, Plan, key_ranges
from torch import Tensor

Ints = np.ndarray[Any, Any]
SCORES = 1 << 24
"""Scores of a tile, at most, where it has several queries: 64 MiB in float32."""


class Piece(NamedTuple):
    """Neighbouring queries of one sequence, and the keys that they see, `seen` (queries, keys)."""

    first: int
    queries: Ints
    keys: Ints
    slots: Ints
    seen: np.ndarray[Any, Any]


class Tile(NamedTuple):
    """One call. `seen` bool and `distance` float32 (rows, queries, keys).

    `slots` (rows, keys), over a cache (2, rows, keys): blocks and offsets. `tokens` are its queries of
    the step, row by row. `seen` is None where all is seen, and where `causal` says it.
    """

    tokens: Any
    queries: int
    slots: Any
    seen: Any
    distance: Any
    causal: bool


class TilePlan(Plan):
    """A step's tiles, and which of its tokens see no key, bool (num_tokens,); None for none."""

    __slots__ = ("blind", "tiles")

    def __init__(self, batch: Batch, spec: LayerSpec, block_size: int):
        super().__init__(batch)
        blind = np.ones(batch.num_tokens, dtype=bool)
        singles: list[Piece] = []
        self.tiles: list[Tile] = []
        table = None
        if spec.cached:
            table = batch.host_block_table
            if table is None and batch.block_table is not None:
                table = batch.block_table.cpu().numpy()
        for index in range(len(batch.lens)):
            for piece in pieces(spec, batch, index, table, block_size):
                blind[piece.first : piece.first + len(piece.queries)] = ~piece.seen.any(1)
                if len(piece.queries) == 1:
                    singles.append(piece)
                else:
                    self.tiles.append(tile([piece], spec))
        singles.sort(key=lambda piece: len(piece.keys))
        while singles:  # rows of one token side by side, none padded to more than twice its keys
            longest = 2 * len(singles[0].keys)
            count = sum(len(piece.keys) <= longest for piece in singles)
            count = min(count, max(1, SCORES // (spec.num_heads * longest)))
            self.tiles.append(tile(singles[:count], spec))
            del singles[:count]
        self.blind: Tensor | None = (
            torch.from_numpy(blind).to(batch.device) if blind.any() else None
        )


def pieces(
    spec: LayerSpec, batch: Batch, index: int, table: Ints | None, block_size: int
) -> list[Piece]:
    """Return a sequence's queries with their keys, none where it has no keys or no queries."""
    length, count = batch.lens[index], batch.query_lens[index]
    if not length or not count:
        return []
    first = 0 if batch.first_positions is None else batch.first_positions[index]
    result, step = [], max(1, SCORES // (spec.num_heads * length))
    for start in range(0, count, step):
        at = first + length - count + np.arange(start, min(start + step, count))
        bounds = key_ranges(spec, at, at, np.int64(first + length), np.minimum, np.maximum)
        ranges = KeyRanges(
            *(np.broadcast_to(np.maximum(bound, first), at.shape)[:, None] for bound in bounds)
        )
        near = ranges.near_stop > ranges.near_start
        sinks = np.arange(ranges.kept_start.min(), ranges.kept_stop.max())
        lowest = ranges.near_start[near].min() if near.any() else 0
        highest = ranges.near_stop[near].max() if near.any() else 0
        keys = np.union1d(sinks, np.arange(lowest, highest))
        if not len(keys):
            continue
        seen = (keys >= ranges.kept_start) & (keys < ranges.kept_stop)
        seen |= (keys >= ranges.near_start) & (keys < ranges.near_stop)
        places = keys - first
        slots = batch.key_starts[index] + places
        if table is not None:
            slots = np.stack([table[index][places // block_size], places % block_size])
        result.append(Piece(batch.starts[index] + start, at, keys, slots, seen))
    return result


def tile(rows: list[Piece], spec: LayerSpec) -> Tile:
    """Return one call for pieces with as many queries each."""
    count, width = len(rows[0].queries), max(len(row.keys) for row in rows)

    def padded(array: Ints, value: Any) -> Ints:
        widths = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
        return np.pad(array, widths, constant_values=value)

    # Padding repeats one of the row's own keys, so that no other request's NaN is multiplied by 0.
    chosen = [np.arange(width) % len(row.keys) for row in rows]
    places = np.stack([row.slots[..., at] for row, at in zip(rows, chosen, strict=True)], axis=-2)
    seen = np.stack([padded(row.seen, False) for row in rows])
    distance: Any = None
    if spec.alibi:
        distance = np.stack([padded(row.keys - row.queries[:, None], 0) for row in rows])
        distance = mx.array(distance.astype(np.float32))
    lower = np.tri(count, width, width - count, dtype=bool)
    causal = count > 1 and count <= width and bool((seen == lower).all())
    tokens = np.concatenate([np.arange(row.first, row.first + count) for row in rows])
    start, stop = int(tokens[0]), int(tokens[-1]) + 1
    even = stop - start == len(tokens) and bool((np.diff(tokens) == 1).all())
    return Tile(
        slice(start, stop) if even else tokens,
        count,
        mx.array(places.astype(np.int32)),
        None if causal or seen.all() else mx.array(seen),
        distance,
        causal,
    )
