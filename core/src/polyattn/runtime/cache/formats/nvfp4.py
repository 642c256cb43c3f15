"""nvfp4: e2m1 numbers, a scale in e4m3 for each 16; the layer's scale is the tensor's, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import (
    E2M1_MAX,
    E4M3_MAX,
    divided,
    e2m1,
    e2m1_codes,
    e4m3,
    grouped,
    nibble,
    over,
    packed,
    written,
)

BLOCK = 16


def encode(row: Tensor) -> Tensor:
    """Return pairs of numbers, size / 2 bytes, then the blocks' scales, size / 16 bytes.

    A scale is a block's largest magnitude over 6, rounded to e4m3 and saturated; NaN in a block makes
    the whole block NaN, because e2m1 has no NaN.
    """
    blocks = grouped(row, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = over(largest, E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    codes = e2m1_codes(divided(blocks, scale.float())).flatten(-2)
    return torch.cat([packed(codes), written(scale.squeeze(-1), torch.float8_e4m3fn)], -1)


def decode(row: Any, d: Any, size: int) -> Any:
    """Return a number times its block's scale."""
    return e2m1(nibble(row, d)) * e4m3(row[size // 2 + d // BLOCK])
