"""ALiBi's slopes, after Press et al., "Train Short, Test Long" (ICLR 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the paper's slope of each head, float32 (num_heads,).

    Powers of two give a geometric series; other counts take every second slope of the next power.
    """
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / closest) for i in range(closest)]
    extra = [2.0 ** (-4.0 * (i + 1) / closest) for i in range(0, 2 * (num_heads - closest), 2)]
    return torch.tensor(slopes + extra, dtype=torch.float32, device="cpu")
