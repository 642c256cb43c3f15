"""How libraries deal latents out: a row's tiles are alike, each sees all keys."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from polyattn.selection.pieces import (
    BEGIN,
    FULL,
    SLACK,
    UNCUT,
    Counts,
    Ends,
    Ints,
    Rows,
    at,
    ended,
    largest,
    on_line,
    total,
)

TILE = 64
"""Rows of a tile, and keys of a block."""
PADDED_BEGIN, PADDED_COST = 5, 8
"""Blocks that FlashMLA's schedule adds to each row and share, and those that a row or share costs."""
PAGES = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Up to how many keys on the average FlashInfer's pieces have so many; beyond, multiples of 256."""
MERGED_ROWS, EVEN_HEADS = 4, 8
"""Rows that a program of FlashInfer merges at once; heads of which FlashAttention-3 wants a multiple:
other decodes write and read their parts twice."""
FEW_HEADS, LOW, MERGED = 32, 16, 16
"""Heads up to which TRITON_MLA runs two programs on a processor, of tiles of 16 or 32 rows; parts of a
tile that it merges in the time of a block."""


class Tiles(NamedTuple):
    """A step's tiles of rows of (token, head), all of one size.

    `each`: a row's tiles, `keys` and `blocks`: what these go through. `most` and `longest`: the most
    tiles and blocks of a row. `number`, `total`: tiles and blocks in all.
    """

    each: Ints
    keys: Ints
    blocks: Ints
    most: int
    longest: int
    number: int
    total: int


class Latents:
    """A step over latents: its rows, and their tiles by height and by whether they are padded.

    `group`: heads, which all have the same keys, since they are absorbed.
    """

    def __init__(self, group: int, queries: Ints, lens: Ints, tokens: int, longest: int):
        self.group, self.queries, self.lens = group, queries, lens
        self.tokens, self.longest = tokens, longest
        self._tiles: dict[tuple[int, bool], Tiles] = {}

    def deal(self, name: str, processors: int) -> Counts:
        """Count a way of dealing keys out to so many processors."""
        rows, group, longest, tokens = len(self.lens), self.group, self.longest, self.tokens
        high = TILE
        if name == "pages" and tokens * group // rows > high:
            high, processors = 2 * high, processors // 2  # two processors share a tile
        padded = name == "padded" and tokens < longest * rows
        tiles = self._tiles.get((high, padded)) or self._tile(high, padded)
        tokens = longest * rows if padded else tokens
        height = min(high, longest * group)
        if name == "padded":
            ends, merged = _padded(tiles, processors)
        elif name == "pages":
            ends, merged = _paged(tiles, processors, high, height)
        elif name == "even":
            few = longest == 1 and group <= FEW_HEADS
            if few:
                height = LOW if group <= LOW else FEW_HEADS
            ends, parts, pieces = _stretched(tiles, rows, processors, few)
            merged = parts + pieces * height // high if parts > 1 else 0
        else:
            ends, parts, pieces = _cut(tiles, processors)
            merged = parts + pieces // 4 if parts > 1 else 0
            odd = longest == 1 and group <= TILE and group % EVEN_HEADS > 0
            tokens += pieces * (1 + odd) if parts > 1 else 0
        if name in ("even", "pages"):
            tokens += processors * height // group
        return ends.counts(processors * high * TILE, group, int(merged > 0), tokens, merged)

    def _tile(self, high: int, padded: bool) -> Tiles:
        lens, rows, most = self.lens, len(self.lens), -(-self.longest * self.group // high)
        each = np.full_like(lens, most)
        if not padded and self.longest * rows > self.tokens:
            each = (self.queries * self.group + high - 1) // high
            if not each.all():
                lens, each = lens[each > 0], each[each > 0]
        blocks = (lens + TILE - 1) // TILE
        longest, number = largest(blocks), total(each)
        tiles = Tiles(each, lens, blocks, most, longest, number, int(each.dot(blocks)))
        self._tiles[high, padded] = tiles
        return tiles


def _padded(tiles: Tiles, processors: int) -> tuple[Ends, int]:
    """Return when FlashMLA's fullest program ends, and what merging costs, 0 where nothing is cut.

    Programs take rows in turn, up to a share each. A row is cut where a block or more of it fits.
    """
    ends = (tiles.blocks + PADDED_BEGIN).cumsum()
    programs, rows = max(1, processors // tiles.most), len(ends)
    share = -(-int(ends[-1]) // programs) + PADDED_BEGIN

    line, start, row = ends.tolist(), 0, 0
    fullest, cuts, parts, most = 0, 0, 1, 1
    while row < rows:
        upto = bisect_right(line, start + share, row)
        done, whole = line[upto - 1] if upto > row else start, upto - row
        fits = share - (done - start) - PADDED_BEGIN
        cost = done - start + whole * (PADDED_COST - PADDED_BEGIN)
        parts = 1 if whole else parts
        start, row = done, upto
        if upto < rows and fits > 0:
            start, cost = done + fits, cost + fits + PADDED_COST
            cuts, parts = cuts + 1, parts + 1
            most = max(most, parts)
        fullest = max(fullest, cost)
    return at(fullest), most + cuts // 4 if cuts else 0


def _stretched(tiles: Tiles, rows: int, processors: int, few: bool) -> tuple[Ends, int, int]:
    """Return when TRITON_MLA's fullest program ends; the longest row's parts; pieces of cut tiles.

    `few`: two programs share a processor, so that a block takes half of it.
    """
    each, _, blocks, most, longest, number, every = tiles
    item = 1 if few else 4
    programs, lanes, weight, keys = processors * (1 + few), 1, 1 + few, blocks
    if 1 < most <= programs <= SLACK * (programs - programs % most) and number == most * rows:
        # Tiles of a row lie side by side.
        programs, lanes, number, every = programs // most, most, rows, every // most
    else:
        keys = blocks.repeat(each)
    share = first = max(-(-(every + item * number) // programs), item)
    least, most = max(-(-every // programs), 1), share + item if number <= programs else 0
    for one in range(least, most + 1):
        if total(np.maximum((keys + one - 1) // one, 1)) <= programs:
            one = max(one, round(math.sqrt(longest / MERGED)))
            parts = (keys + one - 1) // one  # each has a program of its own
            return at(one / weight), largest(parts), total(parts[parts > 1]) * lanes
    every, longest = every + item * number, longest + item
    equal = -(-number // programs) * longest
    limit = int(SLACK * share) + 2 * item
    search = number <= 8 * programs
    search = search and blocks.item(blocks.argmin()) + item <= min(limit, 2 * share)
    if equal <= SLACK * every / programs + 1 and not (search and longest * number == every):
        return at(equal / weight), 1, number * lanes
    units = keys + item
    units[::-1].sort()
    while search and share <= limit:  # the long ones in stretches, the others whole
        split = int(np.count_nonzero(units > share))
        long, whole = units[:split], units[split:]
        free, end = programs - -(-total(long) // share), limit + 1.0
        longer = share + -(-share // 16)
        if free > 0 and len(whole):
            ends = ended(whole, free)
            end = ends.exact() if ends.low < longer else ends.low
        if end <= share:
            return at(share / weight), -(-longest // share), total(-(-long // share)) * lanes
        share = max(share + 1, min(int(end), longer))
    starts, lasts = on_line(units, first)
    pieces = total(lasts - starts) + int(np.count_nonzero(lasts > starts))
    return at(first / weight), (longest - 3 + first) // first + 1, pieces * lanes


def _paged(tiles: Tiles, processors: int, high: int, height: int) -> tuple[Ends, int]:
    """Return when FlashInfer's fullest program ends, and how often one waits for parts to merge.

    `high`: rows of a tile, `height`: those that it has. A cut tile's rows are merged by as many programs
    as it has pieces, or twice as many where two share it.
    """
    each, keys, *_ = tiles
    mean = max(1, -(-int(each.dot(keys)) // processors))
    few = (limit for top, limit in PAGES if mean <= top)
    limit = next(few, -(-mean // 256) * 256)
    pieces, merged = Rows.of(each, keys, limit, unit=TILE), 0
    if pieces.most > 1:
        programs = np.maximum(keys * (high // TILE) // limit, 1)
        rounds = -(-height // programs) + (MERGED_ROWS - 1)
        merged = largest(rounds // MERGED_ROWS * pieces.parts * (pieces.parts > 1))
    return pieces.ended(BEGIN, 1, processors), merged


def _cut(tiles: Tiles, processors: int) -> tuple[Ends, int, int]:
    """Return when FlashAttention-3's fullest processor ends; the longest row's parts; pieces of tiles.

    Where it cuts some tiles, it merges all.
    """
    each, _, blocks, most, longest, _, every = tiles
    merging = most < FULL * processors and longest > UNCUT
    limit = -(-every * 11 // (10 * processors)) if merging else longest
    pieces = Rows.of(each, blocks, limit, even=True)
    ends = pieces.ended(BEGIN, 1, processors)
    return ends, max(2, pieces.most) if merging else 1, pieces.pieces
