"""How does the copy engine of Hopper (TMA) see a cache? As one matrix whose boxes lie in one block each.

A token's row is `stride(-3)` elements long; blocks are so many rows apart, heads so many rows (HND) or
columns (NHD). What can't be said so has no descriptor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Described(NamedTuple):
    """A descriptor, and how many rows a block, and rows and columns a head, lie apart."""

    descriptor: Any
    block: int
    row: int
    column: int


def described(kept: Tensor, box: int) -> Described | None:
    """Describe keys or values, (blocks, block size, heads, size) or (tokens, heads, size), 16 bits.

    `box`: rows that are copied at once. None: these strides or this address can't be described.
    """
    token, head, size = kept.stride()[-3], kept.stride()[-2], kept.shape[-1]
    heads, slots = kept.shape[-2], kept.shape[-3]
    block = kept.stride(0) if kept.dim() == 4 else 0
    blocks = kept.shape[0] if kept.dim() == 4 else 1
    if kept.stride()[-1] != 1 or kept.data_ptr() % 16 or token % 8 or not kept.numel():
        return None
    if token < size or block % token or (head > token and head % token):
        return None
    row, column = (head // token, 0) if head >= token else (0, head)
    if column % 8 or (heads - 1) * column + size > token:
        return None
    rows = (blocks - 1) * (block // token) + (heads - 1) * row + slots
    if rows >= 1 << 31:
        return None
    descriptor = TensorDescriptor(
        kept, [rows, (heads - 1) * column + size], [token, 1], [box, size], SHARED
    )
    return Described(descriptor, block // token, row, column)
