"""Measures all candidates on this machine's device, step by step, until all is done or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyattn.api import select
from polyattn.device import Device
from polyattn.errors import SelectionError
from polyattn.registry.discovery import Registry, discover
from polyattn.selection.selection import Selection
from polyattn.settings import current
from polyattn.spec.layer import LayerSpec
from polyattn.tools.lengths import Lengths
from polyattn.tools.tune.clock import Clock
from polyattn.tools.tune.measuring import Measured, attending, pool_bytes, size_for
from polyattn.tools.tune.points import Measurement, PointsFile
from polyattn.tools.tune.shapes import Size, StepSample, samples
from polyattn.tools.tune.tables import packages_of, versions_of

SEED = 13
LEAVE_OUT = ("FLEX_ATTENTION",)
"""Compiles for minutes; measured where it is named."""
MOST_FAILURES = 2
"""Steps of a kind that a backend may fail before it is asked no more of that kind."""
HOPELESS, ENOUGH = 5, 4
"""A backend that took over 5 times the best's time at each of its first 4 steps isn't asked again."""
Progress = Callable[[str, int, int], None]
"""(what is measured, steps done, steps in all)."""


def left_out(named: Collection[str]) -> tuple[str, ...]:
    """Return who isn't measured: all others where some were named, else who compiles for minutes."""
    if not named:
        return LEAVE_OUT
    return tuple(name for name in discover().backends if name not in named)


class Tuning:
    """Measures layers' candidates in turns, so that whoever stops early has some of everything."""

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
        self._rivals: dict[LayerSpec, list[str]] = {}
        self._hopeless: set[tuple[LayerSpec, str, str]] = set()

    def run(self, layers: Sequence[LayerSpec], seconds: float, progress: Progress) -> None:
        """Measure what isn't measured yet. Interrupted, it goes on where it was."""
        end = time.perf_counter() + seconds
        room = pool_bytes(self.device, len(layers))
        work: dict[LayerSpec, tuple[Selection, Size, list[StepSample]]] = {}
        for spec in layers:
            selection = self._selection(spec)
            if selection is not None:
                size = size_for(spec, self.device, room)
                work[spec] = selection, size, list(samples(size, self.seed, self.traces))
        rounds = max((len(steps) for _, _, steps in work.values()), default=0)
        ready: dict[LayerSpec, Measured] = {}
        for index in range(rounds):
            for spec, (selection, size, steps) in work.items():
                progress(str(spec), index, rounds)
                if index >= len(steps) or not self._missing(spec, index, self._names(selection)):
                    continue
                if time.perf_counter() > end:
                    self.notes.append(
                        f"time is up after {index} of {rounds} rounds; run again to go on"
                    )
                    return
                if spec not in ready:
                    ready[spec] = Measured(selection, self.clock, size, self.leave_out)
                    self._rivals[spec] = list(ready[spec].layers)
                    self.notes += [f"{n}: {why}" for n, why in ready[spec].cannot.items()]
                self._step(ready[spec], index, steps[index])

    def _selection(self, spec: LayerSpec) -> Selection | None:
        """Select by priority, over all candidates: no earlier table may speak for its successor."""
        try:
            selection = select(spec, self.device, settings=current().without_timings())
        except SelectionError as error:
            self.notes.append(str(error).splitlines()[0])
            return None
        names = self._names(selection)
        if len(names) < 2:
            self.notes.append(f"{spec}: {', '.join(names)} alone; nothing to choose")
            return None
        return selection

    def _names(self, selection: Selection) -> list[str]:
        return [name for name in attending(selection) if name not in self.leave_out]

    def _missing(self, spec: LayerSpec, step: int, names: Collection[str]) -> list[str]:
        return [name for name in names if (spec, step, name) not in self.points.found]

    def _step(self, measured: Measured, step: int, sample: StepSample) -> None:
        spec = measured.spec
        for name in self._missing(spec, step, measured.layers):
            if self._given_up(spec, sample.kind, name):
                continue
            self.points.start(spec, step, sample, name)
            for _, result in measured.times(sample, [name]):
                time_or_reason: dict[str, Any] = (
                    {"cannot": result} if isinstance(result, str) else {"us": result}
                )
                self.points.add(Measurement(spec, step, sample, name, **time_or_reason))

    def _given_up(self, spec: LayerSpec, kind: str, name: str) -> bool:
        """Whether a backend fails this kind of step, or is beaten wherever it was measured."""
        if (spec, kind, name) in self._hopeless:
            return True
        failures, beaten, measured = 0, 0, 0
        for (layer, step, backend), m in self.points.found.items():
            if layer != spec or backend != name or m.sample.kind != kind:
                continue
            failures += m.us is None
            if m.us is not None:
                measured += 1
                others = (self.points.found.get((spec, step, n)) for n in self._rivals[spec])
                best = min(o.us for o in others if o is not None and o.us is not None)
                beaten += m.us > HOPELESS * best
        if failures < MOST_FAILURES and not (measured == beaten >= ENOUGH):
            return False
        self._hopeless.add((spec, kind, name))
        if beaten >= ENOUGH:
            self.notes.append(
                f"{name}: over {HOPELESS} times the best of {kind} for {spec}; left out"
            )
        return True


def facts_of(device: Device, registry: Registry, seed: int) -> dict[str, Any]:
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
    }


def points_path(table: Path) -> Path:
    """Return where the points behind a table lie."""
    return table.with_suffix(".points.jsonl")
