"""Is there room for a command's tensors? Checked before the work, not by the kernel's OOM killer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from polyattn.device import Device
from polyattn.errors import SettingsError, describe


def check_room(needed: float, what: str, device: Device, remedy: str) -> None:
    """Raise `SettingsError` when `needed` bytes are more than the device has at all."""
    total = _total(device)
    if needed > total:
        raise SettingsError(
            f"{what} needs {needed / 2**30:,.6g} GiB, and {device} has {total / 2**30:.3g}; {remedy}"
        )


@contextmanager
def said_plainly(remedy: str) -> Iterator[None]:
    """Turn an allocation that still fails into a `SettingsError` with a remedy."""
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SettingsError(f"out of memory; {remedy} ({describe(error)})") from error
    except RuntimeError as error:  # what torch's allocator of host memory raises
        if "allocate memory" not in str(error):
            raise
        raise SettingsError(f"out of memory; {remedy} ({describe(error)})") from error


def _total(device: Device) -> float:
    if device.is_accelerator:
        import torch

        name = str(device.torch_device)
        if not name.startswith("cuda"):  # torch has no common question for the others' memory
            return float("inf")
        return float(torch.cuda.get_device_properties(name).total_memory)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return float("inf")
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
