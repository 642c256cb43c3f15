"""Is a late host told from a slow device?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from polyattn.workload import clock
from polyattn.workload.clock import Clock, device_us


class Machine:
    """A host and a device with clocks of their own, in microseconds; a pass over the scratch takes 70."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.host = self.device = 0.0
        self.passes = 0
        machine = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = machine.device = max(machine.device, machine.host)

            def query(self) -> bool:
                return self.at <= machine.host

            def synchronize(self) -> None:
                machine.host = max(machine.host, self.at)

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        self.timed_on: set[object] = set()

        def device(which: object) -> nullcontext[None]:
            self.timed_on.add(which)
            return nullcontext()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", device)

    def kernel(self, us: float, host_us: float = 1.0) -> None:
        self.host += host_us
        self.device = max(self.device, self.host) + us

    def __getattr__(self, name: str) -> Callable[..., None]:
        def over_scratch(*_: Any) -> None:
            self.passes += 1
            self.kernel(70.0)

        assert name in ("zero_", "fill_", "sum")
        return over_scratch


@pytest.mark.parametrize(("host_us", "passes"), [(1.0, 3), (300.0, 9), (1000.0, 45), (3000.0, 93)])
def test_device_time_is_the_devices(
    monkeypatch: pytest.MonkeyPatch, host_us: float, passes: int
) -> None:
    """Whatever the host takes, as long as the emptied L2 can hide it."""
    machine = Machine(monkeypatch)
    found = device_us(lambda: machine.kernel(25.0, host_us), machine)  # type: ignore[arg-type]
    assert found == pytest.approx(25.0) and machine.passes == passes


def test_a_host_that_is_always_late_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found = device_us(lambda: machine.kernel(25.0, 1e6), machine)  # type: ignore[arg-type]
    assert found > 1e5 and machine.passes == 3 * (2 * clock.MOST_LAPS - 1)


def test_one_late_run_among_others_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    taken = iter([1.0] * 4 + [900.0] + [1.0] * 40)
    found = Clock(torch.device("cpu"))
    found._scratch, found.device = machine, torch.device("cuda", 1)  # type: ignore[assignment]
    assert found.us(lambda: machine.kernel(2000.0, next(taken))) == pytest.approx(2000.0)
    assert machine.timed_on == {found.device}  # whichever is current: events are of that
