"""What the kernels share about tiles of keys: which comes next, and how its rows are loaded."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(i, skip_from, skip_by, SINK_TOKENS: tl.constexpr):
    """The `i`-th tile: with sink tokens those from `skip_from` on lie `skip_by` further."""
    tile = i
    if SINK_TOKENS > 0:
        tile = tl.where(i >= skip_from, i + skip_by, i)
    return tile


@triton.jit
def blocks_of(BT, key_pos, seq_len, BLOCK_SIZE: tl.constexpr):
    """The blocks that hold the keys at these positions; past the length block 0."""
    return tl.load(BT + key_pos // BLOCK_SIZE, mask=key_pos < seq_len, other=0)


@triton.jit
def blocks_in_table(BT, key_pos, bt_end, BLOCK_SIZE: tl.constexpr):
    """What the table has at these positions, whatever the length; past its last column that one."""
    return tl.load(BT + tl.minimum(key_pos // BLOCK_SIZE, bt_end))


@triton.jit
def load_rows(pointers, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load whole rows of `SIZE` elements; what the tile's `BLOCK` columns have beyond is zero."""
    if SIZE == BLOCK:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    return rows


@triton.jit
def load_held_rows(pointers, held, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows that are `held`; others are zero: their slots may hold NaN."""
    mask = held[:, None]
    if SIZE != BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)
