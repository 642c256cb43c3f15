"""Detects NVIDIA GPUs; `torch.cuda` answers on ROCm too, which must not be taken for one."""

from __future__ import annotations

from polyattn.plugin import Device


def detect(torch_device: str | None = None) -> Device | None:
    """Return the GPU asked for, or the current one; None where there is no NVIDIA GPU."""
    if torch_device is not None and torch_device.split(":")[0] != "cuda":
        return None
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    index = torch.device(torch_device or "cuda").index
    index = torch.cuda.current_device() if index is None else index
    major, minor = torch.cuda.get_device_capability(index)
    return Device(
        platform="cuda",
        arch=f"sm_{major}{minor}",
        name=torch.cuda.get_device_name(index),
        fp8="ocp" if (major, minor) >= (8, 9) else None,
        torch_device=f"cuda:{index}",
    )


def current() -> str:
    """Return the current GPU."""
    import torch

    return f"cuda:{torch.cuda.current_device()}"
