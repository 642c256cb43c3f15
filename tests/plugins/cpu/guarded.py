"""Memory behind whose end nothing may be read: a page that the process can't touch."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def at_an_end(tensor: Tensor) -> Tensor:
    """Return the same values, whose last byte is the last before a page that nobody may touch.

    A kernel that reads or writes behind the tensor ends the process by a signal.
    """
    size = tensor.numel() * tensor.itemsize
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(begin + room), ctypes.c_size_t(mmap.PAGESIZE), 0
    )
    held = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)
    copy = held.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
