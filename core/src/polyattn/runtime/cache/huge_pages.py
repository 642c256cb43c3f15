"""Huge pages under a cache in a host's memory.

A decode reads keys from all over a cache. With pages of 4 KB it waits for addresses: most of its blocks
have no entry in the processor's table of translations.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

LEAST = 4 << 20
"""Bytes. A tensor of twice a huge page's 2 MB contains a whole one, wherever the tensor begins."""


@cache
def _madvise() -> Any:
    """Return the C library's function; None where the system has no such advice (Linux has)."""
    return ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Return a new tensor, whose memory the system may back with huge pages when it is first written.

    polyattn asks for them only for 4 MB or more of the host's memory. A system that has none left, or
    has them off (`/sys/kernel/mm/transparent_hugepage/enabled`), keeps its small pages.

    Args:
        tensor: contiguous, fresh from `torch.empty`.

    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return tensor  # a fake tensor has no address
    size = tensor.numel() * tensor.itemsize
    if size >= LEAST and (madvise := _madvise()) is not None:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor
