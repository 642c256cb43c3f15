"""Detects Intel's GPUs by torch itself, which has had the `xpu` device since 2.5.

Unproven: no such GPU was at hand.
"""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Device, TorchDevices

ARCHS = {
    "xe2": ("B570", "B580", "B50", "B60", "B65", "B70", "130V", "140V"),
    "xe3": ("B370", "B390"),
    "pvc": ("Max",),
}
"""Words that name each architecture's GPUs. Other architectures aren't served."""


def _library() -> Any:
    import torch

    return torch.xpu if torch.xpu.is_available() else None


def _describe(library: Any, index: int) -> Device:
    name = library.get_device_name(index)  # "Intel(R) Arc(TM) B580 Graphics"
    words = name.split()
    arch = next((arch for arch, marks in ARCHS.items() if {*marks} & {*words}), "xe")
    return Device("xpu", arch, name, fp8="ocp")


GPUS = TorchDevices(("xpu",), _library, _describe)
detect, current = GPUS.detect, GPUS.current
