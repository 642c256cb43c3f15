"""Which key tiles does a tile of query rows see, by a layer's masks? Listed once a step, on the device.

As FlexAttention's block mask (Dong et al., 2024): a key tile is seen whole, in part, or not at all. A
list is int32: how many are seen whole, how many in part, where these begin; then the numbers of the
former, in order, and at the end those of the latter, in reverse. Between them are zeros, so that
reading ahead finds a tile that exists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.softmax import logits
from polyattn_triton.kernels.tiles import keys_seen

HEADER = tl.constexpr(3)
AROUND = 5
"""What a list has beside its numbers: the header, and two entries to read ahead."""


@triton.jit
def list_of(INPUTS, tile, kv_head):
    """Where a tile's numbers lie, of keys seen whole and in part; how many are whole, and all."""
    at = tile.to(tl.int64) * tl.load(INPUTS + 2) + kv_head * tl.load(INPUTS + 3)
    LIST = tl.load(INPUTS + 1).to(tl.pointer_type(tl.int32)) + at
    whole = tl.load(LIST)
    return LIST + HEADER, LIST + tl.load(LIST + 2), whole, whole + tl.load(LIST + 1)


@triton.jit(
    do_not_specialize=["width", "count", "skip"],
    do_not_specialize_on_alignment=["WORK", "SEQ_LENS", "STARTS"],
)
def list_kernel(
    LISTS, INPUTS, WORK, SEQ_LENS, STARTS, width, count, skip,
    G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    ROWS_OF: tl.constexpr, SHOW: tl.constexpr,
):  # fmt: skip
    """List the key tiles of one tile of rows, (tiles, 1 or KV heads) programs.

    `WORK`: behind `skip` others the sequences of `count` tiles, then their first rows. `width`: numbers
    that a list holds. `BLOCK_M`: the tile's rows, or 1 where these are one token's heads, which see the
    same. `WIDE`: key tiles that are looked at in one go.
    """
    tile = tl.program_id(0)
    WORK += skip
    kv_head = tl.program_id(1)
    seq = tl.load(WORK + tile)
    start = tl.load(WORK + count + tile)
    query_len = tl.load(STARTS + seq + 1) - tl.load(STARTS + seq)
    seq_len = tl.load(SEQ_LENS + seq)
    rows = start + tl.arange(0, BLOCK_M)
    row_ok = rows < query_len * G
    context = seq_len - query_len
    row_pos = context + rows // G
    last_pos = context + (tl.minimum(start + BLOCK_M, query_len * G) - 1) // G
    low, _kept, near, high = keys_seen(
        context + start // G, last_pos, seq_len, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    first = (low if SINK_TOKENS > 0 else near) // BLOCK_N
    changed = ROWS_OF(INPUTS, seq, kv_head * G + rows % G, row_pos)
    LIST = LISTS + (tile.to(tl.int64) * tl.num_programs(1) + kv_head) * (width + 5)
    none = tl.zeros([BLOCK_M], tl.float32)
    whole = 0
    partly = 0
    for i in range(first, tl.cdiv(high, BLOCK_N), WIDE):
        key_pos = i * BLOCK_N + tl.arange(0, WIDE * BLOCK_N)
        s = logits(
            tl.zeros([BLOCK_M, WIDE * BLOCK_N], tl.float32), row_pos, key_pos, seq_len, none, 1.0, 1.0,
            changed,
            True, CAUSAL, WINDOW, CHUNK, SINK_TOKENS, False, False, SHOW, 1,
        )  # fmt: skip
        seen = (s == 0.0).to(tl.int32)
        most = tl.max(tl.where(row_ok[:, None], seen, 0), 0)  # padded rows have no say
        least = tl.min(tl.where(row_ok[:, None], seen, 1), 0)
        some = tl.max(tl.reshape(most, [WIDE, BLOCK_N]), 1)
        every = tl.min(tl.reshape(least, [WIDE, BLOCK_N]), 1)
        border = some - every
        at = tl.where(
            every > 0, whole + tl.cumsum(every, 0) - 1, width - partly - tl.cumsum(border, 0)
        )
        tl.store(LIST + HEADER + at, i + tl.arange(0, WIDE), mask=some > 0)
        whole += tl.sum(every, 0)
        partly += tl.sum(border, 0)
    tl.store(LIST, whole)
    tl.store(LIST + 1, partly)
    tl.store(LIST + 2, HEADER + width - partly)
