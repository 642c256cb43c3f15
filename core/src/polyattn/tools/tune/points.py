"""What was measured so far? Points in a file of JSON lines, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyattn.errors import SettingsError
from polyattn.selection.dealing import deals_of
from polyattn.selection.prediction import shape_of_step
from polyattn.spec.layer import LayerSpec
from polyattn.tools.tune.fitting import Point
from polyattn.tools.tune.shapes import StepSample


@dataclass(frozen=True)
class Measurement:
    """One step of one layer on one backend: `us` and `host` (`Times`), or why not (`cannot`)."""

    spec: LayerSpec
    step: int
    sample: StepSample
    backend: str
    us: float | None = None
    host: float = 0.0
    cannot: str = ""

    def point(self, processors: int = 0, kind: str = "") -> Point:
        """Return the measurement as the fit sees it, on a chip of so many processors, if known.

        `kind`: of the model that is fitted, unless it is the step's.
        """
        assert self.us is not None
        ways = deals_of(self.spec, kind or self.sample.kind) if processors else ()
        deals = dict.fromkeys(ways, processors)
        shape = shape_of_step(self.spec, self.sample.queries, self.sample.lens, deals=deals)
        return Point(self.spec, shape, self.us, self.step)


class PointsFile:
    """Measurements on disk. The first line names the machine; those of another machine are refused."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path = path
        self.found: dict[tuple[LayerSpec, int, str], Measurement] = {}
        if path.exists():
            self._read(facts)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"facts": facts})

    def _read(self, facts: dict[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        remedy = f"{self.path}: measured under other conditions; remove it, or name another --out"
        try:
            theirs = json.loads(lines[0])["facts"]
            for name, value in facts.items():
                if theirs.get(name) != value:
                    raise SettingsError(f"{remedy} ({name}: {theirs.get(name)}, now {value})")
            for line in lines[1:]:
                if line.endswith("}"):  # the last one may have been cut short
                    point = _measurement(json.loads(line))
                    self.found[point.spec, point.step, point.backend] = point
        except (IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(
                f"{self.path}: is no file of points ({error}); remove it"
            ) from error

    def start(self, spec: LayerSpec, step: int, sample: StepSample, backend: str) -> None:
        """Record the next measurement. If the process dies in it, later runs skip it."""
        self.add(Measurement(spec, step, sample, backend, cannot="the process ended in it"))

    def add(self, made: Measurement) -> None:
        """Keep a measurement, on disk at once."""
        self.found[made.spec, made.step, made.backend] = made
        self._write(asdict(made) | {"spec": made.spec.to_dict()})

    def _write(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def measured(self) -> Iterator[Measurement]:
        """Every measurement that has a time."""
        return (m for m in self.found.values() if m.us is not None)

    def failed(self) -> Iterator[Measurement]:
        """Every measurement that has none."""
        return (m for m in self.found.values() if m.us is None)


def _measurement(value: dict[str, Any]) -> Measurement:
    fields = value["sample"]
    sample = StepSample(
        fields["kind"], fields["lengths"], tuple(fields["queries"]), tuple(fields["lens"])
    )
    spec = LayerSpec.from_dict(value["spec"])
    rest = {name: value[name] for name in ("step", "backend", "us", "host", "cannot")}
    return Measurement(spec, sample=sample, **rest)
