"""How long is a chip's fullest processor busy? As kernels deal tiles of queries and keys out.

A program holds a tile of query rows, (token, head of a group), and goes through its keys block by
block. So a step takes what the fullest processor goes through, and that what was cut is merged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyattn.spec.layer import LayerSpec

Ints = npt.NDArray[np.int64]

HIGH, LOW = 128, 64
"""Rows of a tile, and keys of a block, of kernels that read keys and values, and of latents."""
SLACK, FULL, UNCUT = 1.1, 0.8, 4
"""FlashAttention-3 cuts keys into shares of 1.1 of the mean, if the tiles of the longest query leave a
fifth of the processors free and a row has more than four blocks."""
BEGIN = 4
"""Blocks that a tile costs beside its own where programs have even shares, and the least share."""
MOST_DEALT = 4
"""Pieces a processor up to which each is dealt; of more the mean counts, and half the largest."""


class Tiles(NamedTuple):
    """A step's tiles: key blocks of each, tiles of each row, KV heads that have such, processors."""

    blocks: Ints
    of_row: Ints
    heads: int
    processors: int


class Dealt(NamedTuple):
    """Blocks of the fullest processor, parts of the longest row that are merged, and pieces in all."""

    span: float
    parts: int
    pieces: int


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key."""

    rows: int
    queries: int
    longest: int
    pairs: int


def deals_of(spec: LayerSpec, kind: str) -> tuple[str, ...]:
    """Return the ways that compete for a kind of step.

    Decodes over keys and values have none: their choice takes a few microseconds.
    """
    if spec.latent is not None:
        return ("even", "padded", "cut", "pages")
    return () if kind == "decode" else ("cut", "uncut")


def deal(
    name: str, spec: LayerSpec, queries: Ints, lens: Ints, seen: int, processors: int
) -> Counts:
    """Deal a step's keys out. `seen`: keys that a token sees at most."""
    if name == "padded":
        queries = np.full_like(queries, queries.max())
    group, heads, block, high = spec.gqa_ratio, spec.num_kv_heads, HIGH, HIGH
    if spec.latent is not None:  # absorbed: every head has the same keys
        group, heads, block, high = spec.num_heads, 1, LOW, LOW
        if name == "pages" and int(queries.sum()) * group > LOW * len(queries):
            high, processors = 2 * LOW, processors // 2  # two processors share a tile
    blocks, of_row = _tiles(queries, lens, group, high, block, spec.causal, seen)
    dealt = DEALS[name](Tiles(blocks, of_row, heads, processors))
    merged = dealt.parts > 1
    pairs = int(dealt.span * processors * high * block) // spec.num_heads
    tokens = int(queries.sum())
    return Counts(dealt.pieces * merged, tokens, dealt.parts * merged, pairs)


def _tiles(
    queries: Ints, lens: Ints, group: int, high: int, block: int, causal: bool, seen: int
) -> tuple[Ints, Ints]:
    """Return key blocks of each tile of one KV head, and how many tiles each row has."""
    of_row = -(-queries * group // high)
    if int(of_row.max()) == 1:
        return -(-lens // block), of_row
    row = np.repeat(np.arange(len(queries)), of_row)
    first = (np.arange(len(row)) - np.repeat(of_row.cumsum() - of_row, of_row)) * high
    end, tokens = lens[row], queries[row]
    before = end - tokens
    if seen < sys.maxsize:
        begin = np.maximum(before + first // group - seen + 1, 0) // block
    if causal:
        end = before + np.minimum(first + high - 1, tokens * group - 1) // group + 1
    blocks = -(-end // block)
    return blocks - begin if seen < sys.maxsize else blocks, of_row


def _cut(tiles: Tiles) -> Dealt:
    """Cut tiles as FlashAttention-3 does, and deal the pieces out in order."""
    blocks, of_row, heads, processors = tiles
    share = max(1, math.ceil(int(blocks.sum()) * heads * SLACK / processors))
    longest = int(blocks.max())
    if int(of_row.max()) * heads >= FULL * processors or longest <= UNCUT:
        share = longest
    splits = -(-blocks // share)
    return _dealt(np.repeat(-(-blocks // splits), splits), int(splits.max()), tiles)


def _uncut(tiles: Tiles) -> Dealt:
    """Deal whole tiles out, the longest first."""
    return _dealt(-np.sort(-tiles.blocks), 1, tiles)


def _pages(tiles: Tiles) -> Dealt:
    """Cut tiles after multiples of 256 keys, of short ones less, as FlashInfer does latents'."""
    blocks = tiles.blocks
    keys = -(-int(blocks.sum()) * LOW // tiles.processors)
    share = 4 * -(-keys // 256) if keys > 64 else -(-keys * 3 // 64)
    splits = -(-blocks // share)
    pieces = np.repeat(np.minimum(blocks, share), splits)
    pieces[splits.cumsum() - 1] = blocks - (splits - 1) * share
    return _dealt(pieces, int(splits.max()), tiles)


def _even(tiles: Tiles) -> Dealt:
    """Give each processor an equal share; tiles of rows that have as many each lie side by side."""
    blocks, of_row, heads, processors = tiles
    count, lanes = len(blocks) * heads, int(of_row[0]) * heads
    if lanes <= processors and (of_row == of_row[0]).all():
        processors -= processors % lanes
    total = int(blocks.sum()) * heads + BEGIN * count
    span = max(-(-total // processors), BEGIN)
    return Dealt(span, -(-(int(blocks.max()) + BEGIN) // span), count)


def _dealt(pieces: Ints, parts: int, tiles: Tiles) -> Dealt:
    """Give each piece, and a block for its begin, to the processor that is free first."""
    count, processors = len(pieces) * tiles.heads, tiles.processors
    largest = int(pieces.max()) + 1
    if count <= processors:
        return Dealt(largest, parts, count)
    if count > MOST_DEALT * processors:
        mean = (int(pieces.sum()) * tiles.heads + count) / processors
        return Dealt(max(largest, mean + largest / 2), parts, count)
    costs = (pieces + 1).tolist() * tiles.heads
    loads = costs[:processors]
    heapify(loads)
    for cost in costs[processors:]:
        heapreplace(loads, loads[0] + cost)
    return Dealt(max(loads), parts, count)


DEALS: dict[str, Callable[[Tiles], Dealt]] = {
    "even": _even,
    "padded": _even,
    "cut": _cut,
    "uncut": _uncut,
    "pages": _pages,
}
"""By name. `padded`: every row has as many query tokens as the longest."""
