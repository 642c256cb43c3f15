"""Can JAX reach a TPU here? Looks at packages alone: importing JAX takes the TPU for this process."""

from __future__ import annotations

import os

from polyattn.plugin import find_spec


def interprets() -> str | None:
    """Say why Pallas' interpreter doesn't run the kernels on CPU tensors, or None."""
    if os.environ.get("PALLAS_INTERPRET") == "1":
        return None
    return "the interpreter is for tests; set PALLAS_INTERPRET=1"


def ready() -> str | None:
    """Say why Pallas can't work on this machine, or None."""
    if interprets() is None:  # JAX's CPU stands in for a TPU
        return None
    if find_spec("libtpu") is None:
        return "libtpu is not installed; pip install libtpu, on a TPU VM"
    if find_spec("torchax") is None:
        return (
            "torchax is not installed: torch needs it to hold tensors in JAX; pip install torchax"
        )
    return None
