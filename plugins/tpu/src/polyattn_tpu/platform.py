"""Detects TPUs, through torch's own support for them: without it no tensor could be there."""

from __future__ import annotations

from importlib.util import find_spec

from polyattn.plugin import Device

ARCHS = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e",
         "7x": "v7x", "v7x": "v7x"}  # fmt: skip
"""What a TPU calls itself, and the name that it is known by."""


def detect(torch_device: str | None = None) -> Device | None:
    """Return this host's TPU; None where there is none. Unproven: no TPU was at hand."""
    if torch_device is not None and torch_device.split(":")[0] != "xla":
        return None
    if find_spec("torch_xla") is None or find_spec("libtpu") is None:
        return None
    import jax

    devices = [device for device in jax.local_devices() if device.platform == "tpu"]
    if not devices:
        return None
    kind = devices[0].device_kind.removeprefix("TPU ").removeprefix("TPU")
    arch = ARCHS.get(kind.lower(), kind.lower())
    return Device(
        platform="tpu",
        arch=arch,
        name=devices[0].device_kind,
        fp8="ocp" if arch == "v7x" else None,
        torch_device=torch_device or "xla:0",
    )
