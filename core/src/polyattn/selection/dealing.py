"""How long is a chip's fullest processor busy? As libraries deal tiles of queries and keys out.

A program holds a tile of query rows, (token, head), and goes through its keys block by block. A step
takes the time of the fullest processor, and of merging cut tiles. With few tiles, as with latents and
short chunks, that decides. Each library cuts in its own way:

- `even`: as TRITON_MLA does, in shares of one length, cut where a share ends.
- `padded`: as FlashMLA does, the same, as if every row had as many query tokens as the longest.
- `cut`: as FlashAttention-3 does, in pieces of a little more than the mean.
- `pages`: as FlashInfer does latents, in pieces of a multiple of 256 keys.
- `heads`: as FlashInfer does heads: each query head's tokens in tiles of their own, uncut; of short
  rows a group's together, in pieces that two programs on each processor hold.
- `whole`: as TRITON_ATTN does: uncut where that is the shorter, else in shares of one length; short
  rows in low tiles, unless these read much.

But for shares, each piece goes to the processor that is free first. Tiles of heads are counted one by
one, since causality hides keys from each but the last; over latents a row's are alike.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from itertools import groupby
from operator import add, mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyattn.spec.layer import LayerSpec

Ints = npt.NDArray[np.int64]
Runs = list[tuple[int, int]]
"""Blocks, or what they cost, and how many tiles in turn, or pieces, have so many."""
Work = list[tuple[int, Runs]]
"""Runs, and how many times they are repeated."""

LATENTS, WIDE = 64, 128
"""Rows of a tile, and keys of a block: of latents, of most heads."""
BEGIN, PADDED_BEGIN, LIGHT_BEGIN = 2, 5, 1
"""Blocks that a tile, or a piece of one, costs beside its own; the same of FlashMLA's, FlashInfer's."""
SLACK, FULL, UNCUT = 1.1, 0.8, 4
"""FlashAttention-3 cuts keys into shares of 1.1 of the mean, if the tiles of the longest query leave a
fifth of the processors free and a row has more than four blocks. So much may even shares differ, too."""
TILES = ((64, 192, 128), (128, 128, 128), (192, 128, 96))
"""Up to which head size FlashAttention-3's tiles have so many rows and keys; beyond, 128 and 80."""
LOW_TILE, ONE_GROUP = 64, (64, 128)
"""But 64 rows where the longest query's fit, of these head sizes."""
PAGES = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Up to how many keys on the average FlashInfer's pieces have so many; beyond, multiples of 256."""
FEW_HEADS, LOW, MERGED = 32, 16, 16
"""Heads up to which TRITON_MLA runs two programs on a processor, of tiles of 16 or 32 rows; parts of a
tile that it merges in the time of a block."""
ROUNDS = 8
"""Pieces a processor from which on the processors are taken to end together."""
ITEM, WORTH, MERGE = 1, 3, 6
"""Blocks that a tile of TRITON_ATTN costs beside its own, that a program has at the least, and that it
costs Hopper's own prefill at the most to merge what was cut."""
SHORT, FEW_KEYS = 16, 1536
"""Query tokens of short rows; keys of their tiles a processor, up to which TRITON_ATTN's are low."""
HOPPER = (64, 128, 256)
"""Head sizes of TRITON_ATTN's own prefill for Hopper; of prompts without a cache, but for the first."""
TALL_BLOCK, PORTABLE = 0.35, 0.7
"""What a (row, key) takes of one of a low tile of 64 rows: in Hopper's own prefill, in the portable."""
CAPPED = 0.1
"""What a block of a low tile costs whatever its rows, of one of 64 rows; half without a soft cap."""
PARTIAL, SHORT_PARTIAL = 4, 2
"""Reads and writes of a token, in 16 bits, that a part of it costs; in short rows."""
PACKED = {16: 0.6, 64: 1.0, 128: 1.6}
"""FlashInfer's tiles of short rows: the time of each, of one of 64 rows. Two run on a processor."""
PIECE, PAGE = 128, 16
"""Keys that its pieces have at the least, and that each costs beside its own; it cuts at pages."""

LEAST = {"decode": {"even": 0.25}, "short": {"heads": 0.6, "whole": 0.1}}
LEAST["prefill"] = LEAST["chunked"] = {"whole": TALL_BLOCK}
"""What a way's pairs are of a step's own at the least, by the kind of step; where none is, as many."""


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key.

    `rows`: 1 if anything is merged. `longest`: parts of the longest row, if it is; over latents some of
    all pieces beside; of low tiles the most of a program; of heads apart the keys that a processor reads.
    `queries`: tokens, and what their parts are in these; over latents, where a program's own rows
    count, each processor has a tile more. `pairs`: as many as if all processors had what the fullest
    one has; `deal_out` tells them where they are bounds: `pairs` at the least, `most` at the most.
    """

    rows: int
    queries: int
    longest: int
    pairs: int
    most: int
    deal_out: Callable[[], int] | None = None

    def exact(self) -> Counts:
        """Return the counts with pairs that aren't bounds."""
        if self.deal_out is None:
            return self
        pairs = self.deal_out()
        return self._replace(pairs=pairs, most=pairs, deal_out=None)


Ends = tuple[float, float, Callable[[], float] | None]
"""When the last piece ends: between two times, and what tells the exact one where they differ."""


def deals_of(spec: LayerSpec, kind: str) -> tuple[str, ...]:
    """Return the ways that compete for a kind of step."""
    if spec.latent is not None:
        return ("even", "padded", "cut", "pages")
    return tuple(HEADS) if kind in ("short", "prefill", "chunked") else ()


class Tiles(NamedTuple):
    """A step's tiles over latents, of rows of (token, head), all of one size.

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


Dealer = Callable[[str, int], Counts]


def deal(spec: LayerSpec, queries: Ints, lens: Ints, seen: int) -> Dealer:
    """Return what counts a step, by the name of a way and to how many processors.

    `seen`: keys that a token sees at most.
    """
    if spec.latent is not None:
        return Latents(spec.num_heads, queries, lens).deal
    rows = groupby(zip(queries.tolist(), lens.tolist(), strict=True))
    some = ((*row, len([*same])) for row, same in rows if row[0])
    tokens, keys, alike = zip(*some, strict=True)
    step = Step(spec, tokens, keys, alike, seen, int(queries.sum()), int(queries.max()))
    return lambda name, processors: HEADS[name](step, processors)


class Latents:
    """A step over latents: its rows, and their tiles by height and by whether they are padded.

    `group`: heads, which all have the same keys, since they are absorbed.
    """

    def __init__(self, group: int, queries: Ints, lens: Ints):
        self.group, self.queries, self.lens = group, queries, lens
        self.tokens, self.longest = int(queries.sum()), int(queries.max())
        self._tiles: dict[tuple[int, bool], Tiles] = {}

    def deal(self, name: str, processors: int) -> Counts:
        """Count a way of dealing keys out to so many processors."""
        rows, group, longest, of_all = len(self.lens), self.group, self.longest, self.tokens
        high = LATENTS
        if name == "pages" and of_all * group > high * rows:
            high, processors = 2 * high, processors // 2  # two processors share a tile
        padded = name == "padded" and of_all < longest * rows
        if (high, padded) not in self._tiles:
            q = np.full_like(self.queries, longest) if padded else self.queries
            self._tiles[high, padded] = _tiles(q, group, self.lens, high)
        tiles = self._tiles[high, padded]
        of_all = longest * rows if padded else of_all
        height, span = min(high, longest * group), 0.0
        if name == "padded":
            span, merged = _padded(tiles, processors)
        elif name == "even":
            few = longest == 1 and group <= FEW_HEADS
            if few:
                height = LOW if group <= LOW else FEW_HEADS
            span, parts, pieces = _stretched(tiles, rows, processors, few)
            merged = parts + pieces * height // high if parts > 1 else 0
        else:
            span, parts, pieces = _pieces(name, tiles, processors)
            merged = parts + pieces // 4 if parts > 1 else 0
        if name in ("even", "pages"):
            of_all += processors * height // group
        pairs = int(span * processors * high * LATENTS) // group
        return Counts(int(merged > 0), of_all, merged, pairs, pairs)


def _tiles(queries: Ints, group: int, lens: Ints, high: int) -> Tiles:
    """Cut rows into tiles, each of which sees all keys."""
    each, blocks = (queries * group + high - 1) // high, (lens + LATENTS - 1) // LATENTS
    most, longest = int(each.max()), int(blocks.max())
    return Tiles(each, lens, blocks, most, longest, int(each.sum()), int(each @ blocks))


def _padded(tiles: Tiles, processors: int) -> tuple[int, int]:
    """Return the blocks of FlashMLA's fullest processor; the longest row's parts, 0 of an uncut one."""
    blocks = int((tiles.blocks + PADDED_BEGIN).sum())
    share = -(-blocks // max(1, processors // tiles.most)) + PADDED_BEGIN
    return share, -(-tiles.longest // share) if tiles.longest > share else 0


def _stretched(tiles: Tiles, rows: int, processors: int, few: bool) -> tuple[float, int, int]:
    """Return the blocks of TRITON_MLA's fullest program; the longest row's parts; pieces of cut tiles.

    `few`: two programs share a processor, so that a block takes half of it.
    """
    each, blocks, most, count = tiles.each, tiles.blocks, tiles.most, tiles.number
    item = 1 if few else 4
    programs, lanes = processors * (1 + few), 1
    keys = np.repeat(blocks, each)
    if 1 < most <= programs <= SLACK * (programs - programs % most) and count == most * rows:
        programs, lanes, keys = programs // most, most, blocks  # a row's tiles lie side by side
    units = keys + item
    number, total, longest = len(units), int(units.sum()), tiles.longest + item
    share = first = max(-(-total // programs), item)
    most = share + item if number <= programs else 0
    for one in range(max(-(-int(keys.sum()) // programs), 1), most + 1):
        if int(np.maximum((keys + one - 1) // one, 1).sum()) <= programs:
            one = max(one, round(math.sqrt(tiles.longest / MERGED)))
            cut = (keys + one - 1) // one  # each piece has a program of its own
            return one / (1 + few), int(cut.max()), int(cut[cut > 1].sum()) * lanes
    alike = -(-number // programs) * longest
    limit = int(SLACK * share) + 2 * item
    search = number <= 8 * programs and int(units.min()) <= min(limit, 2 * share)
    if alike <= SLACK * total / programs + 1 and not (search and longest * number == total):
        return alike / (1 + few), 1, number * lanes
    units[::-1].sort()
    while search and share <= limit:  # the long ones in stretches, the others whole
        long = int(np.count_nonzero(units > share))
        free = min(programs - -(-int(units[:long].sum()) // share), number - long)
        end = _end(units[long:], free) if free > 0 else limit + 1
        if end <= share:
            pieces = int((-(-units[:long] // share)).sum())
            return share / (1 + few), -(-longest // share), pieces * lanes
        share = min(int(end), share + -(-share // 16))
    ends = units.cumsum()
    cuts = (ends - 1) // first - (ends - units) // first
    pieces = int(cuts.sum() + np.count_nonzero(cuts))
    return first / (1 + few), (longest - 3 + first) // first + 1, pieces * lanes


def _alike(number: int, longest: int, programs: int, least: int) -> tuple[int, int]:
    """Return a program's share, and a tile's parts, if all tiles are taken for as long as the longest."""
    if number > programs:
        return -(-number // programs) * longest, 1
    share = max(-(-longest // (programs // number)), least)
    return share, -(-longest // share)


def _cuts(units: list[int], share: int) -> tuple[int, int]:
    """Cut tiles on a line after each share; return cut tiles' pieces, and a share's most tiles."""
    pieces = most = begun = at = end = 0
    for cost in units:
        first, end = end // share, end + cost
        last = (end - 1) // share
        begun = begun + 1 if first == at else 1
        most = begun if begun > most else most
        if last > first:
            pieces, begun = pieces + last - first + 1, 1
        at = last
    return pieces, most


def _pieces(name: str, tiles: Tiles, processors: int) -> tuple[float, int, int]:
    """Return the blocks of the fullest processor; the longest row's parts; pieces of cut tiles.

    Where FlashAttention-3 cuts some tiles, it merges all.
    """
    each, keys, blocks, most, longest, _, total = tiles
    merging = name == "cut" and most < FULL * processors and longest > UNCUT
    if name == "pages":
        mean = max(1, -(-int(each @ keys) // processors))
        few = (limit for top, limit in PAGES if mean <= top)
        limit = next(few, -(-mean // 256) * 256)
        parts = np.maximum(-(-keys // limit), 1)
        share = np.minimum(blocks, -(-limit // LATENTS))
        last = -(-(keys - (parts - 1) * limit) // LATENTS)
    else:
        limit = -(-int(total * 11) // (10 * processors)) if merging else longest
        parts = np.maximum(-(-blocks // limit), 1)
        share = -(-blocks // parts)
        last = blocks - (parts - 1) * share
    most_parts, merged = int(parts.max()), 0
    if merging:
        merged, most_parts = int(each @ parts), max(2, most_parts)
    elif most_parts > 1:
        merged = int(each @ (parts * (parts > 1)))
    share, parts, last = (np.repeat(column, each) for column in (share, parts, last))
    sizes = np.repeat(share, parts)
    sizes[parts.cumsum() - 1] = last
    return _end(sizes + BEGIN, processors), most_parts, merged


class Step(NamedTuple):
    """Rows of a step over heads: tokens and keys of each, and how many such rows lie side by side.

    `seen`: keys that a token sees before its own at most. `tokens`: of all rows. `most`: of one row.
    """

    spec: LayerSpec
    queries: tuple[int, ...]
    lens: tuple[int, ...]
    alike: tuple[int, ...]
    seen: int
    tokens: int
    most: int

    def tiles(self, group: int, high: int, block: int) -> list[Runs]:
        """Return the blocks that each row's tiles of a KV head go through, the last tiles first."""
        if self.seen == sys.maxsize and self.most * group <= high:
            return [[(-(-keys // block), 1)] for keys in self.lens]
        rows = zip(self.queries, self.lens, strict=True)
        return [self._row(tokens, keys, group, high, block) for tokens, keys in rows]

    def _row(self, tokens: int, keys: int, group: int, high: int, block: int) -> Runs:
        last = tokens * group
        number, before = -(-last // high), keys - tokens if self.spec.causal else keys
        if self.seen < sys.maxsize:
            far = keys - tokens - self.seen  # of these keys the first token sees none
            counts = (
                -(-min(before + (min(end, last) - 1) // group + 1, keys) // block)
                - max(far + (end - high) // group, 0) // block
                for end in range(number * high, 0, -high)
            )
            return [(max(blocks, 1), len(list(same))) for blocks, same in groupby(counts)]
        runs, blocks, left = [], -(-keys // block), number
        reach = (blocks - 1) * block - before
        while reach > 0:  # tiles of these tokens have fewer blocks
            fewer = reach * group // high
            if fewer < left:
                runs.append((blocks, left - fewer))
                left = fewer
            blocks, reach = blocks - 1, reach - block
        return [*runs, (blocks, left)] if left else runs

    def counts(
        self, ends: Ends | float, area: float, merged: int, parts: float, longest: int
    ) -> Counts:
        """Return the counts of a fullest processor that has so many blocks of an area in (row, key).

        `parts`: of all tokens together, in reads of a token.
        """

        def pairs(span: float) -> int:
            return int(span * area) // self.spec.num_heads

        low, high, deal_out = ends if isinstance(ends, tuple) else (ends, ends, None)
        exact = (lambda: pairs(deal_out())) if deal_out else None
        queries = int(self.tokens + parts)
        return Counts(merged, queries, longest, pairs(low), pairs(high), exact)


def _cut(step: Step, processors: int) -> Counts:
    """Count as FlashAttention-3 does: rows in turn, each head's tiles with most keys first."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    sizes = ((high, block) for top, high, block in TILES if spec.head_size <= top)
    high, block = next(sizes, (128, 80))
    if spec.head_size in ONE_GROUP and step.most * group <= LOW_TILE:
        high = LOW_TILE
    rows = step.tiles(group, high, block)
    tops = [runs[0][0] for runs in rows]
    most, limit, partial = -(-step.most * group // high), max(tops), 0
    times = [n * heads for n in step.alike]
    merging = most * heads < FULL * processors and limit > UNCUT
    if merging:
        each = [-(-tokens * group // high) for tokens in step.queries]
        limit = -(-sum(map(mul, map(mul, each, tops), times)) * 11 // (10 * processors))
    parts = [-(-blocks // limit) for blocks in tops]
    work: Work = []
    for n, some, runs in zip(times, parts, rows, strict=True):
        if some > 1:
            runs = [piece for blocks, count in runs for piece in _pieces_of(blocks, some) * count]
        _add(work, n, runs)
    if merging:
        partial = PARTIAL * sum(map(mul, map(mul, step.queries, step.alike), parts))
    ends, longest = _ended(work, processors, BEGIN), merging * max(parts)
    return step.counts(ends, processors * high * block, int(merging), partial, longest)


def _pieces_of(blocks: int, parts: int) -> Runs:
    """Return a tile in so many pieces, if it has as many blocks."""
    parts = min(parts, blocks)
    share = -(-blocks // parts)
    return [(share, parts - 1), (blocks - (parts - 1) * share, 1)]


def _apart(step: Step, processors: int) -> Counts:
    """Count as FlashInfer does: head by head, the longest rows first, their last tiles first."""
    if step.most <= SHORT:
        return _packed(step, processors)
    high, heads = TILES[0][1] if step.spec.head_size <= TILES[0][0] else WIDE, step.spec.num_heads
    rows = zip(step.lens, step.alike, step.tiles(1, high, WIDE), strict=True)
    rising = sorted(rows, key=lambda row: row[0])
    runs = [run for _, n, runs in rising[::-1] for run in runs * n]
    work: Work = []
    _add(work, heads, runs)
    span = _ended(work, processors, LIGHT_BEGIN)
    read = sum(blocks * count for blocks, count in runs) * heads * WIDE // processors
    return step.counts(span, processors * high * WIDE, 0, 0, read)


def _packed(step: Step, processors: int) -> Counts:
    """Count as FlashInfer's kernels of FlashAttention-2's kind do, two programs on a processor."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    mean, slots = step.tokens * group // sum(step.alike), 2 * processors
    high = 16 if mean <= 16 else 64 if mean <= 64 or spec.head_size >= 256 else 128
    near = step.seen + 1 + high // group
    pages = [-(-min(keys, near) // PAGE) for keys in step.lens]
    each = [-(-q * group // high) * n for q, n in zip(step.queries, step.alike, strict=True)]
    room, limit, number, top = max(1, slots // heads), PIECE // PAGE, sum(each), max(pages)
    total = sum(map(mul, each, pages))
    limit = max(limit, -(-total // room))
    top = min(top, -(-total // (room - number))) if room > number else top
    if number >= room:
        limit = max(limit, top)
    while limit < top:  # the shortest pieces for which there is room
        middle = (limit + top) // 2
        fits = sum(map(mul, each, [-(-n // middle) for n in pages])) <= room
        limit, top = (limit, middle) if fits else (middle + 1, top)
    parts = [-(-n // limit) for n in pages]
    most, count = max(parts), sum(map(mul, each, parts))
    runs: Runs = []
    for tiles, n, some in zip(each, pages, parts, strict=True):
        last = (n - (some - 1) * limit) * PAGE + PIECE
        if some == 1:
            runs.append((last, tiles * heads))
        else:
            runs += [(limit * PAGE + PIECE, (some - 1) * heads), (last, heads)] * tiles
    partial = sum(map(mul, map(mul, step.queries, step.alike), parts))
    merged, on_one = most > 1, 1 if count * heads <= processors else 2
    area, partial = processors * PACKED[high] * LATENTS * on_one, SHORT_PARTIAL * merged * partial
    return step.counts(_ended([(1, runs)], slots), area, int(merged), partial, merged * most)


def _whole(step: Step, processors: int) -> Counts:
    """Count as TRITON_ATTN does: whole tiles of one KV head or stretches; of short rows low tiles."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    height, narrow = step.most * group, spec.head_size <= WIDE
    low = height <= LATENTS
    if not low and step.most <= SHORT:
        each = [-(-tokens * group // LATENTS) for tokens in step.queries]
        keys = [min(keys, step.seen) for keys in step.lens]
        read = heads * sum(map(mul, map(mul, each, keys), step.alike))
        low = read <= FEW_KEYS * processors
    if low:
        return _low(step, processors, min(LATENTS, max(16, 1 << (height - 1).bit_length())))
    # Hopper's own prefill has no caps and sinks, and of heads of 64 no prompts without a cache.
    cached = spec.head_size > HOPPER[0] or step.queries != step.lens
    plain = not (spec.logit_soft_cap or spec.learned_sinks)
    own = spec.head_size in HOPPER and cached and plain
    block = WIDE if own and narrow else LATENTS
    rows = zip(step.alike, step.tiles(group, WIDE, block), strict=True)
    runs = [(b + ITEM, n * alike) for alike, runs in rows for b, n in runs]
    runs.sort(reverse=True)
    slots = max(1, processors // heads)
    area = processors * WIDE * block * (TALL_BLOCK if own else PORTABLE)
    shares = Shares.of(runs, slots)
    mean, longest = shares.total / slots, runs[0][0]
    limit = max(SLACK * mean + 1, shares.least + min(shares.least, MERGE * own))
    begins = spec.head_size // WIDE if own else 1  # blocks that a tile costs beside those planned
    if longest > limit or (mean + longest > limit and _turning(_units(runs), slots) > limit):
        pieces, begun = shares.pieces(runs)
        partial, span = PARTIAL * pieces * WIDE // group, shares.length + begins * begun
        return step.counts(span, area, 1, partial, shares.parts)
    work: Work = []
    _add(work, 1 if own else heads, [(cost, n * heads) for cost, n in runs] if own else runs)
    return step.counts(_ended(work, processors, begins), area, 0, 0, 0)


def _turning(units: list[int], slots: int) -> int:
    """Return the most that a slot gets if units are dealt there and back."""
    loads = [0] * slots
    for turn, start in enumerate(range(0, len(units), slots)):
        some = units[start : start + slots]
        some += [0] * (slots - len(some))
        loads = list(map(add, loads, some[::-1] if turn % 2 else some))
    return max(loads)


def _low(step: Step, processors: int, high: int) -> Counts:
    """Count tiles of so many rows in stretches; each that a program begins costs a block more."""
    narrow, group = step.spec.head_size <= WIDE, step.spec.gqa_ratio
    tiles = step.tiles(group, high, LATENTS if narrow else LATENTS // 2)
    rows = zip(step.alike, tiles, strict=True)
    runs = [(b + ITEM, n) for alike, runs in rows for b, n in runs[::-1] * alike]
    on_one = 3 if high == LOW and narrow else 2
    slots = max(1, on_one * processors // step.spec.num_kv_heads)
    shares = Shares.of(runs, slots)
    pieces, begun = shares.pieces(runs)
    fixed = CAPPED if step.spec.logit_soft_cap else 0.5
    area = processors * LATENTS * (fixed * LATENTS + (1 - fixed) * high)
    merged = int(shares.parts > 1)
    # A merging program looks for as many parts of its tile as the longest one has.
    partial = (SHORT_PARTIAL * pieces + merged * shares.number * shares.parts // 4) * high // group
    return step.counts(shares.length + begun, area, merged, partial, merged * begun)


class Shares(NamedTuple):
    """Units in shares of one length, as TRITON_ATTN cuts them.

    `least`: the shortest length. `alike`: whether all units are taken for as long as the longest.
    `parts`: of the longest. `number`, `total`: of all units.
    """

    slots: int
    least: int
    length: int
    alike: bool
    parts: int
    number: int
    total: int

    @classmethod
    def of(cls, runs: Runs, slots: int) -> Shares:
        """Return the shares of so many slots."""
        costs, counts = zip(*runs, strict=True)
        number, total, longest = sum(counts), sum(map(mul, costs, counts)), max(costs)
        least = max(-(-total // slots), WORTH)
        alike, parts = _alike(number, longest, slots, least)
        if alike <= SLACK * total / slots + 1:
            return cls(slots, least, alike, True, parts, number, total)
        parts = min(slots, (longest - 2) // least + 2)
        return cls(slots, least, least, False, parts, number, total)

    def pieces(self, runs: Runs) -> tuple[int, int]:
        """Return how many pieces cut units are in, and the most units of a slot."""
        if self.alike:
            return self.number * self.parts * (self.parts > 1), -(-self.number // self.slots)
        return _cuts(_units(runs), self.length)


HEADS = {"cut": _cut, "heads": _apart, "whole": _whole}
"""What counts a step over heads, by the name of the way."""


def _units(runs: Runs) -> list[int]:
    """Return each of some runs' numbers by itself."""
    return [cost for cost, count in runs for _ in range(count)]


def _add(work: Work, times: int, runs: Runs) -> None:
    """Add runs that are repeated. A single one is only longer."""
    if len(runs) > 1:
        work.append((times, runs))
        return
    if not work or work[-1][0] > 1:
        work.append((1, []))
    cost, count = runs[0]
    work[-1][1].append((cost, count * times))


def _ended(work: Work, processors: int, begin: int = 0) -> Ends | float:
    """Return when the last piece ends, if each goes to the processor that is free first.

    `begin`: what a piece costs beside its own.
    """
    number = total = largest = 0
    least = sys.maxsize
    for times, runs in work:
        costs, counts = zip(*runs, strict=True)
        number += times * sum(counts)
        total += times * sum(map(mul, costs, counts))
        largest, least = max(largest, *costs), min(least, *costs)
    if number <= processors or largest == least:
        return -(-number // processors) * (largest + begin)
    total, largest = total + number * begin, largest + begin
    if number > ROUNDS * processors:
        return max(largest, total / processors + largest / 2)
    low, high = max(largest, -(-total // processors)), (total - largest) // processors + largest
    if low == high:
        return low

    def deal_out() -> int:
        costs = [cost for times, runs in work for cost in _units(runs) * times]
        return _fullest([cost + begin for cost in costs], processors)

    return low, high, deal_out


def _end(costs: Ints, processors: int) -> float:
    """Return the same of pieces one by one."""
    largest = int(costs.max())
    if len(costs) <= processors or largest == int(costs.min()):
        return -(-len(costs) // processors) * largest
    if len(costs) > ROUNDS * processors:
        return max(largest, int(costs.sum()) / processors + largest / 2)
    return _fullest(costs.tolist(), processors)


def _fullest(costs: list[int], processors: int) -> int:
    ends = costs[:processors]
    heapq.heapify(ends)
    replace = heapq.heapreplace
    for cost in costs[processors:]:
        replace(ends, ends[0] + cost)
    return max(ends)
