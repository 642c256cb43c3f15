"""How are keys and values kept in four bits? NVFP4: e2m1 numbers, a scale for each 16 of them.

NVIDIA's format (Blackwell's block-scaled types): sixteen neighbours of a head share a scale in e4m3, and
all of a tensor share one in float32, here the layer's `k_scale` or `v_scale`. Each stands for
`e2m1 * block scale * tensor scale`. A row of a cache, one token's key of one head, is first its packed
numbers (element 2 i in the low four bits), size / 2 bytes, then its block scales, size / 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Elements that share a scale."""
LARGEST = 6.0
"""The largest e2m1 number."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; code 8 + i is the negative of code i."""


def row_bytes(size: int) -> int:
    """Return the bytes of a head of `size` elements, a multiple of 16."""
    return size // 2 + size // BLOCK


def head_size(width: int) -> int:
    """Return the elements that a row of so many bytes holds."""
    return width * BLOCK // (BLOCK // 2 + 1)


def packed(scaled: Tensor) -> Tensor:
    """Return rows of bytes, uint8 (…, row_bytes(size)), of numbers (…, size) over the tensor's scale.

    A block's scale is its largest magnitude over 6, rounded to e4m3 and saturated; NaN in a block makes
    all of it NaN, which e2m1 by itself can't say.
    """
    blocks = scaled.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    finest = torch.finfo(torch.float8_e4m3fn).max
    scale = (largest / LARGEST).clamp(max=finest).to(torch.float8_e4m3fn)
    divisor = scale.float()
    # A block whose scale rounds to 0 holds zeros.
    codes = _codes(torch.where(divisor == 0, 0.0, blocks / divisor)).flatten(-2)
    numbers = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return torch.cat([numbers, scale.view(torch.uint8).squeeze(-1)], dim=-1)


def unpacked(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what rows of bytes (…, row_bytes(size)) hold, (…, size), without the tensor's scale.

    Exact in bfloat16 and every wider dtype: six bits of significand.
    """
    size = head_size(rows.shape[-1])
    numbers, scales = rows.split([size // 2, size // BLOCK], dim=-1)
    codes = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=rows.device)
    values = table[codes].unflatten(-1, (-1, BLOCK))
    scale = scales.contiguous().view(torch.float8_e4m3fn).float()[..., None]
    found: Tensor = (values * scale).flatten(-2).to(dtype)
    return found


def _codes(x: Tensor) -> Tensor:
    """Return the nearest e2m1's code, uint8; of two as near the one with an even mantissa."""
    a = x.abs()
    bounds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    code = torch.zeros_like(a, dtype=torch.uint8)
    for index, bound in enumerate(bounds):
        # Halfway between codes i and i + 1: to i + 1 where that is even.
        code += (a > bound) | ((a == bound) & bool(index % 2))
    return code | (torch.signbit(x).to(torch.uint8) << 3)
