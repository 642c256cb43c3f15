"""Enters torchax's environment for a whole run of pytest: `-p in_jax`, before the kit."""

from __future__ import annotations

from polyattn_tpu.torchax_env import torchax


def pytest_configure() -> None:
    """Let torch's functions act on tensors that live in JAX."""
    torchax().enable_globally()
