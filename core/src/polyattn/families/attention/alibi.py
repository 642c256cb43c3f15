"""ALiBi's slopes, after Press et al., "Train Short, Test Long" (ICLR 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slope of each head (Press et al., 2022).

    For a power of two, slopes are a geometric series. Other counts take those of the largest power of two
    below, and then every second slope of the next power, as the paper's code does.

    Args:
        num_heads: query heads, at least 1.

    Returns:
        float32 (num_heads,) on the CPU.

    Raises:
        ValueError: there is no head.

    Examples:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]

    """
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / closest) for i in range(closest)]
    extra = [2.0 ** (-4.0 * (i + 1) / closest) for i in range(0, 2 * (num_heads - closest), 2)]
    return torch.tensor(slopes + extra, dtype=torch.float32, device="cpu")
