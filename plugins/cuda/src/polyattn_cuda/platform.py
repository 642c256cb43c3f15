"""Detects NVIDIA GPUs; `torch.cuda` answers on ROCm too, which must not be taken for one."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Device, TorchDevices


def _library() -> Any:
    import torch

    return torch.cuda if torch.version.hip is None and torch.cuda.is_available() else None


def _describe(library: Any, index: int) -> Device:
    major, minor = library.get_device_capability(index)
    fp8 = "ocp" if (major, minor) >= (8, 9) else None
    return Device("cuda", f"sm_{major}{minor}", library.get_device_name(index), fp8=fp8)


GPUS = TorchDevices(("cuda",), _library, _describe)
detect, current = GPUS.detect, GPUS.current
