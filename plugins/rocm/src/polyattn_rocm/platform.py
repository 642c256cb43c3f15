"""Detects AMD GPUs. `torch.cuda` answers on ROCm too; only `torch.version.hip` tells them apart."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Device, TorchDevices

FP8 = {"gfx942": "fnuz", "gfx950": "ocp"}
"""The e4m3 that each architecture computes: the same bits mean values a factor of two apart."""


def _library() -> Any:
    import torch

    return torch.cuda if torch.version.hip is not None and torch.cuda.is_available() else None


def _describe(library: Any, index: int) -> Device:
    properties = library.get_device_properties(index)
    arch = properties.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    return Device("rocm", arch, properties.name, fp8=FP8.get(arch))


GPUS = TorchDevices(("cuda", "hip"), _library, _describe)
"""torch calls AMD's devices `cuda` too."""
detect, current = GPUS.detect, GPUS.current
