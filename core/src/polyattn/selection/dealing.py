"""How long is a chip's fullest processor busy? As libraries deal tiles of queries and keys out.

A program holds a tile of query rows, (token, head), and goes through its keys block by block. A step
takes the time of the fullest processor, and of merging cut tiles. With few tiles, as with latents and
short chunks, that decides. Each library cuts in its own way:

- `even`: as TRITON_MLA does, in shares of one length, cut where a share ends.
- `padded`: as FlashMLA does, the same, as if every row had as many query tokens as the longest.
- `cut`: as FlashAttention-3 does, in pieces of a little more than the mean.
- `pages`: as FlashInfer does latents, in pieces of a multiple of 256 keys.
- `heads`: as FlashInfer does on Hopper, each query head's tokens in tiles of their own, uncut.
- `whole`: as TRITON_ATTN does prompts, uncut where that is the shorter, else in shares of one length.

But for shares, each piece goes to the processor that is free first.
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

LATENTS, WIDE, NARROW = 64, 128, 192
"""Rows of a tile: of latents, of heads, of heads of up to 64. A block has as many keys, 128 at most."""
BEGIN, PADDED_BEGIN = 2, 5
"""Blocks that a tile, or a piece of one, costs beside its own; the same of FlashMLA's."""
SLACK, FULL, UNCUT = 1.1, 0.8, 4
"""FlashAttention-3 cuts keys into shares of 1.1 of the mean, if the tiles of the longest query leave a
fifth of the processors free and a row has more than four blocks. So much may even shares differ, too."""
PAGES = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Up to how many keys on the average FlashInfer's pieces have so many; beyond, multiples of 256."""
FEW_HEADS, LOW = 32, 16
"""Heads up to which TRITON_MLA runs two programs on a processor, of tiles of 16 or 32 rows."""
ROUNDS = 24
"""Pieces a processor from which on the processors are taken to end together."""
ITEM, WORTH, MERGE = 1, 3, 6
"""Blocks that a tile of TRITON_ATTN costs beside its own, that a program has at the least, and that it
costs at the most to merge what was cut."""
WAYS_OF_HEADS = {
    "short": ("cut", "heads"),
    "prefill": ("cut", "heads", "whole"),
    "chunked": ("cut", "heads", "whole"),
}


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key.

    `rows`: 1 if anything is merged. `longest`: parts of the longest row, if it is; over latents some of
    all pieces beside. `queries`: where a program's own rows count, each processor has a tile more.
    `pairs`: as many as if all processors had what the fullest one has.
    """

    rows: int
    queries: int
    longest: int
    pairs: int


def deals_of(spec: LayerSpec, kind: str) -> tuple[str, ...]:
    """Return the ways that compete for a kind of step."""
    if spec.latent is not None:
        return ("even", "padded", "cut", "pages")
    return WAYS_OF_HEADS.get(kind, ())


class Tiles(NamedTuple):
    """A step's tiles of rows of (token, head), all of one size.

    `each`: a row's tiles for one KV head, `keys` and `blocks`: what these go through on the average.
    `most` and `longest`: the most tiles and blocks of a row. `number`, `total`: tiles and blocks in all.
    """

    heads: int
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
    rows, tokens, longest = len(queries), int(queries.sum()), int(queries.max())
    by_form: dict[tuple[int, int, bool], Tiles] = {}
    counts = {}
    for name, processors in ways.items():
        if name == "whole":
            counts[name] = _whole(spec, queries, lens, seen, processors)
            continue
        group, high = spec.gqa_ratio, NARROW if spec.head_size <= LATENTS else WIDE
        if spec.latent is not None:  # absorbed: every head has the same keys
            group, high = spec.num_heads, LATENTS
        elif name == "heads":
            group = 1
        block = min(high, WIDE)
        if name == "pages" and tokens * group > high * rows:
            high, processors = 2 * high, processors // 2  # two processors share a tile
        padded = name == "padded" and tokens < longest * rows
        if (group, high, padded) not in by_form:
            q = np.full_like(queries, longest) if padded else queries
            by_form[group, high, padded] = _tiles(spec, q, lens, seen, group, high, block)
        tiles = by_form[group, high, padded]
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
            span, parts, pieces = _pieces(name, tiles, processors, spec.latent is not None)
            merged = parts + pieces // 4 if parts > 1 else 0
        if name in ("even", "pages"):
            of_all += processors * height // spec.num_heads
        pairs = int(span * processors * high * block) // spec.num_heads
        counts[name] = Counts(int(merged > 0), of_all, merged, pairs)
    return counts


def _tiles(
    spec: LayerSpec, queries: Ints, lens: Ints, seen: int, group: int, high: int, block: int
) -> Tiles:
    each = (queries * group + high - 1) // high
    keys = lens if spec.latent is not None or not spec.causal else lens - (queries - 1 >> 1)
    if seen < sys.maxsize:
        keys = np.minimum(keys, seen + np.minimum(queries, high // group))
    blocks = (keys + block - 1) // block
    heads = 1 if spec.latent is not None else spec.num_heads // group
    most, longest = int(each.max()), int(blocks.max())
    count, total = int(each.sum()) * heads, int(each @ blocks) * heads
    return Tiles(heads, each, keys, blocks, most, longest, count, total)


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
    alike, parts, length = -(-number // programs) * longest, 1, longest
    if number <= programs:
        alike = max(-(-longest // (programs // number)), share)
        parts = -(-longest // alike)
        length = parts * alike
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
        share = min(end, share + -(-share // 16))
    ends = units.cumsum()
    cuts = (ends - 1) // first - (ends - units) // first
    pieces = int(cuts.sum() + np.count_nonzero(cuts))
    return first / (1 + few), (longest - 3 + first) // first + 1, pieces * lanes


def _pieces(name: str, tiles: Tiles, processors: int, latents: bool) -> tuple[float, int, int]:
    """Return the blocks of the fullest processor; the longest row's parts; pieces of cut tiles.

    Pieces count over latents alone. Where FlashAttention-3 cuts some tiles, it merges all.
    """
    heads, each, keys, blocks, most, longest, _, total = tiles
    lanes = most * heads
    merging = name == "cut" and lanes < FULL * processors and longest > UNCUT
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
    of, most_parts = each * heads, int(parts.max())
    pieces, merged = int(of @ parts), 0
    if latents and merging:
        merged, most_parts = pieces, max(2, most_parts)
    elif latents and most_parts > 1:
        merged = int(of @ (parts * (parts > 1)))
    largest = int(share.max()) + BEGIN
    if pieces <= processors:
        return largest, most_parts, merged
    if pieces > ROUNDS * processors:
        span = (total + BEGIN * pieces) / processors + largest / 2
        return max(largest, span), most_parts, merged
    tile = np.repeat(np.arange(len(of)), of)
    of_tile = parts[tile]
    sizes = np.repeat(share[tile], of_tile)
    sizes[of_tile.cumsum() - 1] = last[tile]
    return _end(sizes + BEGIN, processors), most_parts, merged


def _whole(spec: LayerSpec, queries: Ints, lens: Ints, seen: int, processors: int) -> Counts:
    """Count what TRITON_ATTN's tiles are, each token of which sees the keys up to its own."""
    group, heads = spec.gqa_ratio, spec.num_kv_heads
    block = WIDE if spec.head_size <= WIDE else LATENTS
    each = (queries * group + WIDE - 1) // WIDE
    row = np.repeat(np.arange(len(each)), each)
    first = (np.arange(len(row)) - np.repeat(each.cumsum() - each, each)) * WIDE
    last = (np.minimum(first + WIDE, queries[row] * group) - 1) // group
    before = (lens - queries)[row]
    high = before + last + 1 if spec.causal else lens[row]
    low = (
        np.maximum(before + first // group - seen, 0) // block * block if seen < sys.maxsize else 0
    )
    units = np.sort(-(-(high - low) // block) + ITEM)[::-1]
    slots = max(1, processors // heads)
    mean, longest = int(units.sum()) / slots, int(units[0])
    share = max(-(-int(units.sum()) // slots), WORTH)
    limit = max(SLACK * mean + 1, share + min(share, MERGE))
    rounds = -(-len(units) // slots)
    dealt = np.zeros((rounds, slots), np.int64)
    dealt.ravel()[: len(units)] = units
    dealt[1::2] = dealt[1::2, ::-1]  # there and back
    cut = longest > limit or int(dealt.sum(0).max()) > limit
    span: float = share
    if not cut:
        every = np.repeat(units, heads)
        few = len(every) <= ROUNDS * processors
        span = _end(every, processors) if few else int(every.sum()) / processors + longest / 2
    pairs = int(span * processors * WIDE * block) // spec.num_heads
    return Counts(0, int(queries.sum()), int(cut), pairs)


def _end(costs: Ints, processors: int) -> int:
    """Return when the last piece ends, if each goes to the processor that is free first."""
    ends: list[int] = costs[:processors].tolist()
    heapq.heapify(ends)
    for cost in costs[processors:].tolist():
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)
