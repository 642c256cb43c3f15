"""int8_rows and e4m3_rows: eight bits, and a float32 scale for each token and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import E4M3_MAX, divided, e4m3, over, single_at, written


def encode_int8(row: Tensor) -> Tensor:
    """Return integers from -127 to 127, a byte each, then the scale, 4 bytes."""
    scale = over(_finite(row).abs().amax(-1, keepdim=True), 127.0)
    codes = divided(row, scale).round().clamp(-127, 127)
    return torch.cat([written(codes, torch.int8), written(scale, torch.float32)], -1)


def decode_int8(row: Any, d: Any, size: int) -> Any:
    """Return an integer times the row's scale."""
    code = row[d]
    return (code - 2 * (code & 128)) * single_at(row, size)


def encode_e4m3(row: Tensor) -> Tensor:
    """Return e4m3 numbers, a byte each, then the scale, 4 bytes."""
    scale = over(_finite(row).abs().amax(-1, keepdim=True), E4M3_MAX)
    codes = divided(row, scale).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.cat([written(codes, torch.float8_e4m3fn), written(scale, torch.float32)], -1)


def decode_e4m3(row: Any, d: Any, size: int) -> Any:
    """Return an e4m3 number times the row's scale."""
    return e4m3(row[d]) * single_at(row, size)


def _finite(row: Tensor) -> Tensor:
    limit = torch.finfo(torch.float32).max
    return row.clamp(-limit, limit)
