"""fp8_ds_mla, fp8_ds_v4: DeepSeek's latents of 656 (V3.2) and 584 bytes (V4), as FlashMLA reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.bits import E4M3_MAX, e4m3, grouped, over, single, single_at, written

TINY = torch.finfo(torch.float32).tiny
LEAST = 1e-4
"""The smallest magnitude that V4's scales are of."""


def encode_v32(row: Tensor) -> Tensor:
    """Return 512 numbers in e4m3, the float32 scale of each 128, and 64 in bfloat16."""
    groups = grouped(row[..., :512], 128)
    scale = over(groups.abs().amax(-1, keepdim=True).clamp(min=TINY), E4M3_MAX)
    scales = written(scale.squeeze(-1), torch.float32)
    return torch.cat([_eight(groups, scale), scales, written(row[..., 512:], torch.bfloat16)], -1)


def decode_v32(row: Any, d: Any, size: int) -> Any:
    """Return element `d` of 576."""
    return torch.where(
        d < 512,
        e4m3(row[torch.clamp(d, max=511)])
        * single_at(row, 512 + 4 * (torch.clamp(d, max=511) // 128)),
        _wide(row, 528 + 2 * torch.clamp(d - 512, min=0)),
    )


def encode_v4(row: Tensor) -> Tensor:
    """Return 448 numbers in e4m3, 64 in bfloat16, the e8m0 scale of each 64 e4m3, a byte of 0."""
    groups = grouped(row[..., :448], 64)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    bits = over(largest, E4M3_MAX).view(torch.int32)
    code = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=254)  # the power of two not below
    rope = written(row[..., 448:], torch.bfloat16)
    codes = torch.cat([code, torch.zeros_like(code[..., :1, :])], -2).squeeze(-1).to(torch.uint8)
    return torch.cat([_eight(groups, (code << 23).view(torch.float32)), rope, codes], -1)


def decode_v4(row: Any, d: Any, size: int) -> Any:
    """Return element `d` of 512."""
    at = torch.clamp(d, max=447)
    eight = e4m3(row[at]) * single(row[576 + at // 64] << 23)
    return torch.where(d < 448, eight, _wide(row, 448 + 2 * torch.clamp(d - 448, min=0)))


def _eight(groups: Tensor, scale: Tensor) -> Tensor:
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return written(codes.flatten(-2), torch.float8_e4m3fn)


def _wide(row: Any, at: Any) -> Any:
    """Return the bfloat16 whose first byte is byte `at`."""
    return single((row[at] | row[at + 1] << 8) << 16)
