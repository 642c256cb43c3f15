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
import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyattn.spec.layer import LayerSpec

Ints = npt.NDArray[np.int64]

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
FEW_HEADS, LOW = 32, 16
"""Heads up to which TRITON_MLA runs two programs on a processor, of tiles of 16 or 32 rows."""
ROUNDS = 8
"""Pieces a processor from which on the processors are taken to end together."""
ITEM, WORTH, MERGE = 1, 3, 6
"""Blocks that a tile of TRITON_ATTN costs beside its own, that a program has at the least, and that it
costs Hopper's own prefill at the most to merge what was cut."""
SHORT, FEW_KEYS = 16, 1536
"""Query tokens of short rows; keys of their tiles a processor, up to which TRITON_ATTN's are low."""
HOPPER = (64, 128, 256)
"""Head sizes of TRITON_ATTN's own prefill for Hopper; of prompts without a cache, but for the first."""
TALL_BLOCK = 0.35
"""What a (row, key) takes of a tile that isn't low, of what it takes of a low one of 64 rows."""
PARTIAL, SHORT_PARTIAL = 4, 2
"""Reads and writes of a token, in 16 bits, that a part of it costs; in short rows."""
PACKED = {16: 0.6, 64: 1.0, 128: 1.6}
"""FlashInfer's tiles of short rows: the time of each, of one of 64 rows. Two run on a processor."""
PIECE, PAGE = 128, 16
"""Keys that its pieces have at the least, and that each costs beside its own; it cuts at pages."""


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key.

    `rows`: 1 if anything is merged. `longest`: parts of the longest row, if it is; over latents some of
    all pieces beside; of low tiles the most of a program; of heads apart the keys that a processor reads.
    `queries`: tokens, and what their parts are in these; over latents, where a program's own rows
    count, each processor has a tile more. `pairs`: as many as if all processors had what the fullest
    one has.
    """

    rows: int
    queries: int
    longest: int
    pairs: int


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


def deal(
    spec: LayerSpec, queries: Ints, lens: Ints, seen: int, ways: Mapping[str, int]
) -> dict[str, Counts]:
    """Deal a step's keys out in each way, by its name.

    `seen`: keys that a token sees at most. `ways`: to how many processors, by the name.
    """
    if spec.latent is None:
        some = queries > 0
        step = Step(spec, queries[some], lens[some], seen)
        return {name: HEADS[name](step, processors) for name, processors in ways.items()}
    rows, tokens, longest = len(queries), int(queries.sum()), int(queries.max())
    by_form: dict[tuple[int, bool], Tiles] = {}
    counts, group = {}, spec.num_heads  # absorbed: every head has the same keys
    for name, processors in ways.items():
        high = LATENTS
        if name == "pages" and tokens * group > high * rows:
            high, processors = 2 * high, processors // 2  # two processors share a tile
        padded = name == "padded" and tokens < longest * rows
        if (high, padded) not in by_form:
            q = np.full_like(queries, longest) if padded else queries
            by_form[high, padded] = _tiles(q, group, lens, seen, high)
        tiles = by_form[high, padded]
        of_all = longest * rows if padded else tokens
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
        counts[name] = Counts(int(merged > 0), of_all, merged, pairs)
    return counts


def _tiles(queries: Ints, group: int, lens: Ints, seen: int, high: int) -> Tiles:
    """Cut rows into tiles, each of which sees all keys."""
    each, keys = (queries * group + high - 1) // high, lens
    if seen < sys.maxsize:
        keys = np.minimum(keys, seen + np.minimum(queries, high // group))
    blocks = (keys + LATENTS - 1) // LATENTS
    most, longest = int(each.max()), int(blocks.max())
    return Tiles(each, keys, blocks, most, longest, int(each.sum()), int(each @ blocks))


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
    roles = few or count >= 2 * rows  # a kernel whose pipeline is deeper
    item, least = (1, 0) if few else (4, 0) if roles else (2, 2)
    programs, lanes = processors * (1 + few), 1
    units = np.repeat(blocks + item, each)
    if 1 < most <= programs <= SLACK * (programs - programs % most) and count == most * rows:
        # Tiles of a row lie side by side.
        programs, lanes, units = programs // most, most, blocks + item
    number, total, longest = len(units), int(units.sum()), tiles.longest + item
    share = first = max(-(-total // programs), item + least)
    alike, parts = _alike(number, longest, programs, share)
    length = parts * alike if number <= programs else longest
    limit = int(SLACK * share) + 2 * item
    search = roles and number <= 8 * programs and int(units.min()) <= min(limit, 2 * share)
    if alike <= SLACK * total / programs + 1 and not (search and length * number == total):
        return alike / (1 + few), parts, number * parts * lanes
    units[::-1].sort()
    if not roles and longest <= max(SLACK * total / programs + 1, share):
        return max(_end(units, programs), share), 1, 0
    while search and share <= limit:  # the long ones in stretches, the others whole
        cut = int(np.count_nonzero(units > share))
        free = min(programs - -(-int(units[:cut].sum()) // share), number - cut)
        end = _end(units[cut:], free) if free > 0 else limit + 1
        if end <= share:
            pieces = int((-(-units[:cut] // share)).sum())
            return share / (1 + few), -(-longest // share), pieces * lanes
        share = min(int(end), share + -(-share // 16))
    return first / (1 + few), (longest - 3 + first) // first + 1, _cuts(units, first) * lanes


def _alike(number: int, longest: int, programs: int, least: int) -> tuple[int, int]:
    """Return a program's share, and a tile's parts, if all tiles are taken for as long as the longest."""
    if number > programs:
        return -(-number // programs) * longest, 1
    share = max(-(-longest // (programs // number)), least)
    return share, -(-longest // share)


def _cuts(units: Ints, share: int) -> int:
    """Return how many pieces cut tiles are in, if tiles lie on a line that is cut after each share."""
    ends = units.cumsum()
    cuts = (ends - 1) // share - (ends - units) // share
    return int(cuts.sum() + np.count_nonzero(cuts))


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
    sizes = _cut_up(np.repeat(share, each), np.repeat(parts, each), np.repeat(last, each))
    return _end(sizes + BEGIN, processors), most_parts, merged


def _cut_up(share: Ints, parts: Ints, last: Ints) -> Ints:
    """Return the pieces of tiles, each in so many, of one size but for the last."""
    sizes = np.repeat(share, parts)
    sizes[parts.cumsum() - 1] = last
    return sizes


class Step(NamedTuple):
    """Rows of a step over heads, and how many keys a token sees before its own at most."""

    spec: LayerSpec
    queries: Ints
    lens: Ints
    seen: int

    def tiles(self, group: int, high: int, block: int) -> tuple[Ints, Ints, Ints]:
        """Return rows' tiles; of each tile of a KV head its row, and the blocks that it goes through."""
        if self.seen == sys.maxsize and int(self.queries.max()) * group <= high:
            rows = np.arange(len(self.lens))
            return np.ones_like(rows), rows, (self.lens + block - 1) // block
        each = (self.queries * group + high - 1) // high
        row = np.repeat(np.arange(len(each)), each)
        first = (np.arange(len(row)) - np.repeat(each.cumsum() - each, each)) * high
        before = (self.lens - self.queries)[row]
        end = self.lens[row]
        if self.spec.causal:
            end = before + (np.minimum(first + high, self.queries[row] * group) - 1) // group + 1
        blocks = (end + block - 1) // block
        if self.seen < sys.maxsize:
            blocks -= np.maximum(before + first // group - self.seen, 0) // block
        return each, row, np.maximum(blocks, 1)

    def counts(self, span: float, area: float, merged: int, parts: float, longest: int) -> Counts:
        """Return the counts of a fullest processor that has so many blocks of an area in (row, key).

        `parts`: of all tokens together, in reads of a token.
        """
        pairs = int(span * area) // self.spec.num_heads
        return Counts(merged, int(self.queries.sum() + parts), longest, pairs)


def _cut(step: Step, processors: int) -> Counts:
    """Count as FlashAttention-3 does: rows in turn, each head's tiles with most keys first."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    sizes = ((high, block) for top, high, block in TILES if spec.head_size <= top)
    high, block = next(sizes, (128, 80))
    if spec.head_size in ONE_GROUP and int(step.queries.max()) * group <= LOW_TILE:
        high = LOW_TILE
    each, row, blocks = step.tiles(group, high, block)
    ends = each.cumsum()
    longest = blocks[ends - 1]
    blocks = blocks[(2 * ends - each - 1)[row] - np.arange(len(row))]
    merging = int(each.max()) * heads < FULL * processors and int(longest.max()) > UNCUT
    parts = np.ones_like(longest)
    if merging:
        limit = -(-int(each @ longest) * heads * 11 // (10 * processors))
        parts = -(-longest // limit)
    each_parts = np.minimum(parts[row], blocks)
    share = -(-blocks // each_parts)
    pieces = _cut_up(share, each_parts, blocks - (each_parts - 1) * share)
    pieces = np.tile(pieces, heads)
    if len(each) > 1 and processors < len(pieces) <= ROUNDS * processors:
        pieces = pieces[np.tile(np.repeat(row, each_parts), heads).argsort(kind="stable")]
    span, partial = _end(pieces + BEGIN, processors), PARTIAL * merging * int(step.queries @ parts)
    return step.counts(
        span, processors * high * block, int(merging), partial, merging * int(parts.max())
    )


def _apart(step: Step, processors: int) -> Counts:
    """Count as FlashInfer does: head by head, the longest rows first, their last tiles first."""
    if int(step.queries.max()) <= SHORT:
        return _packed(step, processors)
    high, heads = TILES[0][1] if step.spec.head_size <= TILES[0][0] else WIDE, step.spec.num_heads
    _, row, blocks = step.tiles(1, high, WIDE)
    order = np.lexsort((-np.arange(len(row)), -step.lens[row]))
    span = _end(np.tile(blocks[order], heads) + LIGHT_BEGIN, processors)
    read = int(blocks.sum()) * heads * WIDE // processors
    return step.counts(span, processors * high * WIDE, 0, 0, read)


def _packed(step: Step, processors: int) -> Counts:
    """Count as FlashInfer's kernels of FlashAttention-2's kind do, two programs on a processor."""
    spec, queries, group = step.spec, step.queries, step.spec.gqa_ratio
    mean, slots = int(queries.sum()) * group // len(queries), 2 * processors
    high = 16 if mean <= 16 else 64 if mean <= 64 or spec.head_size >= 256 else 128
    each, keys = (queries * group + high - 1) // high, step.lens
    if step.seen < sys.maxsize:
        keys = np.minimum(keys, step.seen + 1 + high // group)
    pages = -(-keys // PAGE)
    room, limit, top = max(1, slots // spec.num_kv_heads), PIECE // PAGE, int(pages.max())
    total, number = int(each @ pages), int(each.sum())
    limit = max(limit, -(-total // room))
    top = min(top, -(-total // (room - number))) if room > number else top
    while limit < top:  # the shortest pieces for which there is room
        middle = (limit + top) // 2
        fits = int(each @ -(-pages // middle)) <= room
        limit, top = (limit, middle) if fits else (middle + 1, top)
    parts = np.maximum(-(-pages // limit), 1)
    share, last = np.minimum(pages, limit), pages - (parts - 1) * limit
    pieces = _cut_up(np.repeat(share, each), np.repeat(parts, each), np.repeat(last, each)) * PAGE
    pieces = np.repeat(pieces + PIECE, spec.num_kv_heads)
    span = _end(pieces, slots) * (1 if len(pieces) <= processors else 2)
    most = int(parts.max())
    partial = SHORT_PARTIAL * int(queries @ parts) if most > 1 else 0
    area = processors * PACKED[high] * LATENTS
    return step.counts(span, area, int(most > 1), partial, most if most > 1 else 0)


def _whole(step: Step, processors: int) -> Counts:
    """Count as TRITON_ATTN does: whole tiles of one KV head or stretches; of short rows low tiles."""
    spec, queries = step.spec, step.queries
    group, heads = spec.gqa_ratio, spec.num_kv_heads
    rows, narrow = int(queries.max()) * group, spec.head_size <= WIDE
    low = rows <= LATENTS
    if not low and int(queries.max()) <= SHORT:
        read = int(-(-queries * group // LATENTS) @ np.minimum(step.lens, step.seen)) * heads
        low = read <= FEW_KEYS * processors
    if low:
        return _low(step, processors, min(LATENTS, max(16, 1 << (rows - 1).bit_length())))
    # Hopper's own prefill has no caps and sinks, and of heads of 64 no prompts without a cache.
    cached = spec.head_size > HOPPER[0] or not np.array_equal(queries, step.lens)
    plain = not (spec.logit_soft_cap or spec.learned_sinks)
    own = spec.head_size in HOPPER and cached and plain
    block = WIDE if own and narrow else LATENTS
    units = np.sort(step.tiles(group, WIDE, block)[2] + ITEM)[::-1]
    slots, area = max(1, processors // heads), processors * WIDE * block * TALL_BLOCK
    share, alike, parts, pieces = _shared(units, slots)
    limit = max(SLACK * int(units.sum()) / slots + 1, share + min(share, MERGE * own))
    turns = np.zeros((-(-len(units) // slots), slots), np.int64)
    turns.ravel()[: len(units)] = units
    turns[1::2] = turns[1::2, ::-1]  # there and back
    if int(units[0]) > limit or int(turns.sum(0).max()) > limit:
        return step.counts(alike or share, area, 1, PARTIAL * pieces * WIDE // group, parts)
    every = np.repeat(units, heads) if own else np.tile(units, heads)
    return step.counts(_end(every, processors), area, 0, 0, 0)


def _low(step: Step, processors: int, high: int) -> Counts:
    """Count tiles of so many rows in stretches; each that a program begins costs a block more."""
    narrow = step.spec.head_size <= WIDE
    units = step.tiles(step.spec.gqa_ratio, high, LATENTS if narrow else LATENTS // 2)[2] + ITEM
    on_one = 3 if high == LOW and narrow else 2
    slots = max(1, on_one * processors // step.spec.num_kv_heads)
    share, alike, parts, pieces = _shared(units, slots)
    begun = -(-len(units) // slots)
    if not alike:
        ends = units.cumsum()
        starts = np.arange(min(slots, -(-int(ends[-1]) // share))) * share
        last = np.minimum(ends.searchsorted(starts + share), len(ends) - 1)
        begun = int((last - ends.searchsorted(starts, "right")).max()) + 1
    area = processors * LATENTS * (LATENTS + high) / 2
    merged = int(parts > 1)
    # A merging program looks for as many parts of its tile as the longest one has.
    partial = (SHORT_PARTIAL * pieces + merged * len(units) * parts // 4) * high
    partial //= step.spec.gqa_ratio
    return step.counts((alike or share) + begun, area, merged, partial, merged * begun)


def _shared(units: Ints, slots: int) -> tuple[int, int, int, int]:
    """Return the share of each slot, 0 or the one if all tiles are taken for equals; parts, pieces."""
    total, longest, number = int(units.sum()), int(units.max()), len(units)
    share = max(-(-total // slots), WORTH)
    alike, parts = _alike(number, longest, slots, share)
    if alike <= SLACK * total / slots + 1:
        return share, alike, parts, number * parts * (parts > 1)
    return share, 0, min(slots, (longest - 2) // share + 2), _cuts(units, share)


HEADS = {"cut": _cut, "heads": _apart, "whole": _whole}
"""What counts a step over heads, by the name of the way."""


def _end(costs: Ints, processors: int) -> float:
    """Return when the last piece ends, if each goes to the processor that is free first."""
    largest = int(costs.max())
    if len(costs) <= processors or largest == int(costs.min()):
        return -(-len(costs) // processors) * largest
    if len(costs) > ROUNDS * processors:
        return max(largest, int(costs.sum()) / processors + largest / 2)
    ends: list[int] = costs[:processors].tolist()
    heapq.heapify(ends)
    replace = heapq.heapreplace
    for cost in costs[processors:].tolist():
        replace(ends, ends[0] + cost)
    return max(ends)
