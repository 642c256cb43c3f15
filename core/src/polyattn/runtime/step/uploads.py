"""How do an eager plan's numbers reach the device? Lengths and work lists in one copy, at its end.

A plan writes them to page-locked memory, and knows at once where they will lie on the device. Neither
memory is allocated anew for each plan.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.integers import page_locked

PLACES = 1024
"""Numbers of an upload, 4 KiB; what has no room there has memory of its own."""
TOGETHER = 4
"""Uploads whose memory on the device is allocated together, and is freed when nobody holds any."""
SHEETS = 4
"""Of page-locked memory that one event frees: to record it and to ask for it takes a host 2.5 us."""

Numbers = np.ndarray[Any, Any]


class Sheet(NamedTuple):
    """Page-locked memory: a tensor, and a NumPy view of it."""

    tensor: Tensor
    numbers: Numbers


class Upload:
    """Numbers on their way to `there`: `put` takes some, until `send` copies them.

    `pool`: where the sheet goes back to; None: to nobody.
    """

    __slots__ = ("_pool", "_sheet", "_used", "address", "there")

    def __init__(self, there: Tensor, address: int, sheet: Sheet, pool: Pool | None = None):
        self.there, self.address, self._pool = there, address, pool
        self._sheet: Sheet | None = sheet
        self._used = 0

    def put(self, numbers: Numbers) -> Place | None:
        """Write integers behind those before them, at a multiple of 16 bytes; None: there is no room."""
        sheet, start = self._sheet, self._used
        if sheet is None or start + len(numbers) > len(sheet.numbers):
            return None
        sheet.numbers[start : start + len(numbers)] = numbers
        self._used = -(-(start + len(numbers)) // 4) * 4
        return Place(self, start, len(numbers))

    def send(self) -> None:
        """Copy what was put, on the device's current stream, once."""
        sheet = self._sheet
        if sheet is not None:
            self._sheet = None
            self.there.copy_(sheet.tensor, non_blocking=True)
            if self._pool is not None and self._pool.is_current():
                self._pool.give_back(sheet)


class Place:
    """Where some numbers will lie on the device. It keeps that memory.

    Attributes:
        address: of the first number.

    Args:
        upload: what takes them there; None: they are there.
        start: their place in it.
        count: how many they are.
        tensor: int32 (count,), which holds them.

    Examples:
        >>> Place.of(torch.tensor([3, 1], dtype=torch.int32)).tensor.tolist()
        [3, 1]

    """

    __slots__ = ("_count", "_start", "_tensor", "_upload", "address")

    def __init__(self, upload: Upload | None, start: int, count: int, tensor: Tensor | None = None):
        self._upload, self._start, self._count, self._tensor = upload, start, count, tensor
        if upload is not None:
            self.address = upload.address + 4 * start
        elif tensor is not None:
            self.address = tensor.data_ptr()

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return where numbers lie that are on the device already.

        Args:
            tensor: int32 (n,), which holds them.

        """
        return cls(None, 0, tensor.numel(), tensor)

    @property
    def tensor(self) -> Tensor:
        """int32 (count,), which holds the numbers: they are sent, if they weren't."""
        upload, tensor = self._upload, self._tensor
        if upload is not None:
            upload.send()
            if tensor is None:
                tensor = upload.there[self._start : self._start + self._count]
                self._tensor = tensor
        assert tensor is not None
        return tensor


class Pool:
    """A thread's memory for uploads to one device, on one stream. It never waits.

    The device copies a sheet later, so it serves again once an event behind its copy has passed.
    """

    def __init__(self, index: int, stream: int):
        self.device, self.stream = torch.device("cuda", index), stream
        self._stream: Any = None  # torch's object for it
        self._there: list[tuple[Tensor, int]] = []
        self._sheets: list[Sheet] = []
        self._sent: list[Sheet] = []
        self._copied: deque[tuple[Any, list[Sheet]]] = deque()

    def take(self) -> Upload:
        """Return an upload of `PLACES` numbers."""
        if not self._there:
            many = _on_device(TOGETHER * PLACES, self.device).split(PLACES)
            self._there = [(each, each.data_ptr()) for each in many]
        if not self._sheets:
            self._sheets = self._free()
        return Upload(*self._there.pop(), self._sheets.pop(), self)

    def give_back(self, sheet: Sheet) -> None:
        """Take a sheet whose copy was queued."""
        self._sent.append(sheet)
        if len(self._sent) >= SHEETS:
            self._copied.append((self._event(), self._sent))
            self._sent = []

    def is_current(self) -> bool:
        """Whether work is queued on this pool's stream: what a refused plan left may go another way."""
        current = _current_stream(self.device.index) == self.stream
        return current and not torch.cuda.is_current_stream_capturing()

    def _event(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.current_stream(self.device)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _free(self) -> list[Sheet]:
        """Return sheets that no copy reads: of the oldest ones, or new ones."""
        if self._copied and self._copied[0][0].query():
            return self._copied.popleft()[1]
        many = page_locked(SHEETS * PLACES, self.device).split(PLACES)
        return [Sheet(each, each.numpy()) for each in many]


# Without an object for the stream: a tenth of what that takes.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Pools(threading.local):
    """A thread's pools, by the device's index and the stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], Pool] = {}


_pools = Pools()


def new_upload(device: torch.device, size: int) -> Upload:
    """Return an upload of at least `size` numbers to a device's current stream.

    What is large, or part of a capture or a trace, has memory that is nobody else's.
    """
    usual = device.type == "cuda" and size <= PLACES and not torch._C._len_torch_dispatch_stack()
    if usual and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device() if device.index is None else device.index
        key = index, _current_stream(index)
        pool = _pools.by_stream.get(key)
        if pool is None:
            pool = _pools.by_stream[key] = Pool(*key)
        return pool.take()
    there, host = _on_device(size, device), page_locked(size, device)
    return Upload(there, there.data_ptr(), Sheet(host, host.numpy()))


def _on_device(size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # else no later plan, outside of that mode, may write to it
        return torch.empty(size, dtype=torch.int32, device=device)


class Outgoing(threading.local):
    """What the plan that a thread makes has put on its way; without one numbers are sent at once.

    It is the thread's, not a batch's: plans make batches of their own. `plans`: that it is making, one
    within another.
    """

    def __init__(self) -> None:
        self.uploads: list[Upload] = []
        self.device: torch.device | None = None  # of the last one
        self.plans = 0

    def put(self, device: torch.device, *arrays: Numbers) -> list[Place]:
        """Add integers, and return where they will lie."""
        uploads, places = self.uploads, []
        for numbers in arrays:
            place = None
            if uploads and self.device == device:
                place = uploads[-1].put(numbers)
            if place is None:
                # Behind many rows' starts there is room for their lengths, and a work list.
                count = len(numbers)
                uploads.append(new_upload(device, PLACES if 2 * count <= PLACES else 4 * count))
                self.device = device
                place = uploads[-1].put(numbers)
            assert place is not None
            places.append(place)
        if not self.plans:
            self.send()
        return places

    def send(self) -> None:
        """Copy all that is on its way."""
        for each in self.uploads:
            each.send()
        self.uploads.clear()


outgoing = Outgoing()
