"""What was measured on this device? Timing tables: files of plugins and of `polyattn tune`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.errors import SettingsError
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import KINDS, TERMS, TimingModel

FORMAT = 1


@dataclass(frozen=True)
class TimingTable:
    """The models that were fitted on one device: `entries` are (what they are for, model).

    `problems` says what of the file is ignored, and why.
    """

    path: str
    platform: str
    device: str
    measured: str
    entries: tuple[tuple[tuple[tuple[str, Any], ...], TimingModel], ...]
    problems: tuple[str, ...] = ()

    def models(self, spec: LayerSpec, device: Device) -> tuple[TimingModel, ...]:
        """Return the models that speak of `spec` on `device`."""
        if (self.platform, self.device) != (device.platform, device.name):
            return ()
        return tuple(model for layer, model in self.entries if _speaks_of(dict(layer), spec))


def _speaks_of(layer: Mapping[str, Any], spec: LayerSpec) -> bool:
    """A model holds for layers of its kind, dtypes and head size, whatever their heads."""
    theirs = {
        "kind": spec.kind.value,
        "dtype": spec.dtype,
        "stored": spec.stored_dtype,
        "head_size": spec.head_size,
        "v_head_size": spec.v_head_size,
    }
    return all(theirs[name] == value for name, value in layer.items())


def read_table(path: Path) -> TimingTable:
    """Read a table; what of it doesn't fit this machine is named and left out.

    Raises `SettingsError` where the file is no table at all.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingsError(f"timing table {path}: can't be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise SettingsError(
            f"timing table {path}: format {found!r} is not {FORMAT}; measure anew: polyattn tune"
        )
    problems: list[str] = []
    stale = _stale(data.get("versions", {}))
    entries = []
    for index, entry in enumerate(data.get("models", [])):
        try:
            model = _model(entry, str(path))
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"models[{index}] is ignored: {error}")
            continue
        reason = next((stale[name] for name in entry.get("of", ()) if name in stale), None)
        if reason:
            problems.append(f"{model.backend} for {model.kind} is ignored: {reason}")
            continue
        entries.append((tuple(sorted(entry["layer"].items())), model))
    device = data.get("device", {})
    return TimingTable(
        str(path), str(device.get("platform")), str(device.get("name")),
        str(data.get("measured", "")), tuple(entries), tuple(problems),
    )  # fmt: skip


def _model(entry: Any, source: str) -> TimingModel:
    backend, kind, coefficients = entry["backend"], entry["kind"], entry["coefficients"]
    if not isinstance(backend, str) or kind not in KINDS:
        raise ValueError(f"backend={backend!r}, kind={kind!r}; a kind is one of {', '.join(KINDS)}")
    if not isinstance(entry["layer"], dict) or set(coefficients) != set(TERMS):
        raise ValueError(f"coefficients must be exactly {', '.join(TERMS)}")
    values = tuple(float(coefficients[term]) for term in TERMS)
    if not all(math.isfinite(v) and v >= 0 for v in values) or not any(values):
        raise ValueError(f"coefficients={values} must be finite, not negative, and not all zero")
    return TimingModel(backend, kind, values, float(entry.get("error", 0.0)), source)


def _stale(versions: Mapping[str, str]) -> dict[str, str]:
    """Return what is installed in another version than the one that was measured."""
    found = {}
    for name, version in versions.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"measured with {name} {version}, which is not installed"
            continue
        if here.split("+")[0] != str(version).split("+")[0]:
            found[name] = f"measured with {name} {version}; {here} is installed"
    return found


def models_for(
    tables: Iterable[TimingTable], spec: LayerSpec, device: Device
) -> tuple[TimingModel, ...]:
    """Return the models of the first table that speaks of a spec on a device."""
    return next((found for table in tables if (found := table.models(spec, device))), ())
