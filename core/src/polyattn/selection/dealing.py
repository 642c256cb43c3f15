"""How long is a chip's fullest processor busy? As libraries deal tiles of queries and keys out.

A program holds a tile of query rows, (token, head), and goes through its keys block by block. A step
takes the time of the fullest processor, and of merging cut tiles. With few tiles, as with latents and
short chunks, that decides. Each library cuts in its own way:

- `even`: shares of one length, cut where a share ends.
- `padded`: the same, as if every row had as many query tokens as the longest.
- `cut`: as FlashAttention-3 does, in pieces of a little more than the mean.
- `pages`: as FlashInfer does latents, in pieces of a multiple of 256 keys.
- `heads`: as FlashInfer does on Hopper, each query head's tokens in tiles of their own, uncut.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyattn.spec.layer import LayerSpec

Ints = npt.NDArray[np.int64]

LATENTS, WIDE, NARROW = 64, 128, 192
"""Rows of a tile: of latents, of heads, of heads of up to 64. A block has as many keys, 128 at most."""
BEGIN = 2
"""Blocks that a tile, or a piece of one, costs beside its own."""
LEAST = 4
"""Blocks of a share at least, where shares are even."""
SLACK, FULL, UNCUT = 1.1, 0.8, 4
"""FlashAttention-3 cuts keys into shares of 1.1 of the mean, if the tiles of the longest query leave a
fifth of the processors free and a row has more than four blocks. So much may even shares differ, too."""


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key.

    `rows`: 1 if anything is merged. `longest`: parts of the longest row, if it is. `pairs`: as many as if
    all processors had what the fullest one has.
    """

    rows: int
    queries: int
    longest: int
    pairs: int


def deals_of(spec: LayerSpec, kind: str) -> tuple[str, ...]:
    """Return the ways that compete for a kind of step."""
    if spec.latent is not None:
        return ("even", "padded", "cut", "pages")
    return ("cut", "heads") if kind == "chunked" else ()


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
    known: dict[tuple[int, int, bool], Tiles] = {}
    counts = {}
    for name, processors in ways.items():
        group, high = spec.gqa_ratio, NARROW if spec.head_size <= LATENTS else WIDE
        if spec.latent is not None:  # absorbed: every head has the same keys
            group, high = spec.num_heads, LATENTS
        elif name == "heads":
            group = 1
        block = min(high, WIDE)
        if name == "pages" and tokens * group > high * rows:
            high, processors = 2 * high, processors // 2  # two processors share a tile
        padded = name == "padded" and tokens < longest * rows
        if (group, high, padded) not in known:
            q = np.full_like(queries, longest) if padded else queries
            known[group, high, padded] = _tiles(spec, q, lens, seen, group, high, block)
        tiles = known[group, high, padded]
        span, parts = _busiest(name, tiles, rows, processors)
        pairs = int(span * processors * high * block) // spec.num_heads
        of_all = longest * rows if padded else tokens
        counts[name] = Counts(int(parts > 1), of_all, parts if parts > 1 else 0, pairs)
    return counts


def _tiles(
    spec: LayerSpec, queries: Ints, lens: Ints, seen: int, group: int, high: int, block: int
) -> Tiles:
    each = (queries * group + high - 1) // high
    keys = lens - (queries - 1 >> 1) if spec.causal else lens
    if seen < sys.maxsize:
        keys = np.minimum(keys, seen + np.minimum(queries, high // group))
    blocks = (keys + block - 1) // block
    heads = 1 if spec.latent is not None else spec.num_heads // group
    most, longest = int(each.max()), int(blocks.max())
    count, total = int(each.sum()) * heads, int(each @ blocks) * heads
    return Tiles(heads, each, keys, blocks, most, longest, count, total)


def _busiest(name: str, tiles: Tiles, rows: int, processors: int) -> tuple[float, int]:
    """Return the blocks of the fullest processor, and the parts that the longest row is cut into."""
    heads, each, keys, blocks, most, longest, count, total = tiles
    lanes = most * heads
    if name in ("even", "padded"):
        # Tiles of rows that have as many each lie side by side.
        alike = lanes <= processors and count == lanes * rows
        mean = (total + BEGIN * count) / (processors - processors % lanes * alike)
        share = max(int(-(-mean // 1)), LEAST)
        if longest + BEGIN <= max(SLACK * mean + 1, share):  # tiles end about together
            return max(longest + BEGIN, share), 1
        return share, -(-(longest + BEGIN) // share)
    if name == "pages":
        mean = -(-int(each @ keys) // processors)
        share = 4 * -(-mean // 256) if mean > LATENTS else 1 + (mean > 16) + (mean > 32)
    elif name == "heads" or lanes >= FULL * processors or longest <= UNCUT:
        share = longest
    else:
        share = int(-(-total * SLACK // processors))
    parts = -(-longest // share)
    if parts > 1:
        count = int(each @ ((blocks + share - 1) // share)) * heads
    largest = min(share, longest) + BEGIN
    if count <= processors:
        return largest, parts
    # On the average half of one is waited for.
    return max(largest, (total + BEGIN * count) / processors + largest / 2), parts
