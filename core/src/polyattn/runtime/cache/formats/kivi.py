"""kivi4 and kivi2: KIVI's quantiser of values (Liu et al., 2024): 4 or 2 bits between a group's ends.

A group is 32 neighbours of one row. The paper quantises keys by channel instead, over 32 tokens: that
is no row of one token, so here keys are quantised as values are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import HALF_MAX, divided, grouped, half_at, over, packed, written

GROUP = 32


def _encode(row: Tensor, bits: int) -> Tensor:
    """Return codes, size * bits / 8 bytes, then each group's step and least number, float16 both."""
    most = 2**bits - 1
    groups = grouped(row.clamp(-HALF_MAX / 2, HALF_MAX / 2), GROUP)
    least = groups.amin(-1, keepdim=True).half().float()
    step = over(groups.amax(-1, keepdim=True) - least, most).half().float()
    codes = divided(groups - least, step).round().clamp(0, most)
    ends = torch.cat([step, least], -1).flatten(-2)
    return torch.cat([packed(codes.flatten(-2), bits), written(ends, torch.float16)], -1)


def _decode(row: Any, d: Any, size: int, bits: int) -> Any:
    each = 8 // bits
    code = (row[d // each] >> (bits * (d % each))) & (2**bits - 1)
    at = size // each + 4 * (d // GROUP)
    return code * half_at(row, at) + half_at(row, at + 2)


def encode4(row: Tensor) -> Tensor:
    """Write four bits an element."""
    return _encode(row, 4)


def decode4(row: Any, d: Any, size: int) -> Any:
    """Return a code of four bits times the group's step, from its least number on."""
    return _decode(row, d, size, 4)


def encode2(row: Tensor) -> Tensor:
    """Write two bits an element."""
    return _encode(row, 2)


def decode2(row: Any, d: Any, size: int) -> Any:
    """Return a code of two bits times the group's step, from its least number on."""
    return _decode(row, d, size, 2)
