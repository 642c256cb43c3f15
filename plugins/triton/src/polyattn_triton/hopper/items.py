"""Which items has a program of `hopper.prefill`, in which order, and which keys does an item see?

An item is a tile of query rows with all its keys, or (`SPLIT`) a piece: those that lie in a program's
stretch (`schedule`). The roles of a program, which copy and compute, each go through the same items by
these functions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def job_at(WORK, at, tiles, at_once):
    """A whole tile and its KV head: the heads go `at_once`, tile by tile, then the next ones."""
    section = at // (tiles * at_once)
    inside = at - section * tiles * at_once
    tile = gl.minimum(inside // at_once, tiles - 1)
    return section * at_once + inside % at_once, gl.load(WORK + tile), gl.load(WORK + tiles + tile)


@gluon.jit
def side_by_side(WORK, lanes):
    """Return which stretch this program has, so that programs of the same keys adjoin in the grid.

    `schedule.in_lanes` has all stretches of a sequence's first tile on the line before those of the next.
    """
    program = gl.program_id(0)
    each = gl.load(WORK + 1) // (gl.load(WORK) * lanes)
    return gl.where(program < lanes * each, program % lanes * each + program // lanes, program)


@gluon.jit
def begin(WORK, tiles, at_once, KV_HEADS: gl.constexpr, SPLIT: gl.constexpr, program=None):
    """A program's first item, and where its items end: (at, stop, low, high, tile, seq, start, head).

    `SPLIT`: of its stretch of the line of tiles, as `tiles.my_stretch` and `tiles.next_tile`: `low` and
    `high` are the tile's ends. Else tiles are dealt there and back, and `low` counts the rounds.
    `program`: which stretch; without it the program's own number.
    """
    if program is None:
        program = gl.program_id(0)
    if SPLIT:
        programs = gl.num_programs(0)
        share = gl.load(WORK)
        COLUMN = WORK + 4 + program
        tile = gl.load(COLUMN)
        low = gl.load(COLUMN + programs)
        high = gl.load(COLUMN + 2 * programs)
        seq = gl.load(COLUMN + 3 * programs)
        start = gl.load(COLUMN + 4 * programs)
        at = program * share
        stop = gl.minimum(at + share, gl.load(WORK + 1))
        head = gl.program_id(1)
    else:
        at = program
        stop = tiles * KV_HEADS
        low = 0
        high = 0
        tile = 0
        head, seq, start = job_at(WORK, at, tiles, at_once)
    return at, stop, low, high, tile, seq, start, head


@gluon.jit
def advance(WORK, tiles, at_once, low, high, tile, head, SPLIT: gl.constexpr):
    """The item after this one: (at, low, high, tile, seq, start, head)."""
    if SPLIT:
        count = gl.load(WORK + 3)
        LINE = WORK + 4 + 5 * gl.num_programs(0)
        at = high
        low = high
        tile = gl.minimum(tile + 1, count - 1)
        high = gl.load(LINE + tile + 1)
        seq = gl.load(LINE + count + 1 + tile)
        start = gl.load(LINE + 2 * count + 1 + tile)
    else:
        programs = gl.num_programs(0)
        program = gl.program_id(0)
        low += 1
        at = low * programs + gl.where(low % 2 == 1, programs - 1 - program, program)
        head, seq, start = job_at(WORK, at, tiles, at_once)
    return at, low, high, tile, seq, start, head


@gluon.jit
def bounds(
    SEQ_LENS, STARTS, WORK, at, stop, low, high, seq, start,
    G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """An item's rows and keys: first token, query length, length, and its key tiles.

    These are [`first`, `first` + `count`), at least one; all but [`full_low`, `full`) need a mask, and
    no key from `limit` on counts.
    """
    token0 = gl.load(STARTS + seq)
    query_len = gl.load(STARTS + seq + 1) - token0
    seq_len = gl.load(SEQ_LENS + seq)
    context = seq_len - query_len
    first_pos = context + start // G
    last_pos = context + (gl.minimum(start + BLOCK_M, query_len * G) - 1) // G
    seen = seq_len
    full = seq_len // BLOCK_N
    if CAUSAL:
        seen = gl.minimum(seen, last_pos + 1)
        full = gl.minimum(full, (first_pos + 1) // BLOCK_N)
    first = 0
    full_low = 0
    if WINDOW > 0:
        first = gl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N
        full_low = gl.cdiv(gl.maximum(last_pos - WINDOW + 1, 0), BLOCK_N)
    end = gl.cdiv(seen, BLOCK_N)
    limit = seq_len
    if SPLIT:
        keys_at = low + gl.load(WORK + 2)
        end = gl.minimum(end, first + gl.minimum(stop, high) - keys_at)
        first += gl.maximum(at - keys_at, 0)
        limit = gl.minimum(limit, end * BLOCK_N)
    count = gl.maximum(end - first, 1)
    full_low = gl.minimum(gl.maximum(full_low, first), first + count)
    full = gl.maximum(gl.minimum(full, first + count), full_low)
    return token0, query_len, seq_len, first, count, full_low, full, limit


@gluon.jit
def part_of(WORK, low, high, head, program=None):
    """Whether others have pieces of the tile [`low`, `high`), too, and where this part lies, in tiles.

    As `tiles.piece_of` numbers parts and `tiles.part_at` lays them out, for `merge_kernel`.
    """
    if program is None:
        program = gl.program_id(0)
    share = gl.load(WORK)
    first = low // share
    part = 2 * program + gl.where(first == program, 1, 0)
    return (high - 1) // share > first, head * 2 * gl.num_programs(0) + part
