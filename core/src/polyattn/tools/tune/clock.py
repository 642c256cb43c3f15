"""How long does a call take? On a GPU device time with a cold L2, elsewhere the least of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20
"""Several times the L2 of any GPU."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._scratch: torch.Tensor | None = None
        if device.type == "cuda":
            self._scratch = torch.empty(FLUSH_BYTES // 4, device=device)

    def us(self, call: Callable[[], object], budget_ms: float = 20.0) -> float:
        """Return microseconds of `call`, of 3 to 15 runs, of one where that is far over the budget.

        GPU: the median of device times. While the L2 is emptied the host gets the call enqueued, so
        that only device time lies between the events. CPU: the least, since whoever shares the
        processor only ever adds.
        """
        self._once(call)  # compiles, where something is compiled
        first = self._once(call)
        if first > 10 * budget_ms * 1e3:  # hopeless, and not worth as long again
            return first
        runs = max(3, min(15, int(budget_ms * 1e3 / max(first, 1.0))))
        times = [self._once(call) for _ in range(runs)]
        return statistics.median(times) if self._scratch is not None else min(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self._scratch is None:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        scratch = self._scratch
        return between_events(call, lambda: empty_l2(scratch))


def empty_l2(scratch: torch.Tensor) -> None:
    """Write and read a buffer much larger than the L2.

    Read last, since lines that were written are stored while the next kernel runs: up to 8 us of its
    time on an H200.
    """
    scratch.zero_()
    scratch.fill_(1)
    scratch.sum()


def between_events(call: Callable[[], object], before: Callable[[], None]) -> float:
    """Return the microseconds between events around `call`, after `before`."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
