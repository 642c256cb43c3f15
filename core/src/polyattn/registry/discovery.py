"""Who is installed? Finds plugins by their entry points and keeps each one's failure to itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import pluggy

from polyattn._version import __version__
from polyattn.errors import PluginError, nearest
from polyattn.registry.builtin import BUILTIN
from polyattn.registry.hooks import ENTRY_POINT_GROUP, PROJECT, HookSpecs, Platform
from polyattn.registry.info import API_VERSION, BackendInfo
from polyattn.settings import Settings, current


@dataclass(frozen=True)
class PluginRecord:
    """One plugin as found: its status is `"ok"`, `"broken"` or `"disabled"`."""

    name: str
    dist: str
    version: str
    target: str
    status: str = "ok"
    problem: str = ""
    backends: tuple[BackendInfo, ...] = ()
    platforms: tuple[Platform, ...] = ()

    @property
    def origin(self) -> str:
        """The plugin with its distribution and version, for messages."""
        return f"plugin {self.name!r} of {self.dist} {self.version}".rstrip()


@dataclass(frozen=True)
class Registry:
    """Who is installed: plugins, their backends and platforms, and everything that is wrong."""

    plugins: tuple[PluginRecord, ...]
    backends: dict[str, BackendInfo]
    owners: dict[str, PluginRecord]
    platforms: dict[str, Platform]
    conflicts: dict[str, str]
    manager: pluggy.PluginManager = field(repr=False)

    @property
    def problems(self) -> list[str]:
        """One line for each plugin that is broken and each name that two plugins claim."""
        broken = [f"{p.origin}: {p.problem}" for p in self.plugins if p.status == "broken"]
        return broken + list(self.conflicts.values())

    def backend(self, name: str) -> BackendInfo:
        """Return a backend by name. Raises `PluginError` that says why there is none."""
        if name in self.backends:
            return self.backends[name]
        key = f"backend {name}"
        if key in self.conflicts:
            raise PluginError(self.conflicts[key])
        hidden = [f"{p.origin} is disabled" for p in self.plugins if p.status == "disabled"]
        notes = "".join(f"\n  note: {text}" for text in (*hidden, *self.problems))
        raise PluginError(f"backend {name!r} is unknown{nearest(name, self.backends)}{notes}")


_registered: dict[str, Any] = {}
_generation = 0
_cache: dict[Any, Registry] = {}


def register(plugin: Any, name: str) -> None:
    """Add a plugin (a module or an object with hook methods) to this process by hand."""
    global _generation
    if name in _registered:
        raise PluginError(f"a plugin named {name!r} is registered already; unregister it first")
    _registered[name] = plugin
    _generation += 1


def unregister(name: str) -> None:
    """Remove a plugin that `register` added."""
    global _generation
    if _registered.pop(name, None) is None:
        raise PluginError(f"no plugin named {name!r} was registered{nearest(name, _registered)}")
    _generation += 1


def refresh() -> None:
    """Forget what was found; the next `discover` looks again (after an installation)."""
    global _generation
    _generation += 1
    _cache.clear()


def generation() -> int:
    """Return a number that changes whenever the set of plugins may have."""
    return _generation


def discover(settings: Settings | None = None) -> Registry:
    """Return the registry of installed plugins, cached until something changes it."""
    settings = settings or current()
    key = (settings.plugins, settings.disabled_plugins, tuple(sys.path), _generation)
    if key not in _cache:
        _cache[key] = _build(settings)
    return _cache[key]


@dataclass(frozen=True)
class _Found:
    """An entry point before anything of it is imported."""

    record: PluginRecord
    load: Callable[[], Any]


def _build(settings: Settings) -> Registry:
    found = [*_entry_points(), *_by_hand()]
    _check_names(settings, [f.record.name for f in found])
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    doubles = _doubles((f.record.name, f.record.origin) for f in found)
    records = []
    for item in sorted(found, key=lambda f: (f.record.name, f.record.dist)):
        record = item.record
        denied = record.name in settings.disabled_plugins
        if denied or (settings.plugins is not None and record.name not in settings.plugins):
            records.append(replace(record, status="disabled"))
        elif record.problem:
            records.append(replace(record, status="broken"))
        elif record.name in doubles:
            both = " and ".join(doubles[record.name])
            problem = f"the plugin name {record.name!r} is claimed by {both}; uninstall one"
            records.append(replace(record, status="broken", problem=problem))
        else:
            records.append(_load(item, manager))
    core = PluginRecord("core", PROJECT, __version__, "polyattn.registry.builtin", backends=BUILTIN)
    return _assemble((core, *records), manager)


def _entry_points() -> Iterator[_Found]:
    """Read metadata only. A distribution that can't be read is a broken plugin, not an end."""
    seen: set[str] = set()
    for dist in metadata.distributions():
        name = "unknown distribution"
        try:
            # Most distributions have no entry point of ours: look before parsing anything.
            text = dist.read_text("entry_points.txt")
            if not text or ENTRY_POINT_GROUP not in text:
                continue
            name = _dist_name(dist)
            if name in seen:  # a second copy on sys.path is shadowed, as for import
                continue
            seen.add(name)
            points = [ep for ep in dist.entry_points if ep.group == ENTRY_POINT_GROUP]
            version = dist.metadata["Version"] or "(no version)"
            for point in points:
                record = PluginRecord(point.name, name, version, point.value)
                yield _Found(record, point.load)
        except Exception as error:
            where = f"{name} ({getattr(dist, '_path', 'unknown path')})"
            problem = f"its metadata is corrupt: {type(error).__name__}: {error}; reinstall it"
            yield _Found(PluginRecord(name, where, "", "", problem=problem), lambda: None)


def _dist_name(dist: metadata.Distribution) -> str:
    name = dist.metadata["Name"]
    if not name:
        raise ValueError("METADATA has no Name")
    return str(name)


def _by_hand() -> Iterator[_Found]:
    for name, plugin in _registered.items():
        record = PluginRecord(name, "this process", "", repr(plugin))
        yield _Found(record, lambda plugin=plugin: plugin)  # type: ignore[misc]


def _check_names(settings: Settings, installed: Sequence[str]) -> None:
    for variable, names in (
        ("POLYATTN_PLUGINS", settings.plugins or ()),
        ("POLYATTN_DISABLE_PLUGINS", settings.disabled_plugins),
    ):
        for name in names:
            if name not in installed:
                raise PluginError(
                    f"{variable}: no plugin {name!r} is installed{nearest(name, installed)}"
                )


def _load(item: _Found, manager: pluggy.PluginManager) -> PluginRecord:
    """Import, register and question one plugin; whatever it raises becomes its problem."""
    record, plugin = item.record, None
    try:
        plugin = item.load()
        manager.register(plugin, record.name)
        _check_version(ask(manager, plugin, "polyattn_api_versions"))
        platforms = _ask_list(manager, plugin, "polyattn_platforms", Platform)
        backends = _ask_list(manager, plugin, "polyattn_backends", BackendInfo)
        return replace(record, platforms=tuple(platforms), backends=tuple(backends))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit at import must not end the host either
        if plugin is not None and manager.is_registered(plugin):
            manager.unregister(plugin)
        return replace(record, status="broken", problem=_describe(error))


def ask(manager: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Any:
    """Call one hook of one plugin alone, so that its exception is attributable."""
    others = [p for p in manager.get_plugins() if p is not plugin]
    answers = manager.subset_hook_caller(hook, others)(**arguments)
    return answers[0] if answers else None


def _ask_list(manager: pluggy.PluginManager, plugin: Any, hook: str, kind: type) -> list[Any]:
    answer = ask(manager, plugin, hook)
    if answer is None:
        return []
    if not isinstance(answer, (list, tuple)):
        raise PluginError(f"{hook}() returned {answer!r}, not a list of {kind.__name__}")
    for entry in answer:
        if not isinstance(entry, kind):
            raise PluginError(f"{hook}() returned {entry!r} in its list, not a {kind.__name__}")
    return list(answer)


def _check_version(answer: Any) -> None:
    if answer is None:
        raise PluginError("does not implement polyattn_api_versions()")
    try:
        low, high = map(int, answer)
    except (TypeError, ValueError):
        raise PluginError(f"polyattn_api_versions() returned {answer!r}, not (low, high)") from None
    if not low <= API_VERSION <= high:
        newer = "upgrade polyattn" if low > API_VERSION else "upgrade the plugin"
        raise PluginError(
            f"needs API version {low} to {high}; this polyattn has {API_VERSION}: {newer}"
        )


def _describe(error: BaseException) -> str:
    if isinstance(error, PluginError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _doubles(claims: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for name, owner in claims:
        owners.setdefault(name, []).append(owner)
    return {name: who for name, who in owners.items() if len(who) > 1}


def _assemble(records: tuple[PluginRecord, ...], manager: pluggy.PluginManager) -> Registry:
    conflicts: dict[str, str] = {}
    backends = {b.name: b for r in records for b in r.backends}
    owners = {b.name: r for r in records for b in r.backends}
    platforms = {p.name: p for r in records for p in r.platforms}
    taken: tuple[tuple[str, dict[str, Any], Iterable[tuple[str, str]]], ...] = (
        ("backend", backends, ((b.name, r.origin) for r in records for b in r.backends)),
        ("platform", platforms, ((p.name, r.origin) for r in records for p in r.platforms)),
    )
    for what, table, claims in taken:
        for name, who in _doubles(claims).items():
            del table[name]
            conflicts[f"{what} {name}"] = (
                f"the {what} name {name!r} is claimed by {' and by '.join(who)}; neither is used: "
                "uninstall one, or name it in POLYATTN_DISABLE_PLUGINS"
            )
    return Registry(records, backends, owners, platforms, conflicts, manager)
