"""Detects Ascend NPUs, through torch-npu: without it no tensor could be there."""

from __future__ import annotations

from polyattn.plugin import Device, find_spec


def detect(torch_device: str | None = None) -> Device | None:
    """Return the NPU asked for, or the current one; None where there is none.

    Unproven: no NPU was at hand.
    """
    if torch_device is not None and torch_device.split(":")[0] != "npu":
        return None
    if find_spec("torch_npu") is None:
        return None
    import torch_npu

    if not torch_npu.npu.is_available():
        return None
    _, _, number = (torch_device or "").partition(":")
    index = int(number) if number else torch_npu.npu.current_device()
    name = torch_npu.npu.get_device_name(index)  # "Ascend910B3", "Ascend910_9362"
    arch = "910b" if name.startswith("Ascend910B") else name.removeprefix("Ascend").lower()
    arch = "910c" if arch.startswith("910_93") else arch
    return Device(platform="npu", arch=arch, name=name, torch_device=f"npu:{index}")


def current() -> str:
    """Return the NPU that is current now, of those that this process sees."""
    import torch_npu

    return f"npu:{torch_npu.npu.current_device()}"
