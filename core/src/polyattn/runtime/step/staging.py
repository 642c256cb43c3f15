"""How do a captured step's numbers reach the device? In one launch, from page-locked memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import raw
from polyattn.runtime.step.integers import page_locked, upload

ROOM = 4096
"""Numbers for plans, beside the step's own: 16 KiB. What finds no room there is copied apart."""


SHEETS = 8
"""Of a book: to record an event and to ask for it takes an H200's host 2.5 us."""
MOST_TOGETHER = 8192
"""Numbers up to which tensors share a launch: torch's has one program for 65,536 of a tensor."""


class Sheet(NamedTuple):
    """Numbers on the host: a tensor, page-locked where a GPU reads it, and a NumPy view of it.

    `runs`: by first and last place, the views of what was copied: to where, and from here, as the
    device sees it; long ones in pieces.
    """

    tensor: Tensor
    numbers: np.ndarray[Any, np.dtype[np.int32]]
    runs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]]


class Book(NamedTuple):
    """Sheets that serve one after another, and an event behind the last one's copy.

    `copied` is None where copies end at once.
    """

    sheets: list[Sheet]
    copied: Any


class Staging:
    """int32 numbers that a captured step's kernels read, on their way from the host.

    `room` allocates on the device, `put` writes on the host, and `send` copies what was put, with other
    tensors in one launch. A GPU copies later, so `put` writes to a sheet that no copy reads
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
        self._used = 0
        self._places: dict[int, tuple[int, int]] = {}  # by a room's address, where it lies
        self._books: deque[Book] = deque()
        self._book: Book | None = None
        self._turn = 0  # the sheet of the book that is next
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

    def send(self, beside: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """Copy what was put to the device, on its current stream.

        Args:
            beside: pairs of tensors on the device; into the first of each the second is copied.

        """
        sheet = self._sheet
        if sheet is None:
            copy_together(beside)
            return
        pairs = list(beside)
        for run in self._runs:
            views = sheet.runs.get(run)
            if views is None:
                begins = range(*run, MOST_TOGETHER)
                pieces = [slice(at, min(at + MOST_TOGETHER, run[1])) for at in begins]
                views = sheet.runs[run] = [(self._there[p], sheet.tensor[p]) for p in pieces]
            if sheet.tensor.device.type == self.device.type:
                pairs += views
                continue
            for goal, source in views:
                goal.copy_(source, non_blocking=True)
        self._runs, self._sheet = [], None
        copy_together(pairs)

    def drop(self) -> None:
        """Forget what was put and not sent, such as of a step that was refused."""
        if self._runs:
            self._runs = []
            self.dropped += 1

    def _take(self) -> Sheet:
        """Return a sheet that no copy reads: of a book that is read, or of a new one."""
        book = self._book
        if book is None or self._turn == len(book.sheets):
            book = self._book = self._next(book)
            self._turn = 0
        sheet = self._sheet = book.sheets[self._turn]
        self._turn += 1
        return sheet

    def _next(self, book: Book | None) -> Book:
        """Return a book that no copy reads; `book` is full."""
        books = self._books
        if book is not None:
            if book.copied is not None:
                book.copied.record(torch.cuda.current_stream(self.device))
            books.append(book)
        if books and (books[0].copied is None or books[0].copied.query()):
            return books.popleft()
        sheets = []
        for _ in range(SHEETS):
            host = page_locked(len(self._there), self.device)
            sheets.append(Sheet(seen_by(self.device, host), host.numpy(), {}))
        return Book(sheets, self._event and self._event())


class Memory:
    """A host's tensor as torch takes any device's memory. It lives as long as a view of it."""

    def __init__(self, host: Tensor):
        self.host = host
        shape, address = tuple(host.shape), (host.data_ptr(), False)
        told = {"shape": shape, "typestr": "<i4", "data": address, "version": 3}
        self.__cuda_array_interface__ = told


def seen_by(device: torch.device, host: Tensor) -> Tensor:
    """Return int32 of page-locked memory as NVIDIA's kernels read it, where it lies; elsewhere itself."""
    if device.type == "cpu" or torch.version.hip:
        return host
    seen = torch.as_tensor(Memory(host), device=device)
    return seen if seen.data_ptr() == host.data_ptr() else host  # which another GPU's may not be


def copy_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second, of as many numbers: what is short in one launch.

    torch has one launch for tensors of one dtype that lie alike. Goals in int32 take int64 so.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for goal, source in pairs:
        dtype, alike = goal.dtype, source.is_contiguous() and goal.is_contiguous()
        if source.dtype is not dtype:
            if alike:
                source = source.view(dtype)
            else:
                goal = goal.view(source.dtype)
        if not alike or goal.numel() > MOST_TOGETHER:
            goal.copy_(source)
            continue
        if goal.dim() != source.dim():  # of one row
            source = source.view(-1)
        if dtype.itemsize == 1:
            goal, source = raw(goal), raw(source)
        goals, sources = by_dtype.setdefault(dtype, ([], []))
        goals.append(goal)
        sources.append(source)
    for goals, sources in by_dtype.values():
        torch._foreach_copy_(goals, sources)
