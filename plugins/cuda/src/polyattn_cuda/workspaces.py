"""Scratch memory of a device: its kernels run one after another on one stream, so they share it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its split-KV partial results."""


def workspace(device: torch.device, size: int = WORKSPACE_BYTES) -> Tensor:
    """Return the device's one scratch buffer of so many bytes."""
    return _scratch(device, size)


@cache
def _scratch(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


@cache
def zeroed_workspace(device: torch.device) -> Tensor:
    """Return a scratch buffer for kernels that find their counters at zero and leave them so."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
