"""How do packed rows lie, in memory and in shared memory, and how does a tile of them come there?"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyattn_triton.hopper.names import async_load

INT4, NVFP4, MXFP4, KIVI4, KIVI2, E4M3, E4M3_ROWS, INT8_ROWS, LEVELS = (
    gl.constexpr(n) for n in range(9)
)
"""Forms: integers from -8, a scale in float16 for each 32; e2m1, one in e4m3 for each 16; e2m1, a power
of two for each 32; codes of 4 and of 2 bits, a step and a least number in float16 for each 32; e4m3;
e4m3 and int8, a float32 for each row; a codebook's 16 levels, a float16 for each row and 2 bytes."""


@gluon.constexpr_function
def numbers_of(form):
    """How many numbers a unit holds."""
    return 8 if form == KIVI2 else 4 if form < E4M3 or form == LEVELS else 2


@gluon.constexpr_function
def word_of(form):
    """What rows begin at multiples of, in bytes, and are copied in."""
    return 4 if form == MXFP4 or form > E4M3 else 8


@gluon.constexpr_function
def scale_words(form):
    """How many such words a row's scales take; their place in shared memory, of e4m3."""
    return 2 if form in (KIVI4, KIVI2) else 1


@gluon.constexpr_function
def wide_layout(form):
    """How a warp's threads copy 16 rows: four rows of eight words, or of eight pairs."""
    return gl.BlockedLayout([1, 2 if form == E4M3 else 1], [4, 8], [1, 1], [1, 0])


@gluon.constexpr_function
def quads_layout(keys, axis):
    """How a lane holds the scales of nvfp4's keys, as two words of four: a row's are neighbours.

    `axis`: 2 where keys are the rows of a product's first operand, 1 where they are its columns.
    """
    high = [[1 << i, 0] for i in range(3, keys.bit_length() - 1)]
    if axis == 1:
        registers, lanes = [[0, 1], [1, 0], *high], [[2, 0], [4, 0], *[[0, 0]] * 3]
    else:
        registers, lanes = [[0, 1], *high], [*[[0, 0]] * 2, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [keys, 2])


@gluon.constexpr_function
def halves_layout(keys, axis):
    """And which of each pair of groups a lane's units are of: the last dimension."""
    if axis == 1:
        high = [[1 << i, 0, 0] for i in range(2, keys.bit_length() - 2)]
        registers, shape = [[0, 1, 0], *high], [keys // 2, 2, 2]
        lanes = [[1, 0, 0], [2, 0, 0], *[[0, 0, 0]] * 2, [0, 0, 1]]
    else:
        registers, shape = [[1 << i, 0] for i in range(3, keys.bit_length() - 1)], [keys, 2]
        lanes = [[0, 0], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], shape)


@gluon.constexpr_function
def units_layout(units):
    """How a tile's units of 16 bits lie in shared memory: 16 bytes of eight rows in different banks."""
    return gl.SwizzledSharedLayout(8, 64 // units, units // 8, [1, 0])


@gluon.constexpr_function
def words_layout(words, size):
    """The same for words of `size` bytes."""
    return gl.SwizzledSharedLayout(16 // size, 128 // (words * size), words * size // 16, [1, 0])


@gluon.jit
def longer(parts, one):
    """Return a tuple that has one part more."""
    return parts + (one,)  # noqa: RUF005


@gluon.jit
def blocks_of_tile(BT, tile, length, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The blocks that hold a tile's keys, 16 each; past the length block 0."""
    blocks = ()
    for part in gl.static_range(BLOCK_N // 16):
        at = tile * BLOCK_N + part * 16
        blocks = longer(blocks, gl.load(BT + at // BLOCK_SIZE, mask=at < length, other=0))
    return blocks


@gluon.jit
def _origins(blocks, tile, row, b, t, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Where the rows of a tile lie, from the first of its 16 on."""
    origins = row.to(gl.int64) * 0
    for part in gl.static_range(BLOCK_N // 16):
        at = tile * BLOCK_N + part * 16
        origin = blocks[part].to(gl.int64) * b + at % BLOCK_SIZE * t
        origins = gl.where(row // 16 == part, origin, origins)
    return origins[:, None]


@gluon.jit
def copy_tile(
    rows, blocks, tile, slot, length, WORDS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Copy a tile's rows into shared memory: all of its codes at once, which needs no barrier between.

    `rows`: their places in shared memory and their scales', where they lie, the words of 16, and the
    strides of blocks and rows. Past the length scales are zero, or 8-bit numbers.
    """
    codes, scales, ROWS, of_row, b, t = rows
    WIDE: gl.constexpr = gl.SliceLayout(1, wide_layout(FORM))
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=WIDE)
    left = length - tile * BLOCK_N
    FROM = ROWS + _origins(blocks, tile, row, b, t, BLOCK_N, BLOCK_SIZE) + of_row
    to = codes.index(slot)
    if FORM >= E4M3:
        async_load(to, FROM, mask=(row < left)[:, None])
    else:
        async_load(to, FROM)
    if FORM != E4M3:
        line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LINE))
        each = gl.arange(0, scale_words(FORM), layout=gl.SliceLayout(0, LINE))
        FROM = ROWS + _origins(blocks, tile, line, b, t, BLOCK_N, BLOCK_SIZE)
        async_load(
            scales.index(slot),
            FROM + WORDS + (line % 16 * t)[:, None] + each[None, :],
            mask=(line < left)[:, None],
        )
