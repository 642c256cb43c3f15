"""What does the copying warp of `hopper.prefill` do? Tiles of keys and values come by TMA, box by box."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from polyattn_triton.hopper.items import advance, begin, bounds
from polyattn_triton.hopper.names import async_load_box


@gluon.jit
def blocks_of_boxes(
    BT, key, seq_len, PAGED: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    LANES: gl.constexpr, oldest=None,
):  # fmt: skip
    """Which blocks hold the boxes of a tile's keys, one a lane; -1 past the length.

    For a block before the `oldest` key that a row sees, that key's block stands in: another sequence may
    have it by now, and no weight hides NaN.
    """
    at = key + gl.arange(0, 32, layout=LANES) * BOX
    inside = at < seq_len
    if PAGED:
        read = at
        if oldest is not None:
            read = gl.maximum(at, oldest)
        blocks = gl.load(BT + read // BLOCK_SIZE, mask=inside & (at >= 0), other=-1)
    else:
        blocks = gl.where(inside, 0, -1)
    return blocks


@gluon.jit
def copy_tile(
    DESCRIPTOR, blocks, key, first_row, column, stride_b, to, full, empty, free,
    D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr,
    BOX: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Copy a tile's boxes once its stage is free; past the length, where no row is, come zeros."""
    lane = gl.arange(0, 32, layout=LANES)
    at = key + lane * BOX
    if PAGED:
        at = blocks * stride_b + at % BLOCK_SIZE
    rows = gl.where(blocks >= 0, first_row + at, DESCRIPTOR.shape[0])
    mbarrier.wait(empty, free)
    mbarrier.expect(full, BLOCK_N * D * 2)
    for box in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lane == box, rows, 0), 0)
        async_load_box(DESCRIPTOR, [row, column], full, to.slice(box * BOX, BOX))


@gluon.jit
def produce(
    K, V, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    k_b, k_row, k_col, v_b, v_row, v_col, bt_s, tiles, at_once,
    G: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the items' keys and values, the last first, into stages as these become free.

    A tile's values come after the next one's keys, as they are used.
    """
    BOX: gl.constexpr = K.block_shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at, stop, low, high, tile, seq, start, head = begin(WORK, tiles, at_once, KV_HEADS, SPLIT)
    n = 0
    while at < stop:
        _token0, query_len, seq_len, first, count, _full_low, _full, _limit = bounds(
            SEQ_LENS, STARTS, WORK, at, stop, low, high, seq, start,
            G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SPLIT,
        )  # fmt: skip
        oldest = None
        if WINDOW > 0:
            oldest = gl.maximum(seq_len - query_len + start // G - WINDOW + 1, 0)
        k_first = head * k_row
        v_first = head * v_row
        k_at = head * k_col
        v_at = head * v_col
        if not PAGED:
            key_start = gl.load(KEY_STARTS + seq)
            k_first += key_start
            v_first += key_start
        TABLE = BT + seq.to(gl.int64) * bt_s
        key = (first + count - 1) * BLOCK_N
        blocks = blocks_of_boxes(TABLE, key, seq_len, PAGED, BLOCK_SIZE, BOX, LANES, oldest)
        # Not `blocks`: Triton 3.6 carries no name round a loop that is given what it began as.
        before = gl.full([32], -1, gl.int32, LANES)
        at, low, high, tile, seq, start, head = advance(
            WORK, tiles, at_once, low, high, tile, head, SPLIT
        )
        for i in range(count):
            ahead = blocks_of_boxes(
                TABLE, key - BLOCK_N, seq_len, PAGED, BLOCK_SIZE, BOX, LANES, oldest
            )
            stage = n % STAGES
            free = (n // STAGES + 1) & 1  # of a stage never used: at once
            copy_tile(
                K, blocks, key, k_first, k_at, k_b, k_smem.index(stage), k_full.index(stage),
                k_empty.index(stage), free, D, BLOCK_N, BLOCK_SIZE, PAGED, BOX, LANES,
            )  # fmt: skip
            if i > 0:
                stage = (n - 1) % STAGES
                free = ((n - 1) // STAGES + 1) & 1
                copy_tile(
                    V, before, key + BLOCK_N, v_first, v_at, v_b, v_smem.index(stage),
                    v_full.index(stage), v_empty.index(stage), free,
                    D, BLOCK_N, BLOCK_SIZE, PAGED, BOX, LANES,
                )  # fmt: skip
            before = blocks
            blocks = ahead
            key -= BLOCK_N
            n += 1
        stage = (n - 1) % STAGES
        free = ((n - 1) // STAGES + 1) & 1
        copy_tile(
            V, before, key + BLOCK_N, v_first, v_at, v_b, v_smem.index(stage),
            v_full.index(stage), v_empty.index(stage), free,
            D, BLOCK_N, BLOCK_SIZE, PAGED, BOX, LANES,
        )  # fmt: skip
