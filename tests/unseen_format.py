"""A format that no backend was written for, as a user writes it: 6 bits of a logarithm, rows turned.

Four elements lie in three bytes: a sign, and 31 steps of a quarter of a power of two below 1. Behind
them is the power of two of each 16 elements, in e8m0. Rows are turned, a place of the first half with
one of the second, by an angle of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polyattn
import torch
from polyattn import RowFormat
from polyattn.runtime.cache.bits import single
from torch import Tensor

LARGEST = 2.0**15


def _turn(row: Tensor, back: bool) -> Tensor:
    one, other = row.chunk(2, -1)
    angle = torch.arange(one.shape[-1], device=row.device, dtype=row.dtype) * (-1 if back else 1)
    return torch.cat(
        [one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1
    )


def _encode(row: Tensor) -> Tensor:
    groups = row.clamp(-LARGEST, LARGEST).unflatten(-1, (-1, 16))
    power = groups.abs().amax(-1, keepdim=True).log2().ceil().nan_to_num(0).clamp(-126, 15)
    step = (
        (torch.log2(groups.abs() / torch.exp2(power)) * 4 + 31).round().clamp(0, 31).nan_to_num(0)
    )
    code = step.int() | (groups < 0).int() << 5
    four = code.unflatten(-1, (-1, 4)) << torch.arange(0, 24, 6, device=row.device)
    word = four.sum(-1, keepdim=True) >> torch.arange(0, 24, 8, device=row.device)
    return torch.cat([(word & 255).flatten(-3), power.flatten(-2) + 127], -1).to(torch.uint8)


def _decode(row: Any, d: Any, size: int) -> Any:
    at = 3 * d // 4
    first = 6 * d % 8
    code = ((row[at] | row[at + 1] << 8) & (63 << first)) >> first
    step = code & 31
    magnitude = torch.where(step == 0, 0.0, torch.exp2((step - 31) * 0.25))
    return magnitude * (1 - 2 * (code >> 5)) * single(row[3 * size // 4 + d // 16] << 23)


LOGS6 = RowFormat(
    name="logs6", encode=_encode, decode=_decode, largest=LARGEST, turn=_turn,
    row_bytes=lambda size: 0 if size % 16 else 3 * size // 4 + size // 16,
)  # fmt: skip


@contextmanager
def registered() -> Iterator[RowFormat]:
    """Register the format for a while, as a user does."""
    polyattn.register_row_format(LOGS6)
    try:
        yield LOGS6
    finally:
        polyattn.unregister_row_format("logs6")
