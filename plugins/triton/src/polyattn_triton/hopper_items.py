"""Which tiles has a program of `prefill_hopper`, in which order, and which keys does a tile see?

The three roles of a program, which copy and compute, each go through the same tiles by these functions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def job_at(WORK, at, tiles, at_once):
    """A tile and its KV head: the heads go `at_once`, tile by tile, then the next ones."""
    section = at // (tiles * at_once)
    inside = at - section * tiles * at_once
    tile = gl.minimum(inside // at_once, tiles - 1)
    return section * at_once + inside % at_once, gl.load(WORK + tile), gl.load(WORK + tiles + tile)


@gluon.jit
def begin(WORK, tiles, at_once, KV_HEADS: gl.constexpr):
    """A program's first tile, and where all tiles end: (at, stop, rounds, seq, start, head)."""
    at = gl.program_id(0)
    stop = tiles * KV_HEADS
    head, seq, start = job_at(WORK, at, tiles, at_once)
    return at, stop, 0, seq, start, head


@gluon.jit
def advance(WORK, tiles, at_once, rounds):
    """The tile after this one: (at, rounds, seq, start, head). They are dealt there and back."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    rounds += 1
    at = rounds * programs + gl.where(rounds % 2 == 1, programs - 1 - program, program)
    head, seq, start = job_at(WORK, at, tiles, at_once)
    return at, rounds, seq, start, head


@gluon.jit
def bounds(
    SEQ_LENS, STARTS, seq, start,
    G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A tile's rows and keys: first token, query length, length, and its key tiles.

    These are [`first`, `first` + `count`), at least one; all but [`full_low`, `full`) need a mask.
    """
    token0 = gl.load(STARTS + seq)
    query_len = gl.load(STARTS + seq + 1) - token0
    seq_len = gl.load(SEQ_LENS + seq)
    context = seq_len - query_len
    first_pos = context + start // G
    last_pos = context + (gl.minimum(start + BLOCK_M, query_len * G) - 1) // G
    full = seq_len // BLOCK_N
    seen = gl.minimum(seq_len, last_pos + 1)
    full = gl.minimum(full, (first_pos + 1) // BLOCK_N)
    first = 0
    full_low = 0
    if WINDOW > 0:
        first = gl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N
        full_low = gl.cdiv(gl.maximum(last_pos - WINDOW + 1, 0), BLOCK_N)
    end = gl.cdiv(seen, BLOCK_N)
    count = gl.maximum(end - first, 1)
    full_low = gl.minimum(gl.maximum(full_low, first), first + count)
    full = gl.maximum(gl.minimum(full, first + count), full_low)
    return token0, query_len, seq_len, first, count, full_low, full
