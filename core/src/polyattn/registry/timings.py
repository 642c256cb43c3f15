"""What was measured on this device? Timing tables: files of plugins and of `polyattn tune`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.errors import SettingsError, describe, plain, shown
from polyattn.registry.discovery import discover, plugins_generation
from polyattn.registry.distributions import installed
from polyattn.registry.installed import Registry
from polyattn.settings import NO_TIMINGS, Settings
from polyattn.spec.key_ranges import all_seen
from polyattn.spec.kinds import ITEM_BYTES, AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import DEALS, KINDS, TERMS, WINDOWLESS, TimingModel

FORMAT = 1
REMEDY = "measure again: polyattn tune"
MEASURED = (AttentionKind.ATTENTION, AttentionKind.MLA)
MOST_SOURCES = 64
MOST_BYTES, MOST_MODELS, MOST_TILES, MOST_PROCESSORS = 1 << 23, 4096, 1 << 30, 4096
"""What a table may hold; `polyattn tune` writes some dozens of models, in some kilobytes."""
FARTHEST = 4.0
"""How far, by `distance`, a class may be from a layer that is judged by its times: heads of 128 speak for
those of 32, and of 512."""
OTHER_CHIP = 0.5
"""How far another chip of the architecture is."""


@dataclass(frozen=True)
class Entry:
    """A model, the layers that it covers, and why it is stale on this machine, if it is.

    `row`: the entry as the table has it.
    """

    layer: tuple[tuple[str, Any], ...]
    model: TimingModel
    stale: str = ""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def speaks_of(self, spec: LayerSpec) -> bool:
        """Whether the model is for layers of this one's class. A field that is null is one they lack."""
        theirs = layer_class(spec)
        return all(theirs.get(name) == value for name, value in self.layer)


@dataclass(frozen=True)
class TimingTable:
    """The models that were fitted on one device. `problems` says which entries can't be read."""

    path: str
    platform: str
    arch: str
    device: str
    measured: str
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()

    def is_for(self, device: Device) -> bool:
        """Whether the table was measured on such a device: a profile goes by its driver's name."""
        return self.platform == device.platform and self.device in (device.name, device.reported)

    def counts_on(self, device: Device) -> bool:
        """Whether the table is of such a device, or of another one of its architecture."""
        alike = self.arch == device.arch and device.is_accelerator
        return self.is_for(device) or (self.platform == device.platform and alike)

    def models(self, spec: LayerSpec, device: Device) -> tuple[TimingModel, ...]:
        """Return the models that speak of `spec` on `device`.

        A profile assumes what was measured with; on a device what is stale there is left out.
        """
        if not self.is_for(device):
            return ()
        return _closest(e for e in self._fresh(device) if e.speaks_of(spec))

    def near(self, spec: LayerSpec, device: Device) -> tuple[float, tuple[TimingModel, ...]]:
        """Return the class next to `spec`, of a chip of this architecture: how far it is, and its models.

        The table is of the device's platform. What a coefficient multiplies is bytes and products, of any
        head size.
        """
        if spec.batch_invariant or not self.counts_on(device):
            return math.inf, ()
        mine = layer_class(spec)
        plain = [e for e in self._fresh(device) if not e.model.level]
        far = {e.layer: distance(dict(e.layer), mine) for e in plain}
        nearest = min(far, key=far.__getitem__, default=())
        source = (
            f"{self.path} ({self.device}, the nearest measured layers: {in_words(dict(nearest))})"
        )
        models = _closest(e for e in plain if all(item in nearest for item in e.layer))
        models = tuple(replace(model, source=source) for model in models)
        return far.get(nearest, math.inf) + (0 if self.is_for(device) else OTHER_CHIP), models

    def _fresh(self, device: Device) -> list[Entry]:
        return [e for e in self.entries if not (e.stale and device.is_real)]

    def notes(self, device: Device) -> list[str]:
        """Return what of the table is ignored on `device`, and why, a line each."""
        if not self.is_for(device):
            return []
        stale: dict[str, set[str]] = {}
        for entry in self.entries if device.is_real else ():
            if entry.stale:
                stale.setdefault(entry.stale, set()).add(entry.model.backend)
        reasons = [f"{', '.join(sorted(names))}: {why}; {REMEDY}" for why, names in stale.items()]
        return [f"timing table {self.path}: ignored: {r}" for r in (*self.problems, *reasons)]


def _closest(entries: Iterable[Entry]) -> tuple[TimingModel, ...]:
    """Return a model of each backend and kind: the one whose layers are told apart by most fields.

    So where a backend was measured at the layer's level, with its cap, or with its heads, that counts.
    """
    some = sorted(entries, key=lambda e: len(e.layer))
    return tuple({(e.model.backend, e.model.kind): e.model for e in some}.values())


@dataclass(frozen=True)
class Timings:
    """The tables that count, the strongest first; `broken` has the files that are no tables.

    `unasked`: the user wants no times. `named`: the path that a setting names.
    """

    tables: tuple[TimingTable, ...] = ()
    broken: tuple[str, ...] = ()
    unasked: bool = False
    named: str | None = None

    def models(self, spec: LayerSpec, device: Device) -> tuple[TimingModel, ...]:
        """Return the models of the tables that speak of a spec on a device, or of what is near.

        Each kind of step is the first table's that has it: a tune that stopped early has decodes alone.
        What is measured is attention over a cache, without functions and masks of a caller's. A layer
        of a class, or on a chip, that no table has is judged by the nearest class of the architecture.
        Steps within a layer's window are of the class without one, to backends of `WINDOWLESS`.
        """
        if not _measurable(spec):
            return ()
        exact: tuple[TimingModel, ...] = ()
        for table in self.tables:
            known = {m.step for m in exact}
            exact += tuple(m for m in table.models(spec, device) if m.step not in known)
        others = [] if exact else [t for t in self.tables if t.platform == device.platform]
        near = [table.near(spec, device) for table in others]
        far, models = min(near, key=itemgetter(0), default=(math.inf, ()))
        models = exact or (models if far <= FARTHEST else ())
        if not (models and spec.sliding_window and all_seen(spec)):
            return models
        plain = self.models(spec.replace(sliding_window=None, sink_tokens=0), device)
        return (*models, *(replace(m, windowless=True) for m in plain if m.backend in WINDOWLESS))

    def notes(self, spec: LayerSpec, device: Device, models: tuple[TimingModel, ...]) -> list[str]:
        """Return what is ignored of the tables, or that none has such a layer, a line each.

        `models`: the layer's.
        """
        notes = [*self.broken, *(note for table in self.tables for note in table.notes(device))]
        for table in self.tables[:1]:
            if table.path == self.named and not table.counts_on(device):
                notes.append(
                    f"timing table {table.path}: ignored: it is of {table.device}, not of {device}; "
                    "run polyattn tune here, or unset POLYATTN_TIMINGS"
                )
        wanted = device.is_accelerator and not self.unasked
        if wanted and not models and _measurable(spec):
            cache, level = spec.kv_cache_dtype, spec.batch_invariant
            stored = "" if cache == "auto" else f" --kv-cache-dtype {cache}"
            same_bits = f" --batch-invariant {level.name.lower()}" if level else ""
            notes.append(
                f"no timing table covers this layer on {device}: priorities choose; to choose by times, "
                f"run on that machine: polyattn tune --model MODEL{stored}{same_bits}"
            )
        return notes


def _measurable(spec: LayerSpec) -> bool:
    """Whether `polyattn tune` measures such layers: over a cache, without functions and masks."""
    return bool(spec.cached) and not spec.has_functions and spec.kind in MEASURED


def layer_class(spec: LayerSpec) -> dict[str, Any]:
    """Return what a model's layers have in common; for `batch_invariant`, the spec's level.

    It includes whether logits have a cap or sinks, which the otherwise fastest kernels lack. Over latents
    it includes the least of `HEADS` that holds the layer's, by which backends choose their kernels. So it
    does with sinks over more than `MOST_SINKS` heads.
    """
    level = {LEVEL: spec.batch_invariant.name.lower()} if spec.batch_invariant else {}
    most = next((most for most in HEADS if spec.num_heads <= most), HEADS[-1])
    many_sinks = spec.learned_sinks and spec.num_heads > MOST_SINKS
    return (
        level
        | ({"heads": most} if spec.latent is not None or many_sinks else {})
        | {name: True for name in FEATURES if getattr(spec, name)}
        | {
            "kind": spec.kind.value,
            "dtype": spec.dtype,
            "stored": spec.stored_dtype,
            "head_size": spec.head_size,
            "v_head_size": spec.v_head_size,
        }
    )


def class_of_step(spec: LayerSpec, backend: str, longest: int) -> dict[str, Any]:
    """Return the class whose model speaks of a backend's step of rows of up to so many keys."""
    drops = backend in WINDOWLESS and spec.sliding_window and longest <= all_seen(spec)
    return layer_class(spec.replace(sliding_window=None, sink_tokens=0) if drops else spec)


def in_words(layer: Mapping[str, Any]) -> str:
    """Return a class in words."""
    features = "".join(f", {name}" for name in FEATURES if layer.get(name))
    stored, size = layer.get("stored"), layer.get("head_size")
    many = f"up to {layer['heads']} " if "heads" in layer else ""
    return f"{layer.get('dtype')} over {stored}, {many}heads of {size}{features}"


def distance(measured: dict[str, Any], asked: dict[str, Any]) -> float:
    """Return how far a class is from a layer's: doublings of head sizes; other types count little.

    Nothing is near another kind, or elements of another size.
    """
    theirs = asked | measured  # fields that a class leaves open count as equal
    mine, other = (ITEM_BYTES.get(c["stored"]) for c in (asked, theirs))
    if asked["kind"] != theirs["kind"] or mine is None or mine != other:
        return math.inf
    sizes = [abs(math.log2(asked[n] / theirs[n])) for n in ("head_size", "v_head_size")]
    others = [0.25 for n in ("dtype", "stored", "heads") if asked.get(n) != theirs.get(n)]
    others += [0.25 for n in FEATURES if bool(measured.get(n)) != bool(asked.get(n))]
    return sum(sizes + others)


_read: dict[Any, Timings] = {}


def timings(settings: Settings) -> Timings:
    """Return the tables of the user and of the plugins, read once; `refresh()` forgets them."""
    if settings.timings == NO_TIMINGS:
        return Timings(unasked=True)
    own = Path(settings.timings) if settings.timings is not None else default_path()
    key = (own, settings.timings, settings.plugins, settings.disabled_plugins, plugins_generation())
    table = _read.get(key)
    if table is None:
        if len(_read) >= MOST_SOURCES:
            _read.clear()
        there = settings.timings is not None or (own is not None and own.is_file())
        paths = _paths(own if there else None, discover(settings))
        named = None if settings.timings is None else str(own)
        table = _read[key] = replace(_read_all(paths), named=named)
    return table


def default_path() -> Path | None:
    """Return the path that `polyattn tune` writes and every process reads; None without a home directory.

    `$XDG_CACHE_HOME` counts if it is set, as in the XDG base directory specification.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):
        folder = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
        return folder / "polyattn" / "timings.json"
    return None


def _paths(own: Path | None, registry: Registry) -> Iterator[Path]:
    if own is not None:
        yield own
    for plugin in registry.plugins:
        if plugin.status == "ok":
            yield from map(Path, plugin.timings)


def _read_all(paths: Iterator[Path]) -> Timings:
    tables, broken = [], []
    for path in paths:
        try:
            tables.append(read_table(path))
        except SettingsError as error:
            broken.append(str(error))
    return Timings(tuple(tables), tuple(broken))


def read_table(path: Path) -> TimingTable:
    """Read a table; unreadable entries are reported and skipped.

    Raises `SettingsError` if the file is no table.
    """
    try:
        if path.exists() and not path.is_file():  # to read a FIFO waits for ever
            raise ValueError("it is no regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"timing table {path}: can't be read: {describe(error)}; {REMEDY}"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        format = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise SettingsError(
            f"timing table {path}: format {shown(format)} is not {FORMAT}; {REMEDY}"
        )
    device, versions = data.get("device"), data.get("versions", {})
    models = data.get("models")
    if not (isinstance(device, dict) and isinstance(versions, dict) and isinstance(models, list)):
        raise SettingsError(
            f"timing table {path}: device and versions must be objects and models a list; {REMEDY}"
        )
    if len(models) > MOST_MODELS:
        raise SettingsError(
            f"timing table {path}: {len(models)} models are more than {MOST_MODELS}; {REMEDY}"
        )
    problems: list[str] = []
    stale = _stale(versions)
    entries = []
    for index, entry in enumerate(models):
        try:
            model, layer, of = _model(entry, str(path), device.get("processors", 0))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            problems.append(f"models[{index}]: {describe(error)}")
            continue
        reason = next((stale[name] for name in of if name in stale), "")
        entries.append(Entry(layer, model, reason, entry))
    return TimingTable(
        str(path),
        str(device.get("platform")),
        str(device.get("arch")),
        str(device.get("name")),
        plain(str(data.get("measured", ""))),
        tuple(entries),
        tuple(problems),
    )


def _model(
    entry: Any, source: str, processors: Any
) -> tuple[TimingModel, tuple[tuple[str, Any], ...], list[str]]:
    backend, kind, coefficients = entry["backend"], entry["kind"], entry["coefficients"]
    if not isinstance(backend, str) or kind not in KINDS:
        raise ValueError(f"backend={backend!r}, kind={kind!r}; a kind is one of {', '.join(KINDS)}")
    layer, of, overlap = entry["layer"], entry.get("of", []), entry.get("overlap", False)
    if not isinstance(layer, dict) or not layer.keys() <= _CLASS:
        raise ValueError(
            f"layer={layer!r} must map some of these to lists: {', '.join(sorted(_CLASS))}"
        )
    names = isinstance(of, list) and all(isinstance(name, str) for name in of)
    if not names or not isinstance(overlap, bool):
        raise ValueError(f"of={of!r} must be a list of packages, overlap={overlap!r} true or false")
    if not isinstance(coefficients, dict) or set(coefficients) != set(TERMS):
        raise ValueError(f"coefficients must be exactly {', '.join(TERMS)}")
    values = tuple(float(coefficients[term]) for term in TERMS)
    if not all(math.isfinite(v) and v >= 0 for v in values) or not any(values):
        raise ValueError(f"coefficients={values} must be finite, not negative, and not all zero")
    whole = entry.get("whole", 0)
    if not isinstance(whole, int) or isinstance(whole, bool) or not 0 <= whole <= MOST_TILES:
        raise ValueError(f"whole={shown(whole)} must be a whole number of tiles, 0 to {MOST_TILES}")
    error, margin = float(entry.get("error", 0.0)), float(entry.get("margin", 0.0))
    if not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"margin={margin} must be finite and not negative")
    host = float(entry.get("host", 0.0))
    if not (math.isfinite(host) and host >= 0):
        raise ValueError(f"host={host} must be finite and not negative")
    by_run = entry.get("by_run", False)
    if not isinstance(by_run, bool):
        raise ValueError(f"by_run={shown(by_run)} must be true or false")
    deal = entry.get("deal", "")
    if deal not in ("", *DEALS):
        raise ValueError(f"deal={shown(deal)} must be empty or one of {', '.join(DEALS)}")
    many = isinstance(processors, int) and not isinstance(processors, bool)
    if deal and not (many and 0 < processors <= MOST_PROCESSORS):
        raise ValueError(
            f"deal={shown(deal)} needs the device's processors, 1 to {MOST_PROCESSORS}; they are "
            f"{shown(processors)}"
        )
    level = str(layer.get(LEVEL, ""))
    model = TimingModel(
        backend.upper(), kind, values, overlap, error, source, margin, whole, level, host, by_run
    )
    if deal:
        model = replace(model, deal=deal, processors=processors)
    return model, tuple(sorted(layer.items())), of


LEVEL = "batch_invariant"
FEATURES = ("logit_soft_cap", "learned_sinks", "sliding_window")
HEADS = (32, 64, 128)
"""Of latents: what fits on its side in a tile, in one tile, and in several."""
MOST_SINKS = 64
"""Heads of which vLLM's FlashAttention-3 reads sinks. Of more, torch's operators weigh its outputs."""
_CLASS = {"kind", "dtype", "stored", "head_size", "v_head_size", "heads", LEVEL, *FEATURES}


def _stale(versions: Mapping[str, Any]) -> dict[str, str]:
    """Return the distributions whose installed version differs from the measured one."""
    stale = {}
    for name, version in versions.items():
        dist = installed(name) if name else None
        if dist is None:
            stale[name] = f"measured with {name} {version}, which is not installed"
            continue
        here = str(dist.version)
        if here.split("+")[0] != str(version).split("+")[0]:
            stale[name] = f"measured with {name} {version}; {here} is installed"
    return stale
