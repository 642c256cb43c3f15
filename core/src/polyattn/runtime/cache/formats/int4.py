"""int4: 4 bits, a float16 scale for each 32, as ggml's q4_0: a group's largest is -8 scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import HALF_MAX, divided, grouped, half_at, nibble, packed, written

GROUP = 32


def encode(row: Tensor) -> Tensor:
    """Return pairs of codes, size / 2 bytes, then the groups' scales, 2 bytes each."""
    groups = grouped(row, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.where(-low > high, low, high)
    scale = (largest / -8.0).clamp(-HALF_MAX / 8, HALF_MAX / 8).half().float()
    codes = (divided(groups, scale).round() + 8.0).clamp(0, 15)
    codes = torch.where(scale == 0, 8.0, codes)
    return torch.cat([packed(codes.flatten(-2)), written(scale.squeeze(-1), torch.float16)], -1)


def decode(row: Any, d: Any, size: int) -> Any:
    """Return a code, from -8 to 7, times its group's scale."""
    return (nibble(row, d) - 8) * half_at(row, size // 2 + 2 * (d // GROUP))
