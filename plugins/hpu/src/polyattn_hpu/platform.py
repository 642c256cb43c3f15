"""Detects Gaudi, through Intel's PyTorch bridge: without it no tensor could be there.

Unproven: no Gaudi was at hand.
"""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Device, TorchDevices, find_spec

FP8 = {"gaudi2": None, "gaudi3": "ocp"}
"""Gaudi 2's e4m3 ends at 240, OCP's at 448: a format that no other device writes."""


def _library() -> Any:
    if find_spec("habana_frameworks") is None:
        return None
    import habana_frameworks.torch.hpu as hpu

    return hpu if hpu.is_available() else None


def _describe(library: Any, index: int) -> Device:
    name = library.get_device_name(index)  # "GAUDI2", "GAUDI3"
    return Device("hpu", name.lower(), name, fp8=FP8.get(name.lower()))


GAUDIS = TorchDevices(("hpu",), _library, _describe)
detect, current = GAUDIS.detect, GAUDIS.current
