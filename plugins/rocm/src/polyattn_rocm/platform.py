"""Detects AMD GPUs. `torch.cuda` answers on ROCm too; only `torch.version.hip` tells them apart."""

from __future__ import annotations

from polyattn.plugin import Device

FP8 = {"gfx942": "fnuz", "gfx950": "ocp"}
"""The e4m3 that each architecture computes: the same bits mean values a factor of two apart."""


def detect(torch_device: str | None = None) -> Device | None:
    """Return the GPU asked for, or the current one; None where there is no AMD GPU."""
    if torch_device is not None and torch_device.split(":")[0] not in ("cuda", "hip"):
        return None
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    index = None
    if torch_device is not None and ":" in torch_device:
        index = int(torch_device.split(":")[1])
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    arch = properties.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    return Device(
        platform="rocm",
        arch=arch,
        name=properties.name,
        fp8=FP8.get(arch),
        torch_device=f"cuda:{index}",  # torch calls AMD's devices so too
    )


def current() -> str:
    """Return the current GPU, in torch's words."""
    import torch

    return f"cuda:{torch.cuda.current_device()}"
