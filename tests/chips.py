"""A GPU that isn't here, as plans see it: `patch.object(launch, "facts", h200())`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def h200(multiprocessors: int = 132, shared: int = 228 << 10) -> Callable[[Any], SimpleNamespace]:
    """Return what stands for torch's properties of a device: an H200's, of so many multiprocessors."""
    facts = SimpleNamespace(
        multi_processor_count=multiprocessors, shared_memory_per_multiprocessor=shared,
        shared_memory_per_block=48 << 10, L2_cache_size=50 << 20,
    )  # fmt: skip
    return lambda device: facts
