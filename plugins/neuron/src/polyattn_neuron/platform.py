"""Detects Trainium, through torch-neuronx: without it no tensor could be there."""

from __future__ import annotations

import re
from typing import Any

from polyattn.plugin import Device, find_spec


def ready() -> str | None:
    """Say why the NKI library can't be used, or None."""
    for name, package in (("torch_neuronx", "torch-neuronx"), ("nkilib", "nki-library")):
        if find_spec(name) is None:
            return f"{package} is not installed; it comes from AWS's own index of packages"
    return None


def detect(torch_device: str | None = None) -> Device | None:
    """Return the NeuronCore asked for, or the current one; None where there is none.

    Unproven: no Trainium was at hand.
    """
    if torch_device is not None and torch_device.split(":")[0] != "neuron":
        return None
    if find_spec("torch_neuronx") is None:
        return None
    import torch
    import torch_neuronx  # noqa: F401 - registers the device

    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    if not neuron.device_count():
        return None
    _, _, number = (torch_device or "").partition(":")
    index = int(number) if number else neuron.current_device()
    name = str(neuron.get_device_name(index))
    found = re.search(r"trn\d", name.lower())
    arch = found[0] if found else name.lower()
    return Device(platform="neuron", arch=arch, name=name, torch_device=f"neuron:{index}")
