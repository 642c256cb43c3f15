"""Is there room for a cache? A failed allocation says how much it needed and what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyattn.errors import CacheError, describe


class RoomError(CacheError, MemoryError):
    """A device has no memory for a cache."""


@contextmanager
def room(field: str, count: Any, size: int, device: torch.device) -> Iterator[None]:
    """Allocate within this: a lack of memory becomes a `RoomError`.

    Args:
        field: what the caller calls the count.
        count: how many blocks or slots the cache has.
        size: bytes of one.
        device: where the cache will be.

    Raises:
        CacheError: the count isn't a positive integer.
        RoomError: the device has too little memory.

    Examples:
        >>> with room("num_blocks", 2, 4096, torch.device("cpu")):
        ...     cache = torch.empty(2, 4096, dtype=torch.uint8)

    """
    if type(count) is not int or count <= 0:
        raise CacheError(f"{field}={count!r} must be a positive integer")
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # of a size past 64 bits, a TypeError
        needed, free = count * size, free_bytes(device)
        there, why = f"on {device}", f" ({describe(error)})"
        if free is not None:
            there = f"and {device} has {free / 2**30:,.3g} free"
            if needed > free:
                why = f" to {free // size} or less"
            elif not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
        raise RoomError(
            f"{field}={count} needs {needed / 2**30:,.6g} GiB {there}; lower {field}{why}"
        ) from error


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory a device has left; None where there is no common way to ask."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        left = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # not Linux
        return None
    return int(left[1]) << 10 if left else None
