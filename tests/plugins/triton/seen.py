"""Runs the kernels' own ranges of keys and tiles in Triton's interpreter, beside `key_ranges`.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Compares every so many-th
mask, and prints how many blocks of queries that were.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from polyattn import LayerSpec, RopeSpec
from polyattn.kernel import key_ranges
from polyattn_triton.kernels.tiles import keys_seen, tiles_seen
from polyattn_triton.schedule import key_tiles, most_key_tiles

LONGEST = 1 << 29
ROPE = RopeSpec(rotary_size=64, positions="cache")
LENGTHS = [0, 1, 5, 13, 47]
QUERIES = [1, 3, 9, 20]
MASKS = [
    {"causal": causal, "sliding_window": window, "sink_tokens": kept, "chunk_size": chunk}
    for causal, window, kept, chunk in product(
        (True, False), (None, 1, 2, 5, 40, LONGEST), (0, 1, 4, 9, 64, LONGEST),
        (None, 1, 3, 5, 16, LONGEST),
    )
    if window or not kept
]  # fmt: skip


@triton.jit
def seen_kernel(
    FIRST, LAST, LENGTH, OUT, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store what each block of queries sees: four ends of keys, four numbers of tiles."""
    at = tl.arange(0, WIDTH)
    low, kept, near, high = keys_seen(
        tl.load(FIRST + at), tl.load(LAST + at), tl.load(LENGTH + at), CAUSAL, WINDOW, CHUNK,
        SINK_TOKENS,
    )  # fmt: skip
    first, last, skip_from, skip_by = tiles_seen(low, kept, near, high, BLOCK_N, SINK_TOKENS, APART)
    tl.store(OUT + at, low)
    tl.store(OUT + WIDTH + at, kept)
    tl.store(OUT + 2 * WIDTH + at, near)
    tl.store(OUT + 3 * WIDTH + at, high)
    tl.store(OUT + 4 * WIDTH + at, first)
    tl.store(OUT + 5 * WIDTH + at, last)
    tl.store(OUT + 6 * WIDTH + at, skip_from + at * 0)
    tl.store(OUT + 7 * WIDTH + at, skip_by + at * 0)


def blocks() -> list[list[int]]:
    """Return first position, last position and length of blocks of neighbouring queries."""
    found = [
        (length - queries + first, length - queries + last, length)
        for length, queries in product(LENGTHS, QUERIES)
        for first, last in product(range(queries), range(queries))
        if first <= last
    ]
    found += [(LONGEST - 9, LONGEST - 1, LONGEST), (1 - LONGEST, -1, 0), (7 - LONGEST, 6, 7)]
    return [list(column) for column in zip(*found, strict=True)]


def check(mask: dict[str, int], block_n: int, apart: bool) -> int:
    """Compare one mask's blocks; returns how many there are."""
    spec = LayerSpec(num_heads=1, head_size=64, **mask)
    first, last, length = (np.array(column) for column in blocks())
    count, width = len(first), triton.next_power_of_2(len(first))
    given = [
        torch.tensor(np.pad(column, (0, width - count)), dtype=torch.int32)
        for column in (first, last, length)
    ]
    out = torch.empty(8, width, dtype=torch.int32)
    seen_kernel[(1,)](
        *given, out, width, block_n, spec.causal, spec.sliding_window or 0, spec.chunk_size or 0,
        spec.sink_tokens, apart,
    )  # fmt: skip
    found = out[:, :count].numpy()
    wanted = key_ranges(spec, first, last, length, np.minimum, np.maximum)
    for name, mine, theirs in zip(wanted._fields, found, wanted, strict=False):
        assert np.array_equal(mine, theirs), (name, mask)
    # The host counts rotated keys' tiles apart, which is what says APART.
    counted = spec if not apart else spec.replace(rope=ROPE)
    tiles = key_tiles(counted, first, last, length, block_n)
    assert np.array_equal(found[5] - found[4], tiles), mask
    assert (tiles <= most_key_tiles(counted, first, last, length, block_n)).all(), mask
    for at in np.flatnonzero(length <= max(LENGTHS)):
        begin, end, gap, by = (int(column[at]) for column in found[4:])
        visited = [i if i < gap or not spec.sink_tokens else i + by for i in range(begin, end)]
        kept_start, kept_stop, near_start, near_stop = (int(ends[at]) for ends in wanted)
        of_kept = {key // block_n for key in range(kept_start, kept_stop)}
        of_near = {key // block_n for key in range(near_start, near_stop)}
        if apart:
            assert visited == sorted(of_kept) + sorted(of_near), (mask, at)
        else:
            assert visited == sorted(of_kept | of_near), (mask, at)
    return count


if __name__ == "__main__":
    print(
        sum(
            check(mask, block_n, apart)
            for mask in MASKS[:: int(sys.argv[1])]
            for block_n, apart in ((16, False), (4, False), (4, True))
            if not apart or mask["sink_tokens"]
        )
    )
