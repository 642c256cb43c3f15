"""How long is a chip's fullest processor busy? As libraries deal tiles of queries and keys out.

A program holds a tile of query rows, (token, head), and goes through its keys block by block. A step
takes the time of the fullest processor, and of merging cut tiles. With few tiles, as with latents and
short chunks, that decides. Each library cuts in its own way:

- `even`: as TRITON_MLA does, in shares of one length, cut where a share ends.
- `padded`: as FlashMLA does, the same, as if every row had as many query tokens as the longest.
- `cut`: as FlashAttention-3 does, in pieces of a little more than the mean; short queries by another
  kernel, with low tiles.
- `pages`: as FlashInfer does latents, in pieces of a multiple of 256 keys.
- `heads`: as FlashInfer does heads: each query head's tokens in tiles of their own, uncut; of short
  rows a group's together, in pieces that two programs on each processor hold.
- `whole`: as TRITON_ATTN does: uncut where that is the shorter, else in shares of one length; short
  rows in low tiles, unless these read much.
- `runs`, `packed`: as torch calls dense kernels (`dealing_torch`).

But for shares, each piece goes to the processor that is free first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from polyattn.selection.dealing_decodes import begun_keys, cores, stretches
from polyattn.selection.dealing_latents import Latents
from polyattn.selection.dealing_torch import packed, runs
from polyattn.selection.pieces import (
    BEGIN,
    EACH,
    FULL,
    SLACK,
    UNCUT,
    UNSHARED,
    Counts,
    Ints,
    Rows,
    alike,
    at,
    cut,
    ended,
    ended_by,
    largest,
    on_line,
    there_and_back,
    total,
    turned,
)
from polyattn.selection.step import Step
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import GROUPED

LOW_TILE, WIDE = 64, 128
"""Rows of a tile where the longest query fits in them, and of most; keys of most blocks."""
LOW_BLOCK = 192
"""Keys of a block of FlashAttention-3, for heads of 64 and tiles of `LOW_TILE` rows."""
LIGHT_BEGIN, PAGED_BLOCK, PACKED_KEYS, PACKED_WIDE, WINDOWED = 1, 96, 0.83, 0.6, 2
"""FlashInfer: blocks that a tile costs beside its own; keys of a block over pages; the time of a key that
lies packed, as a part of one in a page, and of heads wider than `WIDE`, whose blocks over pages are low;
blocks that a window costs a tile over pages. A single prompt's keys are packed."""
TILES = (
    (64, 192, 128, 160),
    (96, 192, 128, 128),
    (128, 128, 128, 128),
    (192, 128, 96, 96),
    (256, 128, 80, 64),
)
"""Up to which head size FlashAttention-3's tiles have so many rows and keys, and keys in a window."""
PACKED_BLOCK = {192: 128}
"""Keys of its tiles, by head size, where keys don't lie in pages: of the prompts of latents."""
ONE_GROUP = (64, 128)
"""Head sizes whose tiles have 64 rows where the longest query fits. A kernel of its own runs them, but
for windows."""
WALKED, WALK = 31, 2
"""Rows of decodes that a program looks through at a time for its tile; what that costs, in merges."""
NEARLY = 0.85
"""Of the most processors that some parts of a tile keep busy, what is enough of fewer parts."""
L2_SHARE, AT_ONCE_HEADS = 32 << 20, (16, 8, 4, 2)
"""FlashAttention-3: bytes of the L2 for a group of one head; a larger group has a share of them, by the
next power of two up to 16. Tiles of the most heads whose keys fit take turns."""
ITEM, WORTH, UNMERGED, MERGE = 1, 3, 4, 6
"""Blocks that a tile of TRITON_ATTN costs beside its own; that a program has at the least; by which the
longest of few tiles may exceed a share, and the fullest of prefill's places its share, each of a
processor's, before they are cut and merged."""
SHORT, FEW_KEYS, LOW = 16, 1536, 16
"""Query tokens of short rows; keys of their tiles a processor, up to which TRITON_ATTN's are low; rows of
a tile of which three programs run on a processor."""
HOPPER = (64, 128, 256)
"""Head sizes of TRITON_ATTN's own prefill for Hopper; of prompts without a cache, but for the first."""
MOST_COPIED, ROWS_A_COPY, LEAST_GAIN = 256 << 20, 256, 1 << 26
"""Of 8-bit caches: bytes of copies at the most, rows that see a key whose copy pays, the least gain."""
L2_BYTES, L2_HELD = 50 << 20, 35 << 20
"""Of keys and values, beyond which stretches of tiles read each block from memory; up to which heads go
side by side."""
PARTIAL, SHORT_PARTIAL, ONE_PART = 4, 2, 3
"""Reads and writes of a token, in 16 bits, that a part of it costs; in TRITON_ATTN. What a token costs
that FlashAttention-3 doesn't cut where it cuts others, or might; merging a cut one costs a part more."""
MERGING, FEW_PARTS, AT_ONCE = 512, 4, 16
"""What a program that merges costs TRITON_ATTN, in reads and writes of an element. It has a row, or four
of few parts; so many parts are read at once, the next ones after these."""
EMPTY = 0.3
"""What a tile without rows would take less than a full one, over latents."""
BEGUN = 4
"""What a low tile of latents costs beside its blocks, in these."""
ALONE, SPREAD = 0.9, 0.35
"""The time of a block of low tiles if no program shares a processor, as a part of one if some do; what
twice as many programs cost, up to one a processor, in what one costs to begin."""
APART = 4
"""Reads and writes of a token that it costs beside, if a group is one head: a tile's rows lie apart.
So in FlashAttention-3, and in Hopper's prefill with wide heads."""
PACKED = {16: 0.6, 64: 1.0, 128: 1.75}
"""FlashInfer's tiles of short rows: the time of each, of one of 64 rows. Two run on a processor."""
PIECE, PAGE = 128, 16
"""Keys that its pieces have at the least. It cuts at pages."""
PACKED_BEGIN = {16: 12, 64: 4, 128: 4}
"""Pages that a piece costs beside its own: four warps share the keys of the lowest tiles, and merge."""
AT_A_TIME = {16: 128, 64: 128, 128: 64}
"""Keys that its tiles take at a time, by their rows; the lowest twice as many of heads up to 64."""
READ, COPIED, LAUNCHED = 24, 2, 16
"""What merging costs FlashInfer, in reads and writes of a token: of a token that is cut; of another. And
what it costs beside, in what it costs for each KV head."""


@cache
def tile_of(head_size: int) -> tuple[int, int, int]:
    """Return how many rows and keys FlashAttention-3's tiles have, and keys in a window."""
    sizes = (sizes for top, *sizes in TILES if head_size <= top)
    high, block, windowed = next(sizes, TILES[-1][1:])
    return high, block, windowed


def _cut(step: Step, processors: int) -> Counts:
    """Count as FlashAttention-3 does: rows in turn, of some heads at a time the most keys first."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    near = step.seen
    high, block, windowed = tile_of(spec.head_size)
    if near is not None:
        block = windowed
    elif not spec.cached:
        block = PACKED_BLOCK.get(spec.head_size, block)
    elif spec.head_size in ONE_GROUP and step.most * group <= LOW_TILE:
        high, block = LOW_TILE, LOW_BLOCK if spec.head_size <= LOW_TILE else block
    each, first, blocks = step.tiles(group, high, block, True)
    # Shares are those of all keys, though only a window's are cut.
    tops = blocks[first] if near is None else (step.lens + (block - 1)) // block
    most, longest, parts = -(-step.most * group // high), largest(tops), 1
    tokens = step.tokens + APART * step.tokens // group
    loaded = longest if near is None else min(longest, -(-(near + 1 + high) // block))
    merging = most * heads < FULL * processors and loaded > UNCUT
    if merging:
        limit = -(-int(each.dot(tops)) * heads * 11 // (10 * processors))
        most_parts = _most_parts(most * heads, min(loaded, processors), processors)
        parts = min(-(-longest // limit), most_parts)
        tokens += ONE_PART * step.tokens
    costs, turns, single = blocks + BEGIN, heads, len(blocks) == len(tops)
    if parts > 1:
        each_parts = np.minimum((tops + (limit - 1)) // limit, most_parts)
        wanted = each_parts if single else each_parts.repeat(each)
        share = -(-blocks // np.minimum(wanted, blocks))
        times = -(-blocks // share)  # parts without blocks write and read nothing
        parted = step.queries * (each_parts > 1)
        written = int(parted.dot(each_parts)) * total(times) // total(wanted)
        tokens += PARTIAL * written + (PARTIAL - ONE_PART) * total(parted)
        begin = BEGIN + (times > 1)  # a part is in float32
        costs = share + begin  # the longest pieces, which count where each has a processor
        if total(times) * heads > processors:
            costs = cut(costs, blocks - (times - 1) * share + begin, times)
            costs = costs if single else costs[_parts_in_turn(times, each)]
            each = times if single else np.add.reduceat(times, first)
    else:
        # Of decodes of most sizes no head waits for others to leave the L2.
        unmasked = step.most == 1 and near is None and not LOW_TILE < spec.head_size <= WIDE
        at_once = heads if unmasked else _at_once(spec, longest * block)
        if at_once == heads:
            each = EACH
        elif heads % at_once:
            costs, each, turns = _in_sections(costs, each, heads, at_once), EACH, 1
        elif at_once > 1:
            costs, each, turns = costs.repeat(at_once), each * at_once, heads // at_once
    ends, area = ended(costs, processors, turns, each), processors * high * block
    kind = "" if near is None or step.most == 1 else "windowed"
    few = step.most <= SHORT or not step.fresh
    if near is None and spec.head_size in ONE_GROUP and step.most > 1 and few:
        kind = "short" if high == LOW_TILE else "chunked"
    beside = merging + (WALK * (len(step.lens) // WALKED) if step.most == 1 else 0)
    return ends.counts(area, spec.num_heads, beside / heads, tokens, merging * parts, kind)


def _in_sections(costs: Ints, each: Ints, heads: int, at_once: int) -> Ints:
    """Return all heads' tiles as they are dealt: of a row so many heads' in turn, the last are fewer."""
    sizes = [min(at_once, heads - first) for first in range(0, heads, at_once)]
    row = np.arange(len(each)).repeat(each)
    order = np.concatenate([row.repeat(size) for size in sizes]).argsort(kind="stable")
    dealt: Ints = np.concatenate([costs.repeat(size) for size in sizes])[order]
    return dealt


def _parts_in_turn(times: Ints, each: Ints) -> Ints:
    """Return the order in which pieces are dealt: of a row all tiles' first parts, then the second ones.

    They are given tile by tile, each in so many.
    """
    ends, most = times.cumsum(), largest(times)
    turns = np.arange(0, len(each) * most, most).repeat(each).repeat(times)  # a row's first one
    turns += np.arange(len(turns)) - (ends - times).repeat(times)
    order: Ints = turns.argsort(kind="stable")
    return order


@lru_cache(4096)
def _most_parts(tiles: int, blocks: int, processors: int) -> int:
    """Return into how many parts FlashAttention-3 cuts a tile of so many blocks at the most."""
    rounds = tiles * np.arange(1, blocks + 1) / processors
    busy = rounds / np.ceil(rounds)
    return 1 + int(np.argmax(busy >= NEARLY * busy.max()))


def _at_once(spec: LayerSpec, keys: int) -> int:
    """Return of how many heads FlashAttention-3 takes tiles in turn, of rows of so many keys."""
    group, heads = spec.gqa_ratio, spec.num_kv_heads
    held = keys * (spec.head_size + spec.v_head_size) * 2
    room = L2_SHARE // min(16, 1 << (group - 1).bit_length()) // held
    return min(heads, next((most for most in AT_ONCE_HEADS if most <= room), 1))


def _apart(step: Step, processors: int) -> Counts:
    """Count as FlashInfer does: head by head, the longest rows first, their last tiles first."""
    small = step.spec.gqa_ratio < GROUPED and not step.spec.sliding_window
    if step.most == 1 and small:
        return cores(step, processors)
    if step.most <= SHORT or step.narrow:
        return _packed(step, processors)
    high, heads = TILES[0][1] if step.spec.head_size <= TILES[0][0] else WIDE, step.spec.num_heads
    falling = step.lens.argsort(kind="stable")[::-1]
    queries, lens = step.queries[falling], step.lens[falling]
    step = Step(step.spec, queries, lens, step.seen, step.tokens, step.most)
    packed = step.fresh and len(lens) == 1
    block = WIDE if packed else PAGED_BLOCK
    costs = step.tiles(1, high, block)[2] + LIGHT_BEGIN
    if step.seen is None:
        ends = ended(costs, processors, heads)
    else:  # dealt out as if there were no window, of which it reads a block more than a tile sees
        plain = Step(step.spec, queries, lens, None, step.tokens, step.most)
        planned, pages = plain.tiles(1, high, PAGE)[2], block // PAGE
        more = 1 if packed else WINDOWED  # and masks those that the window cuts
        costs = np.minimum(costs + more, (planned + (pages - 1)) // pages + LIGHT_BEGIN)
        ends = ended_by(planned * PAGE + 2 * WIDE, costs, processors, heads)
    area = processors * high * block
    read = (total(costs) - LIGHT_BEGIN * len(costs)) * heads * block // processors
    price = packed_keys(step.spec.head_size) if packed else 1
    return ends.counts(price * area, heads, 0, step.tokens, read, "ragged" if packed else "")


def packed_keys(head_size: int) -> float:
    """Return the time of a key that lies packed, as a part of one in a page."""
    return PACKED_KEYS if head_size <= WIDE else PACKED_WIDE


def _packed(step: Step, processors: int) -> Counts:
    """Count as FlashInfer's kernels of FlashAttention-2's kind do, two programs on a processor."""
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    mean, slots = step.tokens * group // len(step.lens), 2 * processors
    high = 16 if mean <= 16 else 64 if mean <= 64 or spec.head_size >= 256 else 128
    near = None if step.seen is None else step.seen + 1 + high // group
    keys = step.lens if near is None else np.minimum(step.lens, near)
    pages, each = (keys + (PAGE - 1)) // PAGE, step.each(group, high)
    room, limit, top = max(1, slots // heads), PIECE // PAGE, largest(pages)
    number, of_all = total(each), int(each.dot(pages))
    limit = max(limit, -(-of_all // room))
    top = min(top, -(-of_all // (room - number))) if room > number else top
    if number >= room:
        limit = max(limit, top)
    elif number == len(pages) > 2 * (room - number):  # no more rows are cut than there is room for
        falling = pages.copy()
        falling.sort()
        limit = min(max(limit, falling.item(number - room - 1)), top)
        if total((pages + (limit - 1)) // limit) <= room:
            top = limit
    while limit < top:  # the shortest pieces for which there is room
        middle = (limit + top) // 2
        fits = int(each.dot((pages + (middle - 1)) // middle)) <= room
        limit, top = (limit, middle) if fits else (middle + 1, top)
    rows = Rows.of(each, pages, limit)
    merged, tokens = int(rows.most > 1), step.tokens
    if merged:
        tokens += READ * int(step.queries.dot(rows.parts > 1)) + COPIED * step.tokens
    on_one = 1 if rows.pieces * heads <= processors else 2
    block = AT_A_TIME[high] * (1 + (high == LOW and spec.head_size <= LOW_TILE)) // PAGE
    if rows.most == 1 and step.most > SHORT:
        seen = step.tiles(group, high, block * PAGE)[2] * block
        ends = ended(seen + PACKED_BEGIN[high], slots, heads)
    else:
        ends = rows.ended(PACKED_BEGIN[high], heads, slots, block)
    area = processors * PACKED[high] * LOW_TILE * on_one * PAGE
    launched = merged * (1 + LAUNCHED / heads)
    return ends.counts(area, spec.num_heads, launched, tokens, merged * rows.most)


def _whole(step: Step, processors: int) -> Counts:
    """Count as TRITON_ATTN does: whole tiles of one KV head or stretches; of short rows low tiles."""
    if step.most == 1:
        return stretches(step, processors)
    spec, group, heads = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads
    height, narrow = step.most * group, spec.head_size <= WIDE
    low = height <= LOW_TILE
    if not low and step.most <= SHORT:
        low = heads * int(step.each(group, LOW_TILE).dot(step.near)) <= FEW_KEYS * processors
    if low:
        return _low(step, processors, min(LOW_TILE, max(16, 1 << (height - 1).bit_length())))
    # Hopper's own prefill has no caps and sinks, and of heads of 64 no prompts without a cache.
    size, fresh = spec.head_size, step.fresh
    own = size in HOPPER and _plain(spec) and (size > HOPPER[0] or not (fresh or step.narrow))
    own = own and (not step.narrow or _copied(step))
    block = WIDE if own and narrow else LOW_TILE
    units = step.tiles(group, WIDE, block)[2] + ITEM
    units[::-1].sort()
    # Of heads of 64 the portable prefill has two programs on a processor.
    on_one = 1 if own or size > HOPPER[0] else 2
    places = on_one * processors
    slots, longest, area = max(1, places // heads), int(units[0]), processors * WIDE * block
    mean = total(units) / slots
    least = max(math.ceil(mean), WORTH)
    limit = max(SLACK * mean + 1, least + MERGE * on_one)
    begins = size // WIDE if own else 2  # blocks that a tile costs beside those planned
    begun = begins  # and that a stretch costs for each tile
    if size != spec.v_head_size:
        begun = 1
        area = round(area * (1 - EMPTY * (1 - step.tokens * group / (len(units) * WIDE))))
    kind, copied = "chunked" if step.most <= SHORT else "", 0
    if step.narrow and own:
        kind, copied = "prefill", heads * total(step.near) // processors
    elif step.narrow:
        kind = "chunked"
    tokens = step.tokens + (APART * step.tokens / group if own and size > HOPPER[0] else 0)
    if longest > limit or (mean + longest > limit and there_and_back(units, slots) > limit):
        shares = Shares.of(units, longest, slots)
        ends, (waits, rows) = at(shares.length + begun * shares.begun), shares.merging(WIDE, size)
        held = heads * total(step.near) * 4 * size
        read = shares.length * block if held > L2_BYTES else copied
        tokens += rows / group
        return ends.counts(area, spec.num_heads, waits / heads, tokens, read, kind)
    if own:
        ends = turned(units + begins, places, heads, _heads_at_once(step, units, places))
    elif on_one > 1 and len(units) * heads <= processors:
        ends = at(UNSHARED * (longest + begins))
    else:
        ends = ended(units + begins, places, heads)
    return ends.counts(area, spec.num_heads, 0, tokens, copied, kind)


def _heads_at_once(step: Step, units: Ints, places: int) -> int:
    """Return how many KV heads' tiles run side by side in Hopper's prefill: those that the L2 holds."""
    heads, held = step.spec.num_kv_heads, total(step.lens) * 4 * step.spec.head_size
    room = L2_HELD // held
    if room >= heads:
        return heads
    mean, some = total(units) * heads / places, max(1, room)
    while heads % some:
        some -= 1
    while some < heads and mean * (1 - some / heads) + int(units[0]) > SLACK * mean:
        some = next(more for more in range(some + 1, heads + 1) if heads % more == 0)
    return some


def _plain(spec: LayerSpec) -> bool:
    return not (spec.logit_soft_cap or spec.learned_sinks)


def _copied(step: Step) -> bool:
    """Whether TRITON_ATTN copies an 8-bit cache's keys into 16 bits for Hopper's own prefill."""
    spec, queries, keys = step.spec, step.queries, total(step.near)
    width = spec.num_kv_heads * spec.head_size
    seen = int(queries.dot(step.near)) - (int(queries.dot(queries)) - step.tokens) // 2
    gained = seen * spec.gqa_ratio - ROWS_A_COPY * keys
    return 4 * keys * width <= MOST_COPIED and gained * width >= LEAST_GAIN


def _low(step: Step, processors: int, high: int) -> Counts:
    """Count tiles of so many rows in stretches."""
    narrow, group = step.spec.head_size <= WIDE, step.spec.gqa_ratio
    each, first, blocks = step.tiles(group, high, LOW_TILE if narrow else LOW_TILE // 2)
    units = blocks + ITEM
    if len(units) > len(first):  # of a row the first tile first
        units = units[(2 * first + each - 1).repeat(each) - np.arange(len(units))]
    on_one = 3 if high == LOW and narrow else 2
    slots = max(1, on_one * processors // step.spec.num_kv_heads)
    shares = Shares.of(units, largest(units), slots)
    fixed = LOW_TILE if narrow else (LOW_TILE + high) // 2  # rows that a block costs
    waits, rows = shares.merging(high, step.spec.head_size)
    merged = 1 + waits * LOW_TILE / step.spec.head_size if waits else 0
    programs = -(-total(units) // shares.length) * step.spec.num_kv_heads
    begun, kind = shares.begun, "low" if high == LOW else "short"
    ends = at(shares.length * (1 if programs > processors else ALONE))
    if step.spec.head_size != step.spec.v_head_size:  # latents: one runs on a processor
        begun, fixed, turns, kind = 0, LOW_TILE, -(-programs // processors), "short"
        ends = at((shares.length + BEGUN * shares.begun) * turns)
        if not waits or largest(units) <= WORTH:  # uncut
            merged, rows = 0, 0
            ends = ended(units + BEGUN, processors, step.spec.num_kv_heads)
    spread = SPREAD * math.log2(min(programs, processors))
    beside = (begun + merged + spread) / step.spec.num_kv_heads
    tokens = step.tokens + rows / group
    return ends.counts(processors * LOW_TILE * fixed, step.spec.num_heads, beside, tokens, 0, kind)


class Shares(NamedTuple):
    """Units in shares of one length, as TRITON_ATTN cuts them.

    `parts`: of the longest unit. `pieces`: of cut units. `begun`: the most units of a slot. `programs`:
    that merge, by the rows of a tile.
    """

    length: int
    parts: int
    pieces: int
    begun: int
    programs: int

    @classmethod
    def of(cls, units: Ints, longest: int, slots: int) -> Shares:
        """Return the shares of so many slots."""
        every, number = total(units), len(units)
        least, programs = max(-(-every // slots), WORTH), min(number, slots)
        length, parts = alike(number, longest, slots, least)
        if number <= slots and longest <= least + UNMERGED:  # each has a program
            return cls(longest, 1, 0, 1, programs)
        if length <= SLACK * every / slots + 1:  # all are taken for as long as the longest
            pieces = number * parts * (parts > 1)
            return cls(length, parts, pieces, -(-number // slots), programs)
        first, last = on_line(units, least)
        beyond = last[last > first]
        begun = largest(np.bincount(np.concatenate((first, beyond))))
        pieces = total(last) - total(first) + len(beyond)
        parts = min(slots, (longest - 2) // least + 2)
        return cls(least, parts, pieces, begun, programs)

    def merging(self, high: int, width: int) -> tuple[int, int]:
        """Return how often a program waits for parts, and what merging reads and writes, for a KV head.

        The latter in rows of tokens. Tiles that aren't cut have programs, too. `high`: rows of a tile,
        `width`: of a head.
        """
        if self.parts == 1:
            return 0, 0
        programs = self.programs * high // (4 if self.parts <= FEW_PARTS else 1)
        rows = SHORT_PARTIAL * self.pieces * high + MERGING * programs // width
        return -(-self.parts // AT_ONCE), rows


HEADS: dict[str, Callable[[Step, int], Counts]] = {
    "cut": _cut,
    "heads": _apart,
    "whole": _whole,
    "runs": runs,
    "packed": packed,
}
"""What counts a step over heads, by the name of the way."""


class Least(NamedTuple):
    """What a way's counts are at the least, of what a step has.

    Its pairs: the larger of what its longest row has, and of so many of a step's pairs, tokens and tiles;
    of a step of one row `alone` of that. `merged`: its tokens, of a step's. `items`: its rows, of a
    step's runs. `kinds`: of the steps whose coefficients may count; empty: of this one. `single`: whose
    do in a step of one row.
    """

    pairs: float = 1.0
    queries: float = 0.0
    tiles: float = 0.0
    longest: float = 0.0
    alone: float = 1.0
    merged: float = 1.0
    items: float = 0.0
    kinds: tuple[str, ...] = ("",)
    single: str = ""


def least(spec: LayerSpec, kind: str, way: str, processors: int) -> Least:
    """Return what a way's counts are at the least in steps of a kind.

    A tile's blocks hold the keys of its last token, which sees half a tile's tokens more than the mean
    one. A tile costs some blocks beside. Of low tiles and pages less is known.
    """
    switches = SWITCHES.get(way, ())
    if kind == "dealt":  # a row has a tile, or more, of its group's rows
        group, begin = spec.gqa_ratio, begun_keys(spec)
        if way == "heads" and group < GROUPED:  # on CUDA cores
            return Least(0.0, kinds=("", "cores"))
        high, *keys = tile_of(spec.head_size) if way == "cut" else (LOW_TILE,)
        rows: float = min(high, LOW_TILE) if spec.head_size in ONE_GROUP else high
        if way == "cut":
            begin = BEGIN * min(keys)
        elif way == "heads":
            rows, low = PACKED[LOW] * LOW_TILE, group <= LOW
            begin = PAGE * (PACKED_BEGIN[LOW] if low else PACKED_BEGIN[LOW_TILE] / PACKED[LOW])
        return Least((rows - 1) / group, begin * (rows - 1) / group)
    if kind in ("decode", "short"):
        pairs = {"even": 0.25, "heads": 0.55, "whole": 0.1}.get(way, 1.0)
        return Least(pairs, kinds=("",) if way == "heads" else ("", *switches))
    size, group, heads = spec.head_size, spec.gqa_ratio, spec.num_heads
    low, narrow = group * SHORT < LOW_TILE, spec.stored_dtype != spec.dtype
    windowed = bool(spec.sliding_window or spec.chunk_size)
    if way not in ("cut", "whole"):  # each head has tiles of its own
        if way == "heads" and narrow:
            return Least(packed_keys(size))
        high, block, alone, single = WIDE, LOW_TILE, 1.0, ""
        kinds = ["", *(() if way == "heads" else switches)]
        if way == "heads":
            high = TILES[0][1] if size <= TILES[0][0] else WIDE
            block = PAGED_BLOCK
            if kind == "prefill":
                alone, single = packed_keys(size), "ragged"
        longest = 0.0 if windowed else processors * high / heads
        of_queries = high / 2 * spec.causal + block - 2
        items = 1 / spec.num_kv_heads if way == "runs" else 0.0  # a call for each run
        return Least(1.0, of_queries, 0.0, longest, alone, 1.0, items, tuple(kinds), single)
    part, high, block, kinds = 1.0, WIDE, LOW_TILE, ["windowed"] * windowed
    apart = max(1.0, 1 + APART / group - 1 / SHORT)  # whose fraction is cut
    if way == "cut":
        high, *keys = tile_of(size)
        block = BEGIN * min(keys)
        if size in ONE_GROUP and kind != "prefill":
            kinds += ["chunked"]
        if size in ONE_GROUP and low:
            high, kinds = LOW_TILE, [*kinds, "short"]
    else:
        kinds = ["prefill", "chunked"] if narrow else []
        if low:
            return Least(0.45, kinds=("", "low", "short", *kinds))
        if size <= LOW_TILE:  # two programs share a processor
            part = 0.5
        if narrow or size not in HOPPER[1:] or not _plain(spec):
            apart = 1.0
    tiles = part * (block - 2) * high / heads / (2 if high > WIDE else 1)
    of_queries = part * high / (2 * group) * spec.causal
    return Least(part, of_queries, tiles, merged=apart, kinds=("", *kinds))


SWITCHES = {
    "whole": ("low", "short", "chunked", "prefill"),
    "cut": ("short", "chunked", "windowed"),
    "heads": ("cores", "ragged"),
    "packed": ("prefill", "ragged", "chunked"),
}
"""Ways with several kernels: the kinds of steps whose coefficients count, whatever the step's."""

Dealer = Callable[[str, int], Counts]


def deals_of(spec: LayerSpec, kind: str) -> tuple[str, ...]:
    """Return the ways that compete for a kind of step."""
    if spec.latent is not None:
        return ("even", "padded", "cut", "pages")
    if kind == "dealt":
        return ("cut", "heads", "whole")
    return tuple(HEADS) if kind in ("short", "prefill", "chunked") else ()


def deal(
    spec: LayerSpec, queries: Ints, lens: Ints, seen: int, sums: tuple[int, ...] = ()
) -> Dealer:
    """Return what counts a step, by the name of a way and to how many processors.

    `seen`: keys that a token sees before its own at most. `sums`: tokens, and the most of a row.
    """
    tokens, most = sums or (total(queries), largest(queries))
    if spec.latent is not None:
        return Latents(spec.num_heads, queries, lens, tokens, most).deal
    if np.count_nonzero(queries) < len(queries):
        queries, lens = queries[queries > 0], lens[queries > 0]
    hides = seen < sys.maxsize and seen + 1 < largest(lens)
    step = Step(spec, queries, lens, seen if hides else None, tokens, most)
    return lambda name, processors: HEADS[name](step, processors)
