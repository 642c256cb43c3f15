"""Rows times the matrix by which a format turns them: queries on the way in, outputs on the way out."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def turn_kernel(
    ROWS,
    MATRIX,
    OUT,
    r_t,
    r_h,
    o_t,
    o_h,
    count,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    PART: tl.constexpr,
):
    """Write (tokens, H, SIZE) rows, `count` in all, times a float32 matrix (SIZE, SIZE)."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    col = tl.arange(0, BLOCK)
    there = (row < count)[:, None]
    FROM = ROWS + (row // H).to(tl.int64) * r_t + (row % H).to(tl.int64) * r_h
    acc = tl.zeros((N, BLOCK), tl.float32)
    for first in range(0, SIZE, PART):
        part = first + tl.arange(0, PART)
        inside = part < SIZE
        rows = tl.load(FROM[:, None] + part[None, :], mask=there & inside[None, :], other=0.0)
        mask = inside[:, None] & (col < SIZE)[None, :]
        matrix = tl.load(MATRIX + part[:, None] * SIZE + col[None, :], mask=mask, other=0.0)
        acc = tl.dot(rows.to(tl.float32), matrix, acc, input_precision="ieee")
    TO = OUT + (row // H).to(tl.int64) * o_t + (row % H).to(tl.int64) * o_h
    mask = there & (col < SIZE)[None, :]
    tl.store(TO[:, None] + col[None, :], acc.to(OUT.dtype.element_ty), mask=mask)
