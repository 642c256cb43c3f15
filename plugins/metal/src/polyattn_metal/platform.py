"""Detects Apple's GPU: by MLX, with torch's MPS tensors in front of it."""

from __future__ import annotations

import sys
from typing import Any

from polyattn.plugin import Device, find_spec


def ready() -> str | None:
    """Say why MLX can't work on this machine, or None."""
    if find_spec("mlx") is None:
        return "mlx is not installed"
    return None


def detect(torch_device: str | None = None) -> Device | None:
    """Return this machine's Apple GPU; None where there is none. Unproven: no Mac was at hand."""
    if torch_device is not None and torch_device.split(":")[0] != "mps":
        return None
    if sys.platform != "darwin" or find_spec("mlx") is None:
        return None
    import torch

    if not torch.backends.mps.is_available():
        return None
    import mlx.core

    metal: Any = mlx.core
    if not metal.metal.is_available():
        return None
    name = str(metal.device_info()["device_name"])  # "Apple M3 Max"
    arch = name.removeprefix("Apple ").lower().replace(" ", "-")
    return Device(platform="metal", arch=arch, name=name, torch_device="mps:0")
