"""Detects Ascend NPUs, through torch-npu: without it no tensor could be there.

Unproven: no NPU was at hand.
"""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Device, TorchDevices, find_spec


def _library() -> Any:
    if find_spec("torch_npu") is None:
        return None
    import torch_npu

    return torch_npu.npu if torch_npu.npu.is_available() else None


def _describe(library: Any, index: int) -> Device:
    name = library.get_device_name(index)  # "Ascend910B3", "Ascend910_9362"
    arch = "910b" if name.startswith("Ascend910B") else name.removeprefix("Ascend").lower()
    return Device("npu", "910c" if arch.startswith("910_93") else arch, name)


NPUS = TorchDevices(("npu",), _library, _describe)
detect, current = NPUS.detect, NPUS.current
