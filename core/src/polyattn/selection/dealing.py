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


def deal(
    name: str, spec: LayerSpec, queries: Ints, lens: Ints, seen: int, processors: int
) -> Counts:
    """Deal a step's keys out, in the way of this name. `seen`: keys that a token sees at most."""
    if name == "padded":
        queries = np.full_like(queries, queries.max())
    tokens = int(queries.sum())
    group, heads = (1, spec.num_heads) if name == "heads" else (spec.gqa_ratio, spec.num_kv_heads)
    high = NARROW if spec.head_size <= LATENTS else WIDE
    if spec.latent is not None:  # absorbed: every head has the same keys
        group, heads, high = spec.num_heads, 1, LATENTS
    block = min(high, WIDE)
    if name == "pages" and tokens * group > high * len(queries):
        high, processors = 2 * high, processors // 2  # two processors share a tile
    tiles = -(-queries * group // high)
    keys = lens - (queries - 1) // 2 if spec.causal else lens  # of a row's tiles on the average
    if seen < sys.maxsize:
        keys = np.minimum(keys, seen + np.minimum(queries, high // group))
    blocks = -(-keys // block)
    longest, most = int(blocks.max()), int(tiles.max())
    count, total, lanes = int(tiles.sum()) * heads, int(tiles @ blocks) * heads, most * heads
    if name in ("even", "padded"):
        # Tiles of rows that have as many each lie side by side.
        alike = lanes <= processors and count == lanes * len(queries)
        mean = (total + BEGIN * count) / (processors - processors % lanes * alike)
        share = max(int(-(-mean // 1)), LEAST)
        whole = longest + BEGIN <= max(SLACK * mean + 1, share)  # tiles end about together
        span: float = max(longest + BEGIN, share) if whole else share
        parts = 1 if whole else -(-(longest + BEGIN) // share)
    else:
        if name == "pages":
            mean = -(-int(tiles @ keys) // processors)
            share = 4 * -(-mean // 256) if mean > LATENTS else 1 + (mean > 16) + (mean > 32)
        elif name == "heads" or lanes >= FULL * processors or longest <= UNCUT:
            share = longest
        else:
            share = int(-(-total * SLACK // processors))
        parts = -(-longest // share)
        if parts > 1:
            count = int(tiles @ -(-blocks // share)) * heads
        span = largest = min(share, longest) + BEGIN
        if count > processors:  # on the average half of one is waited for
            span = max(largest, (total + BEGIN * count) / processors + largest / 2)
    pairs = int(span * processors * high * block) // spec.num_heads
    return Counts(int(parts > 1), tokens, parts if parts > 1 else 0, pairs)
