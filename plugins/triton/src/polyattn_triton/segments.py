"""Whose keys are reduced in segments, merged in order, whoever has them? Deals segments out to programs.

A tile's keys are cut after so many key tiles as follow from its request alone; its segments are merged
one after another. A program has any segments that follow one another on the line of tiles: it merges
those that a tile begins with itself, and each other one is a part, which a second kernel merges in the same
order, by the same roundings. So where a program's stretch ends changes no bit, and balancing stays free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyattn_triton.schedule import EVEN, Ints, Tiles

HEADER, COLUMNS, TILE, ITEM = 4, 9, 5, 5
"""Numbers that the work begins with, then of each program, tile and merged tile."""


@dataclass(frozen=True)
class Dealt:
    """What `decode_kernel` and `fold_kernel` read: `work`, whose last `items` are merged.

    `places`: of parts, a KV head's.
    """

    work: NDArray[np.int32]
    programs: int
    places: int
    items: int

    @property
    def items_at(self) -> int:
        return len(self.work) - ITEM * self.items


def deal(tiles: Tiles, each: Ints, bounds: Ints, line: Ints, merged: bool) -> Dealt:
    """Give each program the segments between two of the `bounds`.

    `each`: key tiles of a tile's segments. `line`: where tiles begin and end, in segments. `merged`: a
    program merges those that a tile begins with.
    """
    programs, count = len(bounds) - 1, len(tiles.keys)
    tile = line.searchsorted(bounds[:-1], "right") - 1
    # Of tiles with several segments those that no one program has are merged: from its first one's end.
    low, high = line[:-1], line[1:]
    end = np.minimum(bounds[bounds.searchsorted(low, "right")], high)
    if not merged:
        end = low + 1
    cut = np.flatnonzero(end < high)
    into = (end - low)[cut]
    parts = 1 + (high - end)[cut]
    # Only a merged tile's segments have places.
    ends = (high - low)[cut].cumsum()
    places = int(ends[-1]) if len(cut) else 0
    shift: Ints = np.zeros(count, np.int64)
    shift[cut] = ends - high[cut]
    work = np.empty(HEADER + COLUMNS * programs + TILE * count + ITEM * len(cut), np.int32)
    work[:HEADER] = places, programs, count, len(cut)
    columns = work[HEADER : HEADER + COLUMNS * programs].reshape(COLUMNS, programs)
    columns[0], columns[1], columns[2] = bounds[:-1], bounds[1:], tile
    columns[3], columns[4] = low[tile], high[tile]
    columns[5], columns[6] = tiles.seq[tile], tiles.row[tile]
    columns[7], columns[8] = each[tile], shift[tile]
    rest = work[HEADER + COLUMNS * programs :]
    rest[: TILE * count].reshape(TILE, count)[:] = (
        high, tiles.seq, tiles.row, each, shift,
    )  # fmt: skip
    if len(cut):
        rest[TILE * count :].reshape(ITEM, len(cut))[:] = (
            tiles.seq[cut], tiles.row[cut], low[cut] + shift[cut], into, parts,
        )  # fmt: skip
    return Dealt(work, programs, places, len(cut))


def line_of(keys: Ints, each: Ints) -> Ints:
    """Return where tiles of so many key tiles begin and end, in segments."""
    return np.concatenate([[0], np.maximum(-(-keys // each), 1).cumsum()])


def balanced(keys: Ints, each: Ints, line: Ints, programs: int, item: int) -> Ints:
    """Return bounds of `programs` stretches of about as many key tiles, `item` more a tile."""
    count = np.diff(line)
    total = int(line[-1])
    if programs >= total:
        return np.arange(total + 1)
    units = np.repeat(each, count)
    last = line[1:] - 1
    units[last] = np.maximum(keys, 1) - (count - 1) * each
    units[line[:-1]] += item
    ends = np.concatenate([[0], units.cumsum()])
    wanted = np.arange(programs + 1) * (ends[-1] / programs)
    after = ends.searchsorted(wanted).clip(1, total)
    nearest = np.where(wanted - ends[after - 1] < ends[after] - wanted, after - 1, after)
    return np.unique(np.concatenate([[0], nearest[1:-1], [total]]))


def within(line: Ints, pieces: int) -> Ints:
    """Return bounds of as many stretches of each tile, which no two tiles share."""
    count = np.diff(line)
    share = -(-count // pieces)
    steps = np.arange(pieces)[None, :] * share[:, None]
    bounds = line[:-1, None] + np.minimum(steps, count[:, None])
    return np.unique(np.append(bounds, line[-1]))


def even(keys: Ints) -> bool:
    """Whether tiles have about as many keys."""
    return int(keys.max()) <= EVEN * float(keys.mean()) + 1
