"""Detects Trainium, through torch-neuronx: without it no tensor could be there.

Unproven: no Trainium was at hand.
"""

from __future__ import annotations

import re
from typing import Any

from polyattn.plugin import Device, TorchDevices, find_spec


def ready() -> str | None:
    """Say why the NKI library can't be used, or None."""
    for name, package in (("torch_neuronx", "torch-neuronx"), ("nkilib", "nki-library")):
        if find_spec(name) is None:
            return f"{package} is not installed; it comes from AWS's own index of packages"
    return None


def _library() -> Any:
    if find_spec("torch_neuronx") is None:
        return None
    import torch
    import torch_neuronx  # noqa: F401 - registers the device

    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    return neuron if neuron.device_count() else None


def _describe(library: Any, index: int) -> Device:
    name = str(library.get_device_name(index))
    arch = re.search(r"trn\d", name.lower())
    return Device("neuron", arch[0] if arch else name.lower(), name)


CORES = TorchDevices(("neuron",), _library, _describe)
detect = CORES.detect
