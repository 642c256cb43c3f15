"""turboquant4: TurboQuant's 4 bits (Zandieh et al., 2025): a turned row's norm, codes of normal numbers.

An orthogonal matrix turns each row. The elements, divided by the norm, are then nearly normal with
variance 1 / size, for any row. So one codebook (Lloyd's and Max's, 16 levels) is the best for all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import (
    HALF_MAX,
    codebook,
    divided,
    half_at,
    level,
    nibble,
    packed,
    power_below,
    root,
    summed,
    written,
)

LEVELS = (0.12839, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259)
"""Max's levels above 0 of a normal number (IRE Transactions on Information Theory, 1960, table 1)."""
CODEBOOK = (*(-x for x in reversed(LEVELS)), *LEVELS)


def turn(row: Tensor, back: bool) -> Tensor:
    """Return rows times a Hadamard matrix with signs that look random, over the root of the size.

    A step adds and subtracts elements of places that differ in one bit: the same bits in any batch.
    """
    size = row.shape[-1]
    odd = (torch.arange(size, device=row.device) * 40503 >> 7) & 1
    signs = (1 - 2 * odd).to(row.dtype)
    row = row if back else row * signs
    for bit in range(size.bit_length() - 1):
        pairs = row.unflatten(-1, (-1, 2, 1 << bit))
        low, high = pairs.unbind(-2)
        row = torch.stack([low + high, low - high], -2).flatten(-3)
    row = row * size**-0.5
    return row * signs if back else row


def encode(row: Tensor) -> Tensor:
    """Return pairs of codes, size / 2 bytes, the norm in float16, and two zeros: rows begin at words."""
    # Squares of what is divided by a power of two neither overflow nor vanish.
    unit = power_below(row.abs().amax(-1, keepdim=True))
    norm = root(summed((row / unit).square())) * unit
    norm = norm.clamp(max=HALF_MAX).half().float()
    near = divided(row, norm) * row.shape[-1] ** 0.5
    levels = codebook(CODEBOOK, row.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    behind = torch.cat([norm, torch.zeros_like(norm)], -1)
    return torch.cat([packed(torch.bucketize(near, bounds)), written(behind, torch.float16)], -1)


def decode(row: Any, d: Any, size: int) -> Any:
    """Return a level times the norm over the root of the size."""
    return level(CODEBOOK, nibble(row, d)) * (half_at(row, size // 2) * size**-0.5)
