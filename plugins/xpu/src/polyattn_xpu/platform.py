"""Detects Intel's GPUs by torch itself, which has had the `xpu` device since 2.5."""

from __future__ import annotations

from polyattn.plugin import Device

ARCHS = {
    "xe2": ("B570", "B580", "B50", "B60", "B65", "B70", "130V", "140V"),
    "xe3": ("B370", "B390"),
    "pvc": ("Max",),
}
"""Words that name each architecture's GPUs; of the others none is served."""


def detect(torch_device: str | None = None) -> Device | None:
    """Return the GPU asked for, or the current one; None where there is none.

    Unproven: no such GPU was at hand.
    """
    if torch_device is not None and torch_device.split(":")[0] != "xpu":
        return None
    import torch

    if not torch.xpu.is_available():
        return None
    _, _, number = (torch_device or "").partition(":")
    index = int(number) if number else torch.xpu.current_device()
    name = torch.xpu.get_device_name(index)  # "Intel(R) Arc(TM) B580 Graphics"
    words = name.split()
    arch = next((arch for arch, marks in ARCHS.items() if {*marks} & {*words}), "xe")
    return Device(platform="xpu", arch=arch, name=name, fp8="ocp", torch_device=f"xpu:{index}")


def current() -> str:
    """Return the GPU that is current now."""
    import torch

    return f"xpu:{torch.xpu.current_device()}"
