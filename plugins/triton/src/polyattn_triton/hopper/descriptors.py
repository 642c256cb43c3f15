"""How does the copy engine of Hopper (TMA) see a cache? As one matrix whose boxes lie in one block each.

A token's row is `stride(-3)` elements long; blocks are so many rows apart, heads so many rows (HND) or
columns (NHD). Other layouts have no descriptor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
NARROW = NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
"""Of rows of 64 bytes."""
MOST_ROWS = (1 << 31) - 1
"""The largest coordinate of the engine."""


class Steps(NamedTuple):
    """How many rows a block, and rows and columns a head, lie apart."""

    block: int
    row: int
    column: int


@lru_cache(maxsize=256)
def _matrix(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], Steps] | None:
    """Return a tensor's rows and columns as a matrix, and its steps; None: it is none."""
    slots, heads, size = shape[-3:]
    token, head, element = strides[-3:]
    blocks, block = (shape[0], strides[0]) if len(shape) == 4 else (1, 0)
    if element != 1 or token % 8 or token < size or block % token or 0 in shape:
        return None
    if head > token and head % token:
        return None
    row, column = (head // token, 0) if head >= token else (0, head)
    columns = (heads - 1) * column + size
    rows = (blocks - 1) * (block // token) + (heads - 1) * row + slots
    if column % 8 or columns > token or rows > MOST_ROWS:
        return None
    return [rows, columns], Steps(block // token, row, column)


def described(pages: Tensor, box: int, width: int | None = None) -> tuple[Any, Steps] | None:
    """Describe keys or values, (blocks, block size, heads, size) or (tokens, heads, size), 16 bits.

    `box`, `width`: rows and columns that are copied at once; whole heads without `width`. None: these
    strides or this address can't be described.
    """
    matrix = _matrix(tuple(pages.shape), pages.stride())
    if matrix is None or pages.data_ptr() % 16:
        return None
    shape, steps = matrix
    # Without its own checks, which ask the same again for longer than a launch takes.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = pages, shape, [pages.stride(-3), 1]
    descriptor.block_shape = [box, width or pages.shape[-1]]
    descriptor.layout = NARROW if descriptor.block_shape[1] == 32 else SHARED
    descriptor.padding = "zero"
    return descriptor, steps
