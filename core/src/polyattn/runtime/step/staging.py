"""How do a captured step's numbers reach the device? In one copy, from page-locked memory of its own."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.integers import upload

ROOM = 4096
"""Numbers for plans, beside the step's own: 16 KiB. What finds no room there is copied apart."""


class Sheet(NamedTuple):
    """Numbers on the host: a tensor, page-locked where a GPU copies from it, and a NumPy view of it.

    `copied`: an event behind the last copy; None where copies end at once. `runs`: by first and last
    place, the views of what was copied: to where, and from here.
    """

    tensor: Tensor
    numbers: np.ndarray[Any, np.dtype[np.int32]]
    copied: Any
    runs: dict[tuple[int, int], tuple[Tensor, Tensor]]


class Staging:
    """int32 numbers that a captured step's kernels read, on their way from the host.

    `room` allocates on the device, `put` writes on the host, and `send` copies what was put: in one
    launch, for what lies side by side. A GPU copies later, so `put` writes to a sheet that no copy reads
    any more, or to a new one. It never waits.

    Args:
        device: where the numbers go.
        size: room for so many.

    Examples:
        >>> staging = Staging(torch.device("cpu"), 16)
        >>> first, second = staging.room(3), staging.room(2)
        >>> staging.put(first, np.array([1, 2, 3])), staging.put(second, np.array([4]))
        (None, None)
        >>> staging.send()
        >>> first.tolist(), second.tolist()
        ([1, 2, 3], [4, 0])

    """

    def __init__(self, device: torch.device, size: int):
        self.device = device
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        self._event: Any = torch.cuda.Event if device.type == "cuda" else None
        self._streams: dict[int, Any] = {}
        self._used = 0
        self._places: dict[int, tuple[int, int]] = {}  # by a room's address, where it lies
        self._sheets: deque[Sheet] = deque()
        self._sheet: Sheet | None = None
        self._runs: list[tuple[int, int]] = []
        self.dropped = 0
        """How often `drop` forgot what was put."""

    def room(self, count: int) -> Tensor:
        """Return int32 (count,) on the device, zeros. Its address is a multiple of 16.

        Args:
            count: numbers of the room.

        """
        start, stop = self._used, self._used + -(-max(count, 1) // 4) * 4
        if stop > len(self._there):
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        self._used = stop
        room = self._there[start : start + count]
        self._places[room.data_ptr()] = start, stop
        return room

    def put(self, room: Tensor, numbers: np.ndarray[Any, Any]) -> None:
        """Write the first numbers of a room; those after them may become any.

        Args:
            room: what `room` returned, or another buffer, to which they are copied at once.
            numbers: integers, as many as the room has at most.

        """
        place = self._places.get(room.data_ptr())
        if place is None:
            upload(numbers.astype(np.int32), self.device, room[: len(numbers)])
            return
        start, stop = place
        sheet = self._sheet or self._take()
        sheet.numbers[start : start + len(numbers)] = numbers
        if self._runs and self._runs[-1][1] == start:
            self._runs[-1] = self._runs[-1][0], stop
        else:
            self._runs.append(place)

    def send(self) -> None:
        """Copy what was put to the device, on its current stream."""
        sheet = self._sheet
        if sheet is None:
            return
        for run in self._runs:
            views = sheet.runs.get(run)
            if views is None:
                views = sheet.runs[run] = self._there[slice(*run)], sheet.tensor[slice(*run)]
            views[0].copy_(views[1], non_blocking=self._event is not None)
        self._runs, self._sheet = [], None
        if sheet.copied is not None:
            sheet.copied.record(self._stream())
        self._sheets.append(sheet)

    def drop(self) -> None:
        """Forget what was put and not sent, such as of a step that was refused."""
        if self._runs:
            self._runs = []
            self.dropped += 1

    def _stream(self) -> Any:
        """Return the current stream: torch's own takes as long for it as a launch."""
        device = self._there.device
        address = torch._C._cuda_getCurrentRawStream(device.index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(device)
        return stream

    def _take(self) -> Sheet:
        """Return a sheet that no copy reads."""
        sheets = self._sheets
        if sheets and (sheets[0].copied is None or sheets[0].copied.query()):
            self._sheet = sheets.popleft()
            return self._sheet
        pinned = self.device.type == "cuda"
        host = torch.zeros(len(self._there), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._sheet = Sheet(host, host.numpy(), self._event and self._event(), {})
        return self._sheet
