"""Which program reads which shared blocks? Deals the tiles of a forest of prefixes to a grid.

A tile is (rows of one group, chunk of the keys they share) or (one row, its own keys), as in
FlashInfer's cascade (arXiv 2501.01005) and PAT (arXiv 2511.22333), but all in one list: the tiles lie
on a line, each as long as it costs, and each program takes an equal stretch of it, as in `schedule`.
What is cut, and what several levels have of a row, are parts, merged in the order of the row's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Levels

from polyattn_triton.configs import PrefixConfig
from polyattn_triton.schedule import Ints

PIECE = 8
"""Integers of a piece: the table's row, first key, end of keys, where its rows are named, how many,
where its part goes; two are free, so that a piece is one line of the cache."""
LEAST = 2
"""Key tiles that are worth a program of its own."""
MOST_LEVELS = 4
"""Levels of a forest for which captured steps have room."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The two tiles of a launch: rows are (query token, head of its group).

    `group`: heads of a KV head; `small`: rows of the lower tile; `config`: of the other.
    """

    group: int
    small: int
    config: PrefixConfig

    @property
    def most(self) -> int:
        """Query tokens that a tile holds."""
        return self.config.tall // self.group

    def costs(self, count: Ints) -> Ints:
        """Return the cost of a key tile for so many query tokens."""
        small = count * self.group <= self.small
        us: Ints = np.where(small, self.config.small_us, self.config.tall_us)
        return us


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles in the order in which a row's keys lie; each (tiles,).

    `table`: whose row of the block table; `begin`, `end`: keys; `at`, `count`: which of `rows`.
    """

    table: Ints
    begin: Ints
    end: Ints
    at: Ints
    count: Ints
    rows: Ints


def fastest(
    levels: Levels, tokens: Ints, block_size: int, group: int, configs: Sequence[PrefixConfig]
) -> PrefixConfig:
    """Return the configuration in which a forest over rows of so many tokens takes the least time.

    `configs`: those there are, lowest tiles first. Counted are the runs: rows' own keys cost alike.
    """
    runs = [run for level in levels for run in level]
    heads = np.array([tokens[list(run.rows)].sum() for run in runs], np.int64) * group
    keys = np.array([run.count for run in runs], np.int64) * block_size
    least = configs[0].tall
    times = []
    for config in configs:
        tiles = -(-heads // config.tall)
        each = np.where(heads <= least, config.small_us, config.tall_us)
        busy = tiles * (each * -(-keys // config.block_n) + config.item_us)
        times.append((int(busy.sum()) + len(tokens) * config.item_us) / config.on_one)
    return configs[times.index(min(times))]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The query tokens of a step's rows: (rows,) `lens`, keys; `count`; `start`, its first token.

    `window`: keys that a token sees at most, 0 for all.
    """

    lens: Ints
    count: Ints
    start: Ints
    window: int = 0

    @classmethod
    def of(cls, lens: Ints, count: Ints | None = None, window: int = 0) -> Tokens:
        """Return those of rows of such lengths; of one token each without `count`."""
        count = np.ones_like(lens) if count is None else count.astype(np.int32)
        return cls(lens, count, (count.cumsum() - count).astype(np.int32), window)

    def positions(self) -> Ints:
        """Return each token's place in its sequence, (tokens,)."""
        places: Ints = self.within(np.arange(len(self.lens)))
        return np.repeat(self.lens - self.count - self.start, self.count) + places

    def within(self, rows: Ints) -> Ints:
        """Return the tokens of some rows, in the rows' order."""
        count = self.count[rows]
        skipped = self.start[rows] - (count.cumsum() - count)
        tokens: Ints = (np.arange(count.sum()) + np.repeat(skipped, count)).astype(np.int32)
        return tokens

    def first_key(self, begin: Ints, positions: Ints) -> Ints:
        """Return the first key from `begin` on that a tile sees whose first token is there."""
        return np.maximum(begin, positions + 1 - self.window) if self.window else begin


def tiles_of(levels: Levels, tokens: Tokens, block_size: int, shape: Shape) -> Tiles:
    """Cut a forest's groups into tiles of query tokens; rows of length 0 have none.

    Of each row's keys at least the last is its own.
    """
    runs, lens = [run for level in levels for run in level], tokens.lens
    rows = np.array(list(chain.from_iterable(run.rows for run in runs)), np.int32)
    held = np.array([(len(run.rows), run.rows[0], run.first, run.count) for run in runs], np.int32)
    members, table, first, count = held.reshape(-1, 4).T
    stop = (first + count) * block_size
    own = np.zeros(len(lens), np.int32)
    np.maximum.at(own, rows, np.repeat(stop, members))
    some = np.flatnonzero(lens > own)
    # Groups: runs, then rows by themselves. A group's tokens in tiles of `most`.
    of_run = np.repeat(np.arange(len(runs)), members)
    length = np.bincount(of_run, tokens.count[rows], len(runs)).astype(np.int64)
    length = np.concatenate((length, tokens.count[some]))
    table, begin = np.concatenate((table, some)), np.concatenate((first * block_size, own[some]))
    end = np.concatenate((stop, lens[some]))
    named = np.concatenate((tokens.within(rows), tokens.within(some)))
    tiles = -(-length // shape.most)
    of = np.repeat(np.arange(len(length)), tiles)
    skipped = (np.arange(len(of)) - np.repeat(tiles.cumsum() - tiles, tiles)) * shape.most
    at = (length.cumsum() - length)[of] + skipped
    each = np.minimum(length[of] - skipped, shape.most)
    begin, end = begin[of], end[of]
    if len(of) and (tokens.window or tokens.count.max() > 1):
        positions = tokens.positions()[named]
        begin = tokens.first_key(begin, np.minimum.reduceat(positions, at))
        end = np.minimum(end, np.maximum.reduceat(positions, at) + 1)
    seen = begin < end
    return Tiles(table[of][seen], begin[seen], end[seen], at[seen], each[seen], named)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Cuts of tiles, each (pieces,): the tile, its key tiles [begin, end), the program that has it."""

    tile: Ints
    begin: Ints
    end: Ints
    program: Ints


def cut(tiles: Tiles, shape: Shape, programs: int) -> Pieces:
    """Give each program an equal stretch of the tiles' line; cuts lie between key tiles."""
    keys = -(-(tiles.end - tiles.begin) // shape.config.block_n)
    if not len(keys):
        return Pieces(keys, keys, keys, keys)
    costs, item = shape.costs(tiles.count), shape.config.item_us
    least = item + LEAST * int(costs.max())
    line = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(keys * costs + item, out=line[1:])
    total = int(line[-1])
    share = max(-(-total // programs), least)
    bounds = np.arange(share, total, share)
    of = line.searchsorted(bounds, "right") - 1
    cuts = (bounds - line[of] - item + costs[of] // 2) // costs[of]
    inside = cuts < keys[of]  # else the tile's end is nearer: no piece of it is left
    of, cuts, later = of[inside], np.maximum(cuts[inside], 0), np.flatnonzero(inside) + 1
    tile = np.concatenate([np.arange(len(keys)), of])
    begin = np.concatenate([np.zeros(len(keys), np.int64), cuts])
    program = np.concatenate([line[:-1] // share, later])
    order = np.lexsort((program, begin, tile))
    tile, begin, program = tile[order], begin[order], program[order]
    # Of cuts at one place the last counts: the programs before it have nothing of this tile there.
    last = np.ones(len(tile), bool)
    np.logical_or(tile[1:] != tile[:-1], begin[1:] != begin[:-1], out=last[:-1])
    tile, begin, program = tile[last], begin[last], program[last]
    end = keys[tile]
    inner = np.flatnonzero(tile[1:] == tile[:-1])
    end[inner] = begin[inner + 1]
    return Pieces(tile, begin, end, program)


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """What the kernels read, and where in it: int32, pieces first.

    `bounds` (programs + 1): each program's first piece; `parts` (tokens + 1): each one's first
    part among those listed from `list` on, as the parts' rows in the workspace; then the tiles' `rows`.
    `part_rows`: rows that all parts have, for each KV head.
    """

    array: NDArray[np.int32]
    bounds: int
    parts: int
    list: int
    part_rows: int


@dataclass(frozen=True, slots=True)
class Room:
    """How much of everything the buffers hold that a captured graph reads, for any forest."""

    pieces: int
    listed: int
    named: int
    part_rows: int


def room_for(rows: int, programs: int, shape: Shape) -> Room:
    """Return the room for `rows` rows of one token in `MOST_LEVELS` levels and by themselves.

    A row is in one tile of each level, a tile has one row or more, and each program ends in one cut.
    """
    named = rows * (MOST_LEVELS + 1)
    listed = named + programs * shape.most
    return Room(named + programs, listed, named, listed * shape.group)


def work_of(
    tiles: Tiles, pieces: Pieces, shape: Shape, rows: int, programs: int, room: Room | None = None
) -> PrefixWork:
    """Lay out the kernels' work list for `rows` query tokens."""
    group, block = shape.group, shape.config.block_n
    count = tiles.count[pieces.tile]
    ends = np.cumsum(count)
    places = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
    named = tiles.rows[np.repeat(tiles.at[pieces.tile], count) + places]
    lies = (ends - count) * group
    listed = (np.repeat(lies, count) + places * group)[np.argsort(named, kind="stable")]
    room = room or Room(len(count), len(listed), len(tiles.rows), int(count.sum()) * group)
    bounds = room.pieces * PIECE
    parts = bounds + programs + 1
    first = parts + rows + 1
    work = np.zeros(first + room.listed + room.named, np.int32)
    table = work[: len(count) * PIECE].reshape(-1, PIECE)
    begins = tiles.begin[pieces.tile]
    table[:, 0] = tiles.table[pieces.tile]
    table[:, 1] = begins + pieces.begin * block
    table[:, 2] = np.minimum(begins + pieces.end * block, tiles.end[pieces.tile])
    table[:, 3] = tiles.at[pieces.tile] + first + room.listed
    table[:, 4] = count
    table[:, 5] = lies
    work[bounds:parts] = pieces.program.searchsorted(np.arange(programs + 1))
    np.cumsum(np.bincount(named, minlength=rows), out=work[parts + 1 : first])
    work[first : first + len(listed)] = listed
    work[first + room.listed : first + room.listed + len(tiles.rows)] = tiles.rows
    return PrefixWork(work, bounds, parts, first, room.part_rows)
