"""What is written? One JSON table: models by layer class, with what they were measured with."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.registry.discovery import Registry
from polyattn.registry.requirements import requirement_name
from polyattn.registry.timings import FORMAT, layer_class
from polyattn.spec.timing import TERMS
from polyattn.tools.tune.fitting import Fit, fit
from polyattn.tools.tune.points import Measurement

Key = tuple[tuple[tuple[str, Any], ...], str, str]
"""A layer class, a kind of step, a backend."""


def fits(measurements: Iterable[Measurement]) -> dict[Key, tuple[Fit, list[Measurement]]]:
    """Return a fit for each (layer class, kind, backend) that has points enough."""
    groups: dict[Key, list[Measurement]] = defaultdict(list)
    for m in measurements:
        key = (tuple(sorted(layer_class(m.spec).items())), m.sample.kind, m.backend)
        groups[key].append(m)
    found = {}
    for key, members in groups.items():
        made = fit([m.point for m in members])
        if made is not None:
            found[key] = (made, members)
    return found


def regrets(found: dict[Key, tuple[Fit, list[Measurement]]]) -> dict[str, list[float]]:
    """Return, by kind, what choosing by held-out predictions costs: chosen over best, each step."""
    times: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (_, kind, _), (made, members) in found.items():
        for m, predicted in zip(members, made.held_out, strict=True):
            assert m.us is not None
            times[kind, m.spec, m.step].append((predicted, m.us))
    costs: dict[str, list[float]] = defaultdict(list)
    for (kind, _, _), rows in times.items():
        if len(rows) > 1:
            costs[kind].append(min(rows)[1] / min(us for _, us in rows))
    return costs


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(
    found: dict[Key, tuple[Fit, list[Measurement]]], device: Device, registry: Registry
) -> dict[str, Any]:
    """Return the table as JSON values."""
    backends = sorted({backend for _, _, backend in found})
    of = {name: packages_of(registry, name) for name in backends}
    return {
        "format": FORMAT,
        "device": {"platform": device.platform, "arch": device.arch, "name": device.name},
        "measured": str(date.today()),
        "versions": versions_of(name for names in of.values() for name in names),
        "models": [
            {
                "backend": backend,
                "kind": kind,
                "layer": dict(layer),
                "of": of[backend],
                "overlap": made.overlap,
                "coefficients": {
                    term: float(f"{value:.6g}")
                    for term, value in zip(TERMS, made.coefficients, strict=True)
                },
                "error": round(made.error, 4),
                "points": len(members),
            }
            for (layer, kind, backend), (made, members) in sorted(
                found.items(), key=lambda item: str(item[0])
            )
        ],
    }


def packages_of(registry: Registry, backend: str) -> list[str]:
    """Return whose versions a backend's times depend on: its plugin, and its library or else torch."""
    info, owner = registry.backends[backend], registry.owners[backend]
    libraries = [name for text in info.requires if (name := requirement_name(text))]
    return [name for name in (owner.dist, *(libraries or ["torch"])) if _installed(name)]


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of packages."""
    return {name: metadata.version(name) for name in sorted(set(names))}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def write(data: dict[str, Any], path: Path) -> None:
    """Write a table whole or not at all: who reads it meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
