"""How long does a call take? On a GPU device time with a cold L2, elsewhere the least of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

FLUSH_BYTES = 256 << 20
"""Several times the L2 of any GPU."""
MOST_LAPS = 16
"""How often the L2 is emptied at most, so that a host that is late finds the device busy."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._scratch: torch.Tensor | None = None
        if device.type == "cuda":
            self._scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def us(self, call: Callable[[], object], budget_ms: float = 20.0) -> float:
        """Return microseconds of `call`, of 3 to 15 runs, of one where that is far over the budget.

        GPU: the median of device times (`device_us`). CPU: the least, since other users of the
        processor only add time.
        """
        self._once(call)  # compiles, where something is compiled
        first = self._once(call)
        if first > 10 * budget_ms * 1e3:  # hopeless, and not worth as long again
            return first
        runs = max(3, min(15, int(budget_ms * 1e3 / max(first, 1.0))))
        times = [self._once(call) for _ in range(runs)]
        return statistics.median(times) if self._scratch is not None else min(times)

    def host_us(self, call: Callable[[], object], calls: int = 20, rounds: int = 15) -> float:
        """Return the host's least microseconds of a call, the device done with what came before."""
        best = float("inf")
        call()
        for _ in range(rounds):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, time.perf_counter() - started)
        return best / calls * 1e6

    def _once(self, call: Callable[[], object]) -> float:
        if self._scratch is None:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        with torch.cuda.device(self.device):
            return device_us(call, self._scratch)


def repeat(
    call: Callable[[], object], device: torch.device, seconds: float, least: int = 3
) -> list[float]:
    """Return the seconds of each of many calls, warmed up, the L2 as each call leaves it."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        if device.type == "cuda":
            with torch.cuda.device(device):
                times.append(between_events(call, lambda: None)[0] / 1e6)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return times


def device_us(call: Callable[[], object], scratch: torch.Tensor) -> float:
    """Return the device's microseconds for one run of `call`, the L2 cold.

    While the L2 is emptied the host gets the call enqueued, so that only device time lies between the
    events. Where the device was there first, some of the time may be the host's. That run doesn't count,
    and the next one has twice as long. After `MOST_LAPS` a late host is taken as it is.
    """
    laps = 1
    while True:
        taken, late = between_events(call, partial(_empty, scratch, laps))
        if not late or laps >= MOST_LAPS:
            return taken
        laps *= 2


def _empty(scratch: torch.Tensor, laps: int) -> None:
    for _ in range(laps):
        empty_l2(scratch)


def empty_l2(scratch: torch.Tensor) -> None:
    """Write and read a buffer much larger than the L2.

    Read last, since lines that were written are stored while the next kernel runs: up to 8 us of its
    time on an H200.
    """
    scratch.zero_()
    scratch.fill_(1)
    scratch.sum()


def between_events(call: Callable[[], object], before: Callable[[], None]) -> tuple[float, bool]:
    """Return the current device's microseconds between events around `call`, after `before`.

    And whether the host was late: the device had reached the first one before all was enqueued.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    call()
    late = start.query()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3, late
