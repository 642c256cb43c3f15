"""mxfp4: e2m1 numbers, a power of two for each 32 of them (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import e2m1, e2m1_codes, grouped, nibble, packed, single

BLOCK = 32


def encode(row: Tensor) -> Tensor:
    """Return pairs of numbers, size / 2 bytes, then the blocks' scales in e8m0, size / 32 bytes.

    Section 6.3: a scale is the largest power of two in the block over 4, e2m1's largest; numbers
    beyond 6 saturate. 255 is NaN.
    """
    blocks = grouped(row, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    power = (largest.view(torch.int32) >> 23) - 2  # float32's biased exponent; a NaN's is 255
    code = torch.where(largest.isnan(), 255, power.clamp(0, 252))
    scale = torch.where(code == 0, 2.0**-127, (code << 23).view(torch.float32))
    numbers = e2m1_codes(blocks / scale).flatten(-2)
    return torch.cat([packed(numbers), code.squeeze(-1).to(torch.uint8)], -1)


def decode(row: Any, d: Any, size: int) -> Any:
    """Return a number times its block's power of two."""
    code = row[size // 2 + d // BLOCK]
    power = torch.where(code == 255, float("nan"), single(code << 23))
    power = torch.where(code == 0, 2.0**-127, power)
    return e2m1(nibble(row, d)) * power
