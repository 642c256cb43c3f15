"""What the kernels share about tiles: which rows and keys are whose, and how rows are loaded."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_elements(strides, UNIT: tl.constexpr):
    """Strides in elements, of those that count in units of `UNIT` elements (`launch.in_units`)."""
    elements = ()
    for i in tl.static_range(len(strides)):
        elements = elements + (strides[i] * UNIT,)  # noqa: RUF005
    return elements


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
def placed(BASE, row, place, APART: tl.constexpr):
    """A cache, and rows of it that begin `place` after their blocks, which begin at `row`.

    `APART`: a pointer for each row, which is made once where places are alike in each tile.
    """
    if APART:
        BASE += place[:, None]
    else:
        row += place
    return BASE, row


@triton.jit
def load_rows(pointers, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load whole rows of `SIZE` elements. The tile's further columns up to `BLOCK` are zero."""
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


@triton.jit
def load_tile(ROWS, columns, held, SIZE: tl.constexpr):
    """Load rows that begin at `ROWS`; those that aren't `held`, and columns beyond `SIZE`, are zero."""
    at = ROWS[:, None] + columns[None, :]
    return tl.load(at, mask=held[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def store_tile(ROWS, x, columns, held, SIZE: tl.constexpr):
    """Store rows that begin at `ROWS` in their type: those `held`, and columns below `SIZE`."""
    at = ROWS[:, None] + columns[None, :]
    x = x.to(ROWS.dtype.element_ty)
    tl.store(at, x, mask=held[:, None] & (columns < SIZE)[None, :])


@triton.jit
def _four_bits(codes):
    """What e2m1's codes stand for, over 2^14, float16: its exponent and mantissa in float16's places."""
    codes = codes.to(tl.uint16)
    return (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.float16, bitcast=True)


@triton.jit
def load_four_bit_rows(ROWS, held, N: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of e2m1 numbers and their block scales (`formats.nvfp4`) as float16, exact.

    `ROWS`: where each row begins. Rows that aren't `held` and columns beyond `SIZE` are zero. A scale's
    e4m3 is float16's exponent and mantissa over 2^8, which no type of the device has to know.
    """
    pair = tl.arange(0, BLOCK // 2)
    block = tl.arange(0, BLOCK // 16)
    codes = tl.load(
        ROWS[:, None] + pair[None, :], mask=held[:, None] & (pair < SIZE // 2)[None, :], other=0
    )
    units = tl.load(
        ROWS[:, None] + (SIZE // 2 + block)[None, :],
        mask=held[:, None] & (block < SIZE // 16)[None, :],
        other=0,
    ).to(tl.uint16)
    scale = (((units & 127) << 7) | ((units & 128) << 8)).to(tl.float16, bitcast=True) * 256.0
    scale = tl.where((units & 127) == 127, float("nan"), scale)
    each = tl.broadcast_to(scale[:, :, None], (N, BLOCK // 16, 8)).reshape((N, BLOCK // 2))
    low = _four_bits(codes & 15) * 16384.0 * each
    high = _four_bits(codes >> 4) * 16384.0 * each
    return tl.join(low, high).reshape((N, BLOCK))


@triton.jit
def load_cached_rows(
    BASE, row, held, columns, N: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """Load the `held` rows of a cache; `READ`: how a format's rows of bytes are (`functions.rows`).

    `BASE`: the cache, or, without `READ`, a pointer for each row (`placed`).
    """
    if READ is not None:
        rows = READ(BASE, row, held, N, SIZE, BLOCK)
    else:
        rows = load_held_rows(BASE + row[:, None] + columns[None, :], held, columns, SIZE, BLOCK)
    return rows


@triton.jit
def row_places(start, rows, kv_head, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The query tokens (within their sequence) and the heads of a tile's rows, from `start` on.

    Where a tile holds whole tokens, what a row adds is known before `start` is: fewer registers
    live through the loop over keys, whose loads ptxas then keeps out of the softmax's way.
    """
    if BLOCK_M % G == 0:
        token = start // G + rows // G
        head = kv_head * G + rows % G
    else:
        token = (start + rows) // G
        head = kv_head * G + (start + rows) % G
    return token, head


@triton.jit
def floored(x, BY: tl.constexpr):
    """`x // BY`, rounded down below zero, too, where Triton's division rounds up."""
    return tl.where(x < 0, x - (BY - 1), x) // BY


@triton.jit
def keys_seen(
    first_pos, last_pos, seq_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
):  # fmt: skip
    """The keys that queries at these positions see: [low, kept) and [near, high).

    As `polyattn.kernel.key_ranges` on the host, range by range.
    """
    low = seq_len * 0
    high = seq_len
    if CHUNK > 0:
        low = tl.minimum(tl.maximum(low, floored(first_pos, CHUNK) * CHUNK), seq_len)
        high = tl.minimum(high, (floored(last_pos, CHUNK) + 1) * CHUNK)
    if CAUSAL:
        high = tl.minimum(high, last_pos + 1)
    high = tl.maximum(high, low)
    kept = low
    near = low
    if WINDOW > 0:
        stop = high
        near = tl.minimum(tl.maximum(low, first_pos - WINDOW + 1), stop)
        if not CAUSAL:
            high = tl.maximum(tl.minimum(stop, last_pos + WINDOW), near)
        if SINK_TOKENS > 0:
            kept = tl.maximum(tl.minimum(stop, SINK_TOKENS), low)
            near = tl.maximum(near, kept)
            high = tl.maximum(high, near)
    return low, kept, near, high


@triton.jit
def tiles_seen(
    low, kept, near, high, BLOCK_N: tl.constexpr, SINK_TOKENS: tl.constexpr, APART: tl.constexpr
):
    """The key tiles of `keys_seen`'s ranges: `first` to `last`, as `tile_at` reads them.

    `APART`: a tile of both ranges counts twice. `schedule.key_tiles` counts as many.
    """
    first = near // BLOCK_N
    last = tl.where(high > near, tl.cdiv(high, BLOCK_N), first)
    skip_from = 0
    skip_by = 0
    if SINK_TOKENS > 0:
        near_tile = first
        first = low // BLOCK_N
        skip_from = tl.where(kept > low, tl.cdiv(kept, BLOCK_N), first)
        if not APART:
            near_tile = tl.maximum(near_tile, skip_from)
        skip_by = near_tile - skip_from
        last = tl.maximum(last, near_tile) - skip_by
    return first, last, skip_from, skip_by


@triton.jit
def my_stretch(WORK, TILED: tl.constexpr):
    """A program's stretch of the line of tiles, and the tile that it begins in (`schedule`).

    Returns where it begins and ends, the tile, where that begins and ends, its sequence and row.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = tl.load(WORK)
    COLUMN = WORK + 4 + program
    tile = tl.load(COLUMN)
    low = tl.load(COLUMN + programs)
    high = tl.load(COLUMN + 2 * programs)
    seq = tile
    row = 0
    if TILED:
        seq = tl.load(COLUMN + 3 * programs)
        row = tl.load(COLUMN + 4 * programs)
    at = program * share
    stop = tl.minimum(at + share, tl.load(WORK + 1))
    return at, stop, tile, low, high, seq, row


@triton.jit
def next_tile(WORK, tile, TILED: tl.constexpr):
    """The tile after this one (past the last: that one): itself, its end, its sequence and row."""
    count = tl.load(WORK + 3)
    LINE = WORK + 4 + (5 if TILED else 3) * tl.num_programs(0)
    tile = tl.minimum(tile + 1, count - 1)
    seq = tile
    row = 0
    if TILED:
        seq = tl.load(LINE + count + 1 + tile)
        row = tl.load(LINE + 2 * count + 1 + tile)
    return tile, tl.load(LINE + tile + 1), seq, row


@triton.jit
def tile_of(WORK, tile, programs, TILED: tl.constexpr):
    """A tile by its number: where it begins and ends, its sequence and row."""
    LINE = WORK + 4 + (5 if TILED else 3) * programs
    seq = tile
    row = 0
    if TILED:
        count = tl.load(WORK + 3)
        seq = tl.load(LINE + count + 1 + tile)
        row = tl.load(LINE + 2 * count + 1 + tile)
    return tl.load(LINE + tile), tl.load(LINE + tile + 1), seq, row


@triton.jit
def piece_of(WORK, at, stop, low, high):
    """The piece of a tile that a program has: its key tiles [begin, end), its part, who else has any.

    Returns begin, end, part, and the first and last program with a piece: the same if uncut.
    """
    share = tl.load(WORK)
    keys_at = low + tl.load(WORK + 2)
    begin = tl.maximum(at - keys_at, 0)
    end = tl.minimum(stop, high) - keys_at
    first = low // share
    last = (high - 1) // share
    program = tl.program_id(0)
    return begin, end, 2 * program + (first == program).to(tl.int32), first, last


@triton.jit
def part_at(part, kv_head, programs):
    """Where a part's rows lie in the workspace, in tiles: a KV head's parts follow one another."""
    return kv_head * 2 * programs + part


@triton.jit
def times_longer(seq_len, LONG: tl.constexpr):
    """How many times as long a long sequence's pieces are, of low tiles (`alike.halves_of`)."""
    return 1 + (seq_len >= LONG).to(tl.int32) + 2 * (seq_len >= 2 * LONG).to(tl.int32)


@triton.jit
def even_piece(WORK, first, last, seq_len, LONG: tl.constexpr, BLOCK_N: tl.constexpr):
    """The piece [begin, end) of a tall tile that a program has: its keys' pieces are about as long.

    No piece is longer than usual: a tile may see a key tile less than its sequence has, and no piece
    must begin past its end.
    """
    long = (seq_len >= LONG).to(tl.int32)
    halves = 2 + long + 3 * (seq_len >= 2 * LONG).to(tl.int32)  # `alike.halves_of`
    usual = tl.load(WORK) * halves // 2
    each = tl.minimum(tl.cdiv(tl.cdiv(seq_len, BLOCK_N), last - first + 1), usual)
    begin = (tl.program_id(0) - first) * each
    return begin, begin + each
