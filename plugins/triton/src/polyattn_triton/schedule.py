"""Which program attends to which keys? Deals tiles of query rows, and cuts of their keys, to a grid.

The problem is that of FlashInfer's Algorithm 1 (Ye et al., 2025): a tile costs so much for its
queries and so much for each of its keys, programs shall end together, and the same lengths shall
always give the same cuts. Its heap is a loop on the host; here the tiles lie on one line, each as
long as it costs, and each program takes an equal stretch of it, as in Stream-K (Osama et al., 2023):
what straddles an end is cut there. That is a few operations of NumPy, at most one cut a program, and
arrays whose sizes depend on the numbers of tiles and programs alone, so that a captured graph reads
what any later plan wrote. All that a program must know is where its stretch begins.

Where tiles are many, and end together without a cut, each is a program of its own, the longest
first, and the device deals them out.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import LayerSpec, key_ranges

Ints = NDArray[np.signedinteger[Any]]

HEADER = 4
"""What the work of programs begins with: share, end of the line, cost of an item, tiles."""
COLUMNS = 5
"""Then, each for all programs: first tile, where it begins and ends, its sequence, its first row."""
EVEN = 1.1
"""What the fullest program may have of the mean, one key tile beside, for tiles to stay whole."""
MANY = 8
"""Tiles a program beside which a cut one costs little; to deal them one by one costs the host more."""

MERGED = 16
"""Parts of a tile that are merged in the time of a key tile."""
ROOM = 256 << 20
"""Bytes of the parts of a launch, where tiles are cut alike in any step: the rest has the next one."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of a kernel, in key tiles.

    `item`: what a tile of rows costs beside its keys. `least`: what is worth a program of its own.
    `merge`: what it costs that a second kernel merges what was cut.
    """

    item: int = 1
    least: int = 2
    merge: int = 0


@dataclass(frozen=True, slots=True)
class Chip:
    """Whose programs share keys: so many `processors`, each KV head's apart. Costs are of an H200.

    `full`: of the processors, how many read all that memory gives, a program each, each reading its
    key tiles one after the other. The others are in key tiles, 0.63 us each (fitted to 390 decodes and
    short steps): `own`, to merge splits by the program that ends last, all at once; `launch`, of a
    kernel that merges, and `round`, for it to load each `at_once` of a row's parts, or `wide`, where
    these are even splits.
    """

    processors: int
    heads: int
    on_one: int = 0
    full: float = 0.8
    own: float = 2.2
    launch: float = 1.5
    round: float = 1.0
    at_once: int = 16
    wide: int = 16

    def reading(self, total: int, share: float) -> float:
        """Return how long programs read `total` key tiles of a KV head, `share` each."""
        memory = total * self.heads / (self.full * self.processors)
        # What is slower hides the other, but for a tenth where they are nearly alike.
        return float((share**4 + memory**4) ** 0.25)

    def merging(self, parts: int, at_once: int) -> float:
        """Return how long a kernel merges so many parts of a tile."""
        return self.launch + self.round * -(-parts // at_once) if parts > 1 else 0.0

    def programs(self, most: int, total: int, longest: int, least: int) -> int:
        """Return how many programs a KV head's tiles end first with: `most`, or fewer by processors.

        Of a line that is `total` long, a program has `least` at the least; a kernel merges the parts
        of the `longest` tile.
        """
        if longest * most <= self.at_once * total or longest <= self.at_once * least:
            return most  # one round, as usual
        each = max(1, self.processors // self.heads)
        # Of equals the fewest: the others would have nothing to do.
        tries: list[int] = [each // 2 or 1, *range(most, each - 1, -each)[::-1]]

        def duration(programs: int) -> float:
            share = max(total / programs, least)
            parts = math.ceil(longest / share)
            return self.reading(total, share) + self.merging(parts, self.at_once)

        return min(tries, key=duration)

    def splits(self, most: int, keys: int, count: int, by_one: int) -> int:
        """Return into how many even splits each of `count` tiles of `keys` key tiles is cut best.

        Up to `by_one` are merged by the program that ends last, more by a kernel.
        """
        if most <= by_one:
            return most
        tries: list[int] = [by_one or 1, *range(most, by_one or 1, -self.at_once)]

        def duration(splits: int) -> float:
            itself = splits == by_one
            merging = self.own if itself else self.merging(splits, self.wide)
            share, total = -(-keys // splits), keys * count
            if self.on_one:  # the fullest multiprocessor's, and one: few hide less of each other
                fullest = 1 - (-count * self.heads * splits * self.on_one // self.processors)
                total = -(-fullest * share * self.processors // (self.on_one * self.heads))
            return self.reading(total, share) + merging

        return min(tries, key=duration)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of query rows: sequence, first row, key tiles; each (tiles,)."""

    seq: Ints
    row: Ints
    keys: Ints


class Stretches(NamedTuple):
    """Tiles on a line: tile i has [line[i], line[i + 1]), program p [p * share, (p + 1) * share).

    A tile's first `item` units are its queries', the others one key tile each; a tile may have more
    units than keys. Pieces of a tile are numbered by program (see `part_of`), in the order of its
    keys: merged in that order, results are the same bits in any order of ends. `parts`: of a tile at
    most, or one more.
    """

    line: Ints
    total: int
    share: int
    item: int
    programs: int
    parts: int

    def work(self, tiles: Tiles | None = None) -> NDArray[np.int32]:
        """Return the kernels' work list, int32: header, columns, the line, sequences, first rows.

        Without `tiles` a tile is a sequence, its first row 0, and those are left out.
        """
        line, programs, count = self.line, self.programs, len(self.line) - 1
        begin = HEADER + (COLUMNS if tiles is not None else 3) * programs
        work = np.empty(begin + count + 1 + (0 if tiles is None else 2 * count), np.int32)
        work[:HEADER] = self.share, self.total, self.item, count
        columns = work[HEADER:begin].reshape(-1, programs)
        # A program that begins past the end of the line gets the last tile.
        tile = line[:-1].searchsorted(_upto(programs) * self.share, "right")
        columns[2] = line[tile]
        tile -= 1
        columns[0] = tile
        columns[1] = line[tile]
        work[begin : begin + count + 1] = line
        if tiles is not None:
            columns[3] = tiles.seq[tile]
            columns[4] = tiles.row[tile]
            rest = work[begin + count + 1 :].reshape(2, count)
            rest[0], rest[1] = tiles.seq, tiles.row
        return work


def max_parts(programs: int) -> int:
    """Return how many parts there may be: of the tile that a program ends, and of one it begins."""
    return 2 * programs


@lru_cache(maxsize=256)
def _upto(count: int) -> Ints:
    return np.arange(count)


class Line(NamedTuple):
    """Tiles on a line: tile i has [ends[i], ends[i + 1]), all together and the longest so much."""

    ends: Ints
    total: int
    longest: int

    @classmethod
    def of(cls, keys: Ints, item: int) -> Line:
        """Lay tiles with so many key tiles and `item` units of queries each."""
        return cls.of_units(keys + item, int(keys.max(initial=0)) + item)

    @classmethod
    def of_units(cls, units: Ints, longest: int) -> Line:
        """Lay tiles that are so long."""
        ends = np.zeros(len(units) + 1, np.int64)
        np.add.accumulate(units, out=ends[1:])
        return cls(ends, int(ends[-1]), longest)


def units_of_decodes(spec: LayerSpec, lens: Ints, block: int, item: int) -> Ints:
    """Return how long the tiles of rows of one query token are; `block`: a power of two."""
    if spec.sliding_window or spec.chunk_size:
        last = lens - 1
        return key_tiles(spec, last, last, lens, block) + item
    units: Ints = lens + (block * (item + 1) - 1)
    units >>= block.bit_length() - 1
    return units


def segments(keys: Ints, each: int, least: int = 0) -> Stretches:
    """Cut tiles of so many key tiles after `each`; a stretch is a segment. `least`: programs."""
    count = np.maximum(-(-keys // each), 1)
    line = np.concatenate([[0], count.cumsum() * each])
    programs = max(int(count.sum()), least)
    return Stretches(line, int(line[-1]), each, 0, programs, int(count.max()))


def launches_of(ends: Ints, room: int) -> list[Ints]:
    """Return the tiles of each launch, so that the parts of its tiles before the last fit in `room`.

    `ends`: how many parts there are to the end of each tile, or of the request that it is of.
    """
    launch = (ends - 1) // max(1, room)
    return [np.flatnonzero(launch == number) for number in np.unique(launch)]


def stretches(line: Line, programs: int, rates: Rates) -> Stretches:
    """Give each program a share of a line with a tile at least.

    Tiles of about one length are cut alike, or not at all; others wherever a share ends. Tiles that are
    no more than programs have one each, if the longest costs no more than a share and a merge.
    """
    count, item = len(line.ends) - 1, rates.item
    total, longest = line.total, line.longest
    share = max(-(-total // programs), item + rates.least)
    if rates.merge and count <= programs and longest <= share + rates.merge:
        return Stretches(_upto(count + 1) * longest, count * longest, longest, item, programs, 1)
    alike = _alike(count, longest, programs, share, total)
    if alike is not None:
        share, each = alike
        ends, parts = _upto(count + 1) * each, max(1, each // share)
        return Stretches(ends, count * each, share, item, programs, parts)
    parts = min(programs, (longest - 2) // share + 2)  # wherever the longest begins
    return Stretches(line.ends, total, share, item, programs, parts)


def stretched(keys: Ints, programs: int, rates: Rates) -> tuple[Stretches, Ints]:
    """Give each program a stretch of tiles, and return these in the order of the line.

    Each piece has a program of its own where that costs little more: a second one begins anew. Else,
    unless all are taken for equals, tiles that fit in a share are dealt whole, several to a program if
    that costs little more: a piece is written in float32, and is merged.
    """
    count, item = len(keys), rates.item
    dealt = stretches(Line.of(keys, item), programs, rates)
    share, most = dealt.share, int(EVEN * dealt.share) + 2 * item
    each = _alone(keys, programs, share + item)
    if each is not None:
        return segments(keys, each, programs), _upto(count)
    equals = dealt.total > int(keys.sum()) + item * count
    shortest = int(keys.min()) + item
    # `2 * item` may be several short shares: where no tile fits in two, they do not grow.
    if equals or count > MANY * programs or shortest > min(most, 2 * share):
        return dealt, _upto(count)
    order = np.argsort(-keys, kind="stable")
    units = keys[order] + item
    while share <= most:
        cut = int((units > share).sum())
        ends = _laid(units[:cut], share, item)
        first = -(-int(ends[cut]) // share)
        free = [(0, program) for program in range(first, programs)][: count - cut]
        if not free:
            share += -(-share // 16)
            continue
        begins = []  # each on the program that is free first
        for cost in units[cut:].tolist():
            load, program = free[0]
            begins.append(program * share + load)
            heapq.heapreplace(free, (load + cost, program))
        longest = max(free)[0]
        if longest <= share:
            turn = np.argsort(begins)
            total = (first + len(free)) * share
            line = np.concatenate([ends[:-1], np.array(begins, np.int64)[turn], [total]])
            parts = int(((ends[1:] - 1) // share - ends[:-1] // share).max(initial=0)) + 1
            order[cut:] = order[cut:][turn]
            return Stretches(line, total, share, item, programs, parts), order
        share = min(longest, share + -(-share // 16))
    return dealt, _upto(count)


def _alone(keys: Ints, programs: int, most: int) -> int | None:
    """Return after how many key tiles, `most` at most, to cut tiles so that each piece has a program.

    A tile's pieces are merged sixteen at a time, in the time of a key tile.
    """
    if len(keys) > programs:
        return None
    for each in range(max(1, -(-int(keys.sum()) // programs)), most + 1):
        if int(np.maximum(-(-keys // each), 1).sum()) <= programs:
            return max(each, round(math.sqrt(int(keys.max()) / MERGED)))
    return None


def _laid(units: Ints, share: int, item: int) -> Ints:
    """Return where tiles begin on a line, and its end: a share ends with keys of each of its tiles."""
    at, begins = 0, []
    for cost in units.tolist():
        room = -at % share
        at += room if room <= item else 0
        begins.append(at)
        at += cost
    return np.array([*begins, at], np.int64)


def in_lanes(tiles: Tiles, programs: int, rates: Rates) -> tuple[Stretches, Tiles]:
    """Give each program a stretch of tiles, as `stretched`.

    Where every sequence has as many tiles of rows, the first ones' programs go through the same keys
    at the same time as the next ones': a sequence's keys come from memory once, not once a tile.
    """
    lanes = int((tiles.seq == tiles.seq[0]).sum())
    each = programs // lanes
    alike = lanes * each * EVEN >= programs and len(tiles.row) % lanes == 0
    if lanes == 1 or not alike or (tiles.row.reshape(-1, lanes) != tiles.row[:lanes]).any():
        lane, order = stretched(tiles.keys, programs, rates)
    else:
        lane, turn = stretched(tiles.keys.reshape(-1, lanes).max(1), each, rates)
        length = -(-lane.total // lane.share) * lane.share
        begins: Ints = np.arange(lanes)[:, None] * length + lane.line[:-1]
        line, total = np.append(begins.ravel(), lanes * length), lanes * length
        lane = lane._replace(line=line, total=total, programs=programs)
        order = (turn * lanes + np.arange(lanes)[:, None]).ravel()
    return lane, Tiles(tiles.seq[order], tiles.row[order], tiles.keys[order])


def _alike(
    count: int, longest: int, programs: int, least: int, total: int
) -> tuple[int, int] | None:
    """Return (a program's share, a tile's length on the line) if all tiles are taken for equals.

    Either several programs have one tile, or one program several tiles.
    """
    if count <= programs:
        share = max(-(-longest // (programs // count)), least)
        each = -(-longest // share) * share
    else:
        each = longest
        share = -(-count // programs) * longest
    return (share, each) if share <= EVEN * total / programs + 1 else None


def whole(keys: Ints, slots: int, rates: Rates) -> Ints | None:
    """Return the order, longest first, in which tiles are dealt out uncut, if that is the shorter.

    `slots`: how many run at a time. None: the fullest slot would have more than `EVEN` of the mean,
    and more than stretches, merged.
    """
    count = len(keys)
    mean = (int(np.add.reduce(keys)) + rates.item * count) / slots
    share = max(math.ceil(mean), rates.item + rates.least)
    most = max(EVEN * mean + 1, share + rates.merge)
    if keys.item(keys.argmax()) + rates.item > most:
        return None
    order = (-keys).argsort(kind="stable")
    rounds = -(-count // slots)
    if rounds == 1:
        return order
    dealt = np.zeros(rounds * slots, np.int64)
    dealt[:count] = keys[order] + rates.item
    rows = dealt.reshape(rounds, slots)
    rows[1::2] = rows[1::2, ::-1]  # there and back: no program gets the longest of each round
    return order if int(np.add.reduce(rows).max()) <= most else None


def fullest(costs: Ints, heads: int, at_once: int, programs: int) -> int:
    """Return the end of the last program, if the device gives each free program the next tile.

    Each KV head has tiles of these `costs`, the longest first; `at_once` heads' tiles take turns, then
    the next heads' begin.
    """
    loads = [0] * programs
    for cost in np.tile(np.repeat(costs, at_once), heads // at_once).tolist():
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def part_of(program: int, begun: bool) -> int:
    """Return a piece's number: of the tile that `program` came into, or of the one it began."""
    return 2 * program + begun


def most_keys(spec: LayerSpec, lens: Ints | int, queries: Ints | int) -> Any:
    """Return how many of `lens` keys the last `queries` tokens see together, or a little more."""
    seen = lens
    if spec.sliding_window:
        seen = np.minimum(seen, spec.sliding_window + spec.sink_tokens + queries - 1)
    if spec.chunk_size:
        seen = np.minimum(seen, spec.chunk_size + queries - 1)
    return seen


def key_tiles(spec: LayerSpec, first: Ints, last: Ints, lens: Ints, block: int) -> Ints:
    """Return how many tiles of `block` keys the queries at positions `first` to `last` see.

    As `tiles.tiles_seen` counts them: `lens` are the keys there are, and between kept tokens and the
    window nothing is counted.
    """
    if not (spec.sliding_window or spec.chunk_size):
        return _tiles_before(spec, last, lens, block)
    low, kept, near, high = key_ranges(spec, first, last, lens, np.minimum, np.maximum)
    near_tile, seen = near // block, 0
    if spec.sink_tokens:
        first_tile = low // block
        kept_tile = np.where(kept > low, (kept + (block - 1)) // block, first_tile)
        seen = kept_tile - first_tile
        if not spec.rope:  # rotated keys' tiles are the kept tokens' and the window's apart
            near_tile = np.maximum(near_tile, kept_tile)
    nearest = np.maximum((high + (block - 1)) // block - near_tile, 0)
    tiles: Ints = seen + np.where(high > near, nearest, 0)
    return tiles


def _tiles_before(spec: LayerSpec, last: Ints, lens: Ints, block: int) -> Ints:
    """Return the tiles of all keys that no causality hides; 0 where all queries are before the first."""
    high = np.minimum(lens, last + 1) if spec.causal else lens
    tiles: Ints = (high + (block - 1)) // block
    return np.maximum(tiles, 0, out=tiles)


def most_key_tiles(spec: LayerSpec, first: Ints, last: Ints, lens: Ints, block: int) -> Ints:
    """Return the most tiles that `key_tiles` may count for these queries, of any keys up to `lens`.

    What lies in a window or chunk begins at another place of a tile for each length.
    """
    most = _tiles_before(spec, last, lens, block)
    if spec.rope and spec.sink_tokens:
        most = most + 1  # the tile in which the kept tokens end counts twice
    sides = 1 if spec.causal else 2
    for width in (spec.sliding_window, spec.chunk_size):
        if width is not None:
            keys = last - first + sides * width + 1 - sides
            seen = (keys + block - 2) // block + 1 + -(-spec.sink_tokens // block)
            most = np.minimum(most, seen)
    return most


def rows_of(query_lens: Ints, group: int, height: int) -> tuple[Ints, Ints]:
    """Return (sequence, first row) of every tile of `height` rows; rows are (token, head of group).

    A sequence without queries has none.
    """
    counts = (query_lens * group + (height - 1)) // height
    seq = _upto(len(query_lens)).repeat(counts)
    row: Ints = np.arange(len(seq)) - (counts.cumsum() - counts)[seq]
    row *= height
    return seq, row
