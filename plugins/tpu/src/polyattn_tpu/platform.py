"""Detects TPUs: by JAX's devices, with torch in front of them through torchax."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from polyattn.plugin import Device, find_spec

ARCHS = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e",
         "7x": "v7x", "v7x": "v7x"}  # fmt: skip
"""A TPU's own name for its kind, and the name of its architecture."""

VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
"""What Cloud TPU's images and GKE set on a TPU's host."""
NODES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
"""The device files through which libtpu reaches a chip."""


def interpret(profile: Device) -> tuple[Device, AbstractContextManager[Any]]:
    """Return a TPU whose kernels Pallas interprets on the CPU, and torchax's environment.

    JAX must not have run in this process before: this configures it to leave a real TPU alone. Raises
    `ImportError`.
    """
    import jax

    from polyattn_tpu.torchax_env import torchax

    jax.config.update("jax_platforms", "cpu")
    environment: AbstractContextManager[Any] = torchax().default_env()
    return profile.on("jax:0"), environment


def plausible(root: str = "/") -> bool:
    """Return whether a TPU may be here. The check is cheap; JAX takes seconds to find none.

    `JAX_PLATFORMS` without `tpu` rules it out. A process that has torchax, a variable of `VARIABLES`
    and a file of `NODES` each make it plausible.
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked and "tpu" not in asked.split(","):
        return False
    if "torchax" in sys.modules or any(os.environ.get(name) for name in VARIABLES):
        return True
    return any(next(Path(root).glob(pattern), None) for pattern in NODES)


def detect(torch_device: str | None = None) -> Device | None:
    """Return this host's TPU; None where there is none. Unproven: no TPU was at hand.

    JAX is imported only if `jax` was asked for, or a TPU is `plausible`.
    With `PALLAS_INTERPRET=1`, asked for `jax`: JAX's CPU in the place of a TPU, for tests.
    """
    if torch_device is not None and torch_device.split(":")[0] != "jax":
        return None
    if torch_device is None and not plausible():
        return None
    if find_spec("jax") is None or find_spec("torchax") is None:
        return None
    interpreted = os.environ.get("PALLAS_INTERPRET") == "1" and torch_device is not None
    if not interpreted and find_spec("libtpu") is None:
        return None
    import jax

    from polyattn_tpu.torchax_env import torchax

    devices = [device for device in jax.local_devices() if device.platform == "tpu"]
    if not devices and not interpreted:
        return None
    torchax()  # torch knows the device "jax" from then on
    if not devices:
        return Device("tpu", "v6e", "TPU v6e, interpreted on the CPU", torch_device="jax:0")
    kind = devices[0].device_kind.removeprefix("TPU ").removeprefix("TPU")
    arch = ARCHS.get(kind.lower(), kind.lower())
    return Device(
        platform="tpu",
        arch=arch,
        name=devices[0].device_kind,
        fp8="ocp" if arch == "v7x" else None,
        torch_device="jax:0",
    )
