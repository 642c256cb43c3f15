"""A device that does what is asked of it when a test says so, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LateDevice:
    """What is queued on it, how much was queued, and how much of that it has done."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.ended = self.queued = 0

    def do(self, action: Callable[[], Any]) -> None:
        self.queue.append(action)
        self.queued += 1

    def run(self, count: int | None = None) -> None:
        for action in self.queue[:count]:
            action()
            self.ended += 1
        self.queue = [] if count is None else self.queue[count:]

    def event(self) -> Any:
        device = self

        class Event:
            at = 0

            def record(self, stream: object) -> None:
                self.at = device.queued

            def query(self) -> bool:
                return device.ended >= self.at

        return Event()
