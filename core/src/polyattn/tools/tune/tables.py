"""Writes a tune's JSON table: models by layer class, with the versions that were measured."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.errors import SettingsError
from polyattn.registry.distributions import installed
from polyattn.registry.installed import Registry
from polyattn.registry.requirements import requirement_of
from polyattn.registry.timings import FORMAT, class_of_step, in_words, read_table
from polyattn.selection.dealing import SWITCHES
from polyattn.spec.timing import TERMS
from polyattn.tools.tune.fitting import Fit, Point, fit
from polyattn.tools.tune.points import Measurement

Key = tuple[tuple[tuple[str, Any], ...], str, str]
"""A layer class, a kind of step, a backend."""
MARGINS = (0.0, 0.1, 0.06, 0.15, 0.03, 0.2, 0.3, 0.5, 1.0)
"""Of equals the first counts. Margins fitted to half of an H200's layers cost the other half more than
none: of 5,909 steps 111 were above 1.10 of the best with the second first and 0.9 below, 96 without."""
ENOUGH = 0.6
"""Of the loss of margins that come first, from which on others take their place."""
LOST = 2.0
"""What a step counts to a backend that has no time of it, over the best."""


def fits(measurements: Iterable[Measurement], processors: int = 0) -> Fits:
    """Return a fit for each (layer class, kind, backend) that has points enough.

    `processors`: of the chip, where they are known.
    """
    groups: dict[Key, list[Measurement]] = defaultdict(list)
    for m in measurements:
        key = _key(m)
        groups[key].append(m)
        if m.sample.kind == "decode" and m.spec.latent is None:
            groups[key[0], "dealt", m.backend].append(m)
    points = {key: [(m, m.point(processors, key[1])) for m in some] for key, some in groups.items()}
    made = {key: fitted for key, some in points.items() if (fitted := fit([p for _, p in some]))}
    made = {key: fitted for key, fitted in made.items() if key[1] != "dealt" or fitted.form.deal}
    for layer, kind, backend in list(made):  # of such a kernel's chunks a mixed step is one
        if kind == "mixed" and (of := made.get((layer, "chunked", backend))) and of.form.deal:
            del made[layer, kind, backend]
    fits_by_key = {key: (fitted, groups[key]) for key, fitted in made.items()}
    # A way's other kernel is fitted to all steps that it takes.
    switched: dict[tuple[Key, str], list[tuple[Measurement, Point]]] = defaultdict(list)
    for (layer, kind, backend), fitted in made.items():
        deal = fitted.form.deal
        for m, point in points[layer, kind, backend] if deal in SWITCHES else ():
            key = (layer, point.shape.dealt[deal].kind or kind, backend)
            switched[key, deal].append((m, point))
    for (key, deal), some in switched.items():
        fitted = fit([point for _, point in some], deal)
        if fitted is not None:
            fits_by_key[key] = (fitted, [m for m, _ in some])
    return fits_by_key


def _key(m: Measurement) -> Key:
    of_layer = class_of_step(m.spec, m.backend, max(m.sample.lens))
    return tuple(sorted(of_layer.items())), m.sample.kind, m.backend


Fits = dict[Key, tuple[Fit, list[Measurement]]]
Margins = dict[str, float]
"""Of backends, by name."""
Step = dict[str, tuple[float, float]]
"""Of one step by backend: microseconds as predicted by others' points, and as measured."""


def _steps(by_class: Fits) -> dict[tuple[Any, str], list[Step]]:
    """Return, by layer class and kind, the steps that several backends were measured at."""
    steps: dict[Any, Step] = defaultdict(dict)
    for (layer, _, backend), (made, members) in by_class.items():
        for m, predicted in zip(members, made.held_out, strict=True):
            assert m.us is not None
            steps[layer, m.sample.kind, m.spec, m.step][backend] = predicted, m.us
    grouped: dict[tuple[Any, str], list[Step]] = defaultdict(list)
    for (layer, kind, _, _), step in steps.items():
        if len(step) > 1:
            grouped[layer, kind].append(step)
    return grouped


def _cost(step: Step, margin_by_name: Mapping[str, float]) -> float:
    """Return chosen over best, chosen by predictions with each backend's margin."""
    chosen = min(step, key=lambda name: step[name][0] * (1 + margin_by_name[name]))
    return step[chosen][1] / min(us for _, us in step.values())


def _favourite(steps: Sequence[Step]) -> str:
    """Return the candidate that was least over the best; one that wasn't measured lost the step."""
    names = {name for step in steps for name in step}

    def loss(name: str) -> float:
        costs = [
            step[name][1] / min(us for _, us in step.values()) for step in steps if name in step
        ]
        return mean([*costs, *[LOST] * (len(steps) - len(costs))])

    return min(sorted(names), key=loss)


def margins(by_class: Fits) -> dict[tuple[Any, str], dict[str, float]]:
    """Return, by layer class and kind, the margins that cost least by held-out points.

    The favourite has none. The others have one of their own each, since some are predicted worse:
    first a common one, then each by itself. Squares of logarithms: one step at 1.4 of the best is worse
    than four at 1.1.
    """
    margins_of_kind = {}
    for key, steps in _steps(by_class).items():
        favourite = _favourite(steps)
        others = sorted({name for step in steps for name in step} - {favourite})

        def loss(margin_by_name: Margins, steps: list[Step] = steps) -> float:
            return sum(math.log(_cost(step, margin_by_name)) ** 2 for step in steps)

        best = _worth([{favourite: 0.0} | dict.fromkeys(others, m) for m in MARGINS], loss)
        for name in others:
            best = _worth([best, *({**best, name: m} for m in MARGINS)], loss)
        margins_of_kind[key] = best
    return margins_of_kind


def _worth(options: Sequence[Margins], loss: Callable[[Margins], float]) -> Margins:
    """Return the first option, or a later one that loses less by enough to be no accident."""
    best = options[0]
    for option in options[1:]:
        if loss(option) < ENOUGH * loss(best):
            best = option
    return best


def regrets(by_class: Fits) -> dict[str, list[float]]:
    """Return, by kind, what choosing by held-out predictions costs: chosen over best, each step."""
    costs: dict[str, list[float]] = defaultdict(list)
    choices = margins(by_class)
    for (layer, kind), steps in _steps(by_class).items():
        costs[kind] += [_cost(step, choices[layer, kind]) for step in steps]
    return costs


def margin_of(key: Key, error: float, by_class: dict[tuple[Any, str], dict[str, float]]) -> float:
    """Return a model's margin. One call for a mixed step is beside a pair: its own error."""
    layer, kind, backend = key
    kind = "decode" if kind in ("dealt", "cores") else kind
    return error if kind == "mixed" else by_class.get((layer, kind), {}).get(backend, 0.0)


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(
    by_class: Fits, device: Device, registry: Registry, processors: int = 0
) -> dict[str, Any]:
    """Return the table as JSON values. `processors`: as in `fits`."""
    choices = margins(by_class)
    backends = sorted({backend for _, _, backend in by_class})
    of = {name: packages_of(registry, name) for name in backends}
    return {
        "format": FORMAT,
        "device": {
            "platform": device.platform,
            "arch": device.arch,
            "name": device.name,
            "processors": processors,
        },
        "measured": str(date.today()),
        "versions": versions_of(name for names in of.values() for name in names),
        "models": [
            {
                "backend": backend,
                "kind": kind,
                "layer": dict(layer),
                "of": of[backend],
                **{name: value for name, value in model.form._asdict().items() if value},
                "coefficients": {
                    term: float(f"{value:.6g}")
                    for term, value in zip(TERMS, model.coefficients, strict=True)
                },
                "error": round(model.error, 4),
                "host": round(statistics.median(_host(m, model) for m in members), 1),
                "margin": round(margin_of((layer, kind, backend), model.error, choices), 4),
                "points": len(members),
            }
            for (layer, kind, backend), (model, members) in sorted(
                by_class.items(), key=lambda item: str(item[0])
            )
        ],
    }


def _host(measurement: Measurement, model: Fit) -> float:
    """Return the host's microseconds that a launch costs."""
    return measurement.host / (measurement.point().shape.runs if model.form.by_run else 1)


def with_fuller(
    data: dict[str, Any], path: Path, device: Device, measurements: Iterable[Measurement]
) -> tuple[dict[str, Any], list[str]]:
    """Return a table with those models of the file's that were fitted to more points, and a note of each.

    Models of another device, or of other versions than are installed, don't count.
    """
    rows = {_name_of(row): row for row in data["models"]}
    points = Counter(str(_key(m)) for m in measurements)
    points |= Counter({name: row["points"] for name, row in rows.items()})
    notes = []
    for row in _rows_for(path, device):
        name, more = _name_of(row), row.get("points")
        if isinstance(more, int) and more > points[name]:
            rows[name] = row
            notes.append(
                f"{row['backend']}, {row['kind']}, {in_words(row['layer'])}: the table's model stays: "
                f"it was fitted to {more} points, these are {points[name]}; to start over, remove {path}"
            )
    versions = versions_of(name for row in rows.values() for name in row.get("of", ()))
    return data | {"versions": versions, "models": [rows[name] for name in sorted(rows)]}, notes


def _rows_for(path: Path, device: Device) -> list[Mapping[str, Any]]:
    """Return the models of a table that count on a device; none where no table is."""
    try:
        older = read_table(path)
    except SettingsError:
        return []
    return [e.row for e in older.entries if older.is_for(device) and not e.stale]


def _name_of(row: Mapping[str, Any]) -> str:
    """Return a row's `Key`, written out."""
    return str((tuple(sorted(row["layer"].items())), row["kind"], row["backend"].upper()))


def packages_of(registry: Registry, backend: str) -> list[str]:
    """Return the distributions that a backend's times depend on: its plugin, and its library or torch."""
    info, owner = registry.backends[backend], registry.owners[backend]
    libraries = [named[0] for text in info.requires if (named := requirement_of(text))]
    return [name for name in (owner.dist, *(libraries or ["torch"])) if installed(name)]


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of packages."""
    return {name: dist.version for name in sorted(set(names)) if (dist := installed(name))}


def write(data: dict[str, Any], path: Path) -> None:
    """Write a table, a model in a line, whole or not at all; a reader meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    models = ",\n".join(f"  {json.dumps(model)}" for model in data["models"])
    head = json.dumps(data | {"models": None}, indent=1)
    text = head.replace('"models": null', f'"models": [\n{models}\n ]')
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
