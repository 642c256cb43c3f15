"""Can JAX reach a TPU here? Looks at packages alone: importing JAX takes the TPU for this process."""

from __future__ import annotations

import os

from polyattn.plugin import find_spec


def ready() -> str | None:
    """Say why Pallas can't work on this machine, or None."""
    if os.environ.get("PALLAS_INTERPRET") == "1":
        return None
    if find_spec("libtpu") is None:
        return "libtpu is not installed; pip install libtpu, on a TPU VM"
    if find_spec("torchax") is None:
        return (
            "torchax is not installed: torch needs it to hold tensors in JAX; pip install torchax"
        )
    return None
