"""Measures all candidates on this machine's device, step by step, until all is done or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyattn.api import select
from polyattn.device import Device
from polyattn.errors import SelectionError
from polyattn.registry.discovery import discover
from polyattn.registry.installed import Registry
from polyattn.selection.selection import Selection
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec
from polyattn.tools.lengths import Lengths
from polyattn.tools.tune.fitting import LEAST_POINTS
from polyattn.tools.tune.measuring import Measured, attending, pool_bytes, size_for
from polyattn.tools.tune.points import Measurement, PointsFile
from polyattn.tools.tune.shapes import Size, StepSample, counts_of, samples
from polyattn.tools.tune.tables import packages_of, versions_of
from polyattn.workload.clock import Clock

SEED = 13
LEAVE_OUT = ("FLEX_ATTENTION",)
"""Compiles for minutes; measured where it is named."""
MOST_FAILURES = 4
"""A backend that fails so many steps of a kind, and serves none, gets no more steps of that kind."""
HOPELESS, ENOUGH = 5, 2 * LEAST_POINTS
"""A backend that took over 5 times the best's at each of so many steps isn't asked again: enough
for a model of its own, by which it loses."""
Progress = Callable[[str, int, int], None]
"""(what is measured, steps done, steps in all)."""


def left_out(named: Collection[str]) -> tuple[str, ...]:
    """Return the backends to leave out: all except the named ones, or those that compile slowly."""
    if not named:
        return LEAVE_OUT
    return tuple(name for name in discover().backends if name not in named)


@dataclass
class Tally:
    """A backend's results at one kind of step."""

    failed: int = 0
    measured: int = 0
    beaten: int = 0


class Tuning:
    """Measures layers' candidates in turns, so that an early stop leaves some of everything."""

    def __init__(
        self,
        device: Device,
        points: PointsFile,
        traces: Mapping[str, Lengths],
        leave_out: Collection[str] = LEAVE_OUT,
        seed: int = SEED,
    ):
        self.device, self.points, self.traces = device, points, traces
        self.leave_out, self.seed = leave_out, seed
        torch.manual_seed(seed)
        self.clock = Clock(torch.device(str(device.torch_device)))
        self.notes: list[str] = []
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._hopeless: set[tuple[str, str]] = set()

    def run(self, layers: Sequence[LayerSpec], seconds: float, progress: Progress) -> None:
        """Measure what isn't measured yet. After an interruption, it continues."""
        end = time.perf_counter() + seconds
        room = pool_bytes(self.device)
        work: dict[LayerSpec, tuple[Selection, Size, list[StepSample]]] = {}
        for spec in layers:
            selection = self._selection(spec)
            if selection is not None:
                size = size_for(spec, self.device, room)
                steps = list(samples(size, self.seed, self.traces, counts_of(spec)))
                work[spec] = selection, size, steps
        rounds = max((len(steps) for _, _, steps in work.values()), default=0)
        ready: dict[LayerSpec, Measured] = {}
        for index in range(rounds):
            for spec, (selection, size, steps) in work.items():
                if index >= len(steps):
                    continue
                progress(str(spec), index, rounds)
                names = self._names(selection)
                if self._missing(spec, index, steps[index].kind, names):
                    if time.perf_counter() > end:
                        self.notes.append(f"time is up after {index} of {rounds} rounds; run again")
                        return
                    if spec not in ready:
                        ready[spec] = Measured(selection, self.clock, size, self.leave_out)
                        self.notes += [f"{n}: {why}" for n, why in ready[spec].cannot.items()]
                    self._step(ready[spec], index, steps[index])
                self._tally(spec, index, steps[index].kind, names)

    def _selection(self, spec: LayerSpec) -> Selection | None:
        """Select by priority, over all candidates: no earlier table may speak for its successor."""
        try:
            selection = select(spec, self.device, settings=current_settings().without_timings())
        except SelectionError as error:
            self.notes.append(str(error).splitlines()[0])
            return None
        names = self._names(selection)
        plain = spec.stored_dtype == spec.dtype and not spec.batch_invariant
        if len(names) < 2 and plain:  # a format's cost, and a level's, is worth knowing
            self.notes.append(f"{spec}: {', '.join(names)} alone; nothing to choose")
            return None
        return selection

    def _names(self, selection: Selection) -> list[str]:
        return [name for name in attending(selection) if name not in self.leave_out]

    def _missing(self, spec: LayerSpec, step: int, kind: str, names: Collection[str]) -> list[str]:
        return [
            name
            for name in names
            if (spec, step, name) not in self.points.found and (kind, name) not in self._hopeless
        ]

    def _step(self, measured: Measured, step: int, sample: StepSample) -> None:
        spec = measured.spec
        for name in self._missing(spec, step, sample.kind, measured.layers):
            self.points.start(spec, step, sample, name)
            for _, result in measured.times(sample, [name]):
                outcome: dict[str, Any] = (
                    {"cannot": result} if isinstance(result, str) else result._asdict()
                )
                self.points.add(Measurement(spec, step, sample, name, **outcome))

    def _tally(self, spec: LayerSpec, step: int, kind: str, names: Collection[str]) -> None:
        """Count which backends failed a step or were beaten by far; one that always was is dropped."""
        measurements = [m for name in names if (m := self.points.found.get((spec, step, name)))]
        best = min((m.us for m in measurements if m.us is not None), default=0.0)
        for m in measurements:
            key = (kind, m.backend)
            tally = self._tallies.setdefault(key, Tally())
            tally.failed += m.us is None
            tally.measured += m.us is not None
            tally.beaten += m.us is not None and m.us > HOPELESS * best
            if tally.failed >= MOST_FAILURES and not tally.measured:
                self._hopeless.add(key)
            elif tally.measured == tally.beaten >= ENOUGH and key not in self._hopeless:
                self._hopeless.add(key)
                self.notes.append(
                    f"{m.backend}: over {HOPELESS} times the best at {ENOUGH} {kind} steps; left out"
                )


def facts_of(device: Device, registry: Registry, seed: int, trace: Path) -> dict[str, Any]:
    """Return the conditions that points are of: others' points are no continuation of these."""
    here = [
        packages_of(registry, info.name)
        for info in registry.backends.values()
        if device.platform in info.capabilities.platforms
    ]
    return {
        "platform": device.platform,
        "device": device.name,
        "versions": versions_of(name for names in here for name in names),
        "seed": seed,
        "trace": trace.name,
    }


def points_path(table: Path) -> Path:
    """Return where the points behind a table lie."""
    return table.with_suffix(".points.jsonl")
