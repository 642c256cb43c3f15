"""Detects Gaudi, through Intel's PyTorch bridge: without it no tensor could be there."""

from __future__ import annotations

from polyattn.plugin import Device, find_spec

FP8 = {"gaudi2": None, "gaudi3": "ocp"}
"""Gaudi 2's e4m3 ends at 240, OCP's at 448: a format that no other device writes."""


def detect(torch_device: str | None = None) -> Device | None:
    """Return the Gaudi asked for, or the current one; None where there is none.

    Unproven: no Gaudi was at hand.
    """
    if torch_device is not None and torch_device.split(":")[0] != "hpu":
        return None
    if find_spec("habana_frameworks") is None:
        return None
    import habana_frameworks.torch.hpu as hpu

    if not hpu.is_available():
        return None
    _, _, number = (torch_device or "").partition(":")
    index = int(number) if number else hpu.current_device()
    name = hpu.get_device_name(index)  # "GAUDI2", "GAUDI3"
    arch = name.lower()
    return Device(
        platform="hpu", arch=arch, name=name, fp8=FP8.get(arch), torch_device=f"hpu:{index}"
    )


def current() -> str:
    """Return the Gaudi that is current now, of those that this process sees."""
    import habana_frameworks.torch.hpu as hpu

    return f"hpu:{hpu.current_device()}"
