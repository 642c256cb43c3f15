"""Which program reads which shared blocks for whom? Deals the tiles of a forest of prefixes to a grid.

A tile is (rows of one group, chunk of the keys they share) or (one row, its own keys), as in
FlashInfer's cascade (arXiv 2501.01005) and PAT (arXiv 2511.22333), but all in one list: the tiles lie
on a line, each as long as it costs, and each program takes an equal stretch of it, as in `schedule`.
What is cut, and what several levels have of a row, are parts, merged in the order of the row's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Levels

from polyattn_triton.schedule import Ints

PIECE = 8
"""Integers of a piece: the table's row, first key, end of keys, where its rows are named, how many,
where its part goes; two are free, so that a piece is one line of the cache."""
COSTS = {16: 4, 32: 5, 64: 6, 128: 9}
"""What a key tile costs a multiprocessor, by the height of the tile of rows: one of 16 waits for
memory alone, one of 128 for its products."""


ITEM = COSTS[16]
"""What a tile costs beside its keys: its queries, and its part."""
LEAST = 2
"""Key tiles that are worth a program of its own."""
MOST_LEVELS = 4
"""Levels of a forest for which captured steps have room."""


@dataclass(frozen=True, slots=True)
class Heights:
    """Rows (row of the batch, head of its group) of the two tiles of a launch.

    `group`: heads of a KV head. `small`: of tiles that hold few rows; `tall`: of all others.
    """

    group: int
    small: int
    tall: int

    def cost(self, rows: Any) -> Any:
        """Return what a key tile of a tile of so many rows of the batch costs."""
        small, tall = cost_of(self.small), cost_of(self.tall)
        return np.where(rows * self.group <= self.small, small, tall)


def cost_of(height: int) -> int:
    """Return what a key tile costs beside that many rows."""
    return COSTS.get(height) or COSTS[max(COSTS)] * height // max(COSTS)


class Tiles(NamedTuple):
    """Tiles in the order in which a row's keys lie; each (tiles,).

    `table`: whose row of the block table; `begin`, `end`: keys; `at`, `count`: which of `rows`.
    """

    table: Ints
    begin: Ints
    end: Ints
    at: Ints
    count: Ints
    rows: Ints


def tallest(
    rows: Sequence[int], keys: Sequence[int], group: int, heights: Sequence[int]
) -> Heights:
    """Return the heights for runs of so many rows and keys: the cheapest beside the least.

    `heights`: those there are, ascending.
    """
    of, wide = np.asarray(rows, np.int64) * group, np.asarray(keys, np.int64)
    costs = [cost_of(height) * int((-(-of // height) * wide).sum()) for height in heights]
    return Heights(group, heights[0], heights[costs.index(min(costs))])


def tiles_of(levels: Levels, lens: Ints, block_size: int, heights: Heights) -> Tiles:
    """Cut a forest's groups into tiles of rows; rows of length 0 have none.

    `lens` (rows,): keys of each row of the batch, of which at least the last is its own.
    """
    most = heights.tall // heights.group
    own = np.zeros(len(lens), np.int32)
    table, begin, end, at, count, rows = [], [], [], [], [], []
    places = 0
    for level in levels:
        for run in level:
            members = np.array(run.rows, np.int32)
            first, stop = run.first * block_size, (run.first + run.count) * block_size
            own[members] = stop
            starts = range(0, len(members), most)
            table += [run.rows[0]] * len(starts)
            begin += [first] * len(starts)
            end += [stop] * len(starts)
            at += [places + start for start in starts]
            count += [min(most, len(members) - start) for start in starts]
            rows.append(members)
            places += len(members)
    some = np.flatnonzero(lens > own).astype(np.int32)
    ones = np.ones(len(some), np.int32)
    return Tiles(
        np.append(np.array(table, np.int32), some),
        np.append(np.array(begin, np.int32), own[some]),
        np.append(np.array(end, np.int32), lens[some]),
        np.append(np.array(at, np.int32), places + np.arange(len(some), dtype=np.int32)),
        np.append(np.array(count, np.int32), ones),
        np.concatenate([*rows, some]),
    )  # fmt: skip


class Pieces(NamedTuple):
    """Cuts of tiles, each (pieces,): the tile, its key tiles [begin, end), the program that has it."""

    tile: Ints
    begin: Ints
    end: Ints
    program: Ints


def cut(tiles: Tiles, heights: Heights, block: int, programs: int) -> Pieces:
    """Give each program an equal stretch of the tiles' line; cuts lie between key tiles of `block`."""
    keys = -(-(tiles.end - tiles.begin) // block)
    if not len(keys):
        return Pieces(keys, keys, keys, keys)
    costs = heights.cost(tiles.count)
    item, least = ITEM, ITEM + LEAST * int(costs.max())
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
    last = np.append((tile[1:] != tile[:-1]) | (begin[1:] != begin[:-1]), True)
    tile, begin, program = tile[last], begin[last], program[last]
    end = np.append(begin[1:], 0)
    ends = np.append(tile[1:] != tile[:-1], True)
    end[ends] = keys[tile[ends]]
    return Pieces(tile, begin, end, program)


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """What the kernels read, and where in it: int32, pieces first.

    `bounds` (programs + 1): each program's first piece; `parts` (rows of the batch + 1): each row's first
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


def room_for(rows: int, programs: int, heights: Heights) -> Room:
    """Return the room for `rows` rows of the batch in `MOST_LEVELS` levels and by themselves.

    A row is in one tile of each level, a tile has one row or more, and each program ends in one cut.
    """
    named = rows * (MOST_LEVELS + 1)
    listed = named + programs * (heights.tall // heights.group)
    return Room(named + programs, listed, named, listed * heights.group)


def work_of(
    tiles: Tiles, pieces: Pieces, group: int, block: int, rows: int, programs: int,
    room: Room | None = None,
) -> PrefixWork:  # fmt: skip
    """Lay out what the kernels read for `rows` rows of the batch; `block`: keys of a key tile."""
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
