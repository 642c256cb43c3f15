"""A format that no backend was written for: six bits of a logarithm, in bytes that elements share oddly.

Four elements lie in three bytes: a sign, and 31 steps of a quarter of a power of two below the row's
largest magnitude, a float16 behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polyattn
import torch
from polyattn import RowFormat
from polyattn.runtime.cache.bits import HALF_MAX, divided, half_at, written
from torch import Tensor


def _encode(row: Tensor) -> Tensor:
    most = row.abs().amax(-1, keepdim=True).clamp(max=HALF_MAX).half().float()
    step = (torch.log2(divided(row.abs(), most)) * 4 + 31).round().clamp(0, 31).nan_to_num(0)
    code = torch.where(most == 0, 0.0, step).int() | (row < 0).int() << 5
    four = code.unflatten(-1, (-1, 4)) << torch.arange(0, 24, 6, device=row.device)
    word = four.sum(-1, keepdim=True) >> torch.arange(0, 24, 8, device=row.device)
    return torch.cat([(word & 255).to(torch.uint8).flatten(-2), written(most, torch.float16)], -1)


def _decode(row: Any, d: Any, size: int) -> Any:
    at = 3 * d // 4
    code = ((row[at] | row[at + 1] << 8) >> (6 * d % 8)) & 63
    step = code & 31
    magnitude = torch.where(step == 0, 0.0, torch.exp2((step - 31) * 0.25))
    return magnitude * (1 - 2 * (code >> 5)) * half_at(row, 3 * size // 4)


LOGS6 = RowFormat(
    name="logs6", encode=_encode, decode=_decode, largest=HALF_MAX,
    row_bytes=lambda size: 0 if size % 4 else 3 * size // 4 + 2,
)  # fmt: skip


@contextmanager
def registered() -> Iterator[RowFormat]:
    """Register the format for a while, as a user does."""
    polyattn.register_row_format(LOGS6)
    try:
        yield LOGS6
    finally:
        polyattn.unregister_row_format("logs6")
