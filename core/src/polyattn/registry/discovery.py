"""Which plugins are installed? Finds them by entry points and isolates the failures of each."""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from typing import Any

import pluggy

from polyattn._version import __version__
from polyattn.errors import PluginError, SettingsError, describe, nearest, plain, shown
from polyattn.registry.builtin import BUILTIN
from polyattn.registry.builtin_row_formats import ROW_FORMATS
from polyattn.registry.builtin_variants import SHIPPED
from polyattn.registry.capabilities import ANY_PLATFORM
from polyattn.registry.catalogue import catalogue, our_distributions, unknown
from polyattn.registry.distributions import distributions, installed
from polyattn.registry.hooks import ENTRY_POINT_GROUP, PROJECT, HookSpecs, Platform
from polyattn.registry.info import API_VERSION, BackendInfo
from polyattn.registry.installed import BY_HAND, IMPORTS_TORCH, PluginRecord, Registry
from polyattn.registry.machine import ask, forget_probes, within
from polyattn.registry.names import without_conflicts
from polyattn.registry.requirements import of_another_release
from polyattn.registry.validate import (
    accepted,
    accepted_timings,
    check_api_versions,
    plugin_name_problem,
)
from polyattn.settings import Settings, current_settings
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import AttentionVariant

_registered: dict[str, tuple[int, Any]] = {}
"""By name: at which generation a plugin was registered, and the plugin."""
_generation = _changes = 0
_cache: dict[Any, Registry] = {}


def register(plugin: Any, name: str | None = None) -> None:
    """Add a plugin to this process.

    Args:
        plugin: a module or an object with hook methods, or what `polyattn.kernel.backend` returns.
        name: the plugin's; default: its `__name__`.

    Raises:
        PluginError: the name is taken, or can't be a plugin's. What is wrong with a declaration is among
            `discover().problems`, as of an installed plugin.

    Examples:
        >>> from polyattn.kernel import backend
        >>> @backend("MINE", platforms="cpu", dtypes="float32", head_sizes=(64,), features=("causal",))
        ... def mine(query, key, value, mask, scale): ...
        >>> register(mine)
        >>> "MINE" in discover().backends
        True
        >>> unregister(mine)

    """
    global _generation
    if name is None:
        name = getattr(plugin, "__name__", None)
        if name is None:
            raise PluginError(
                f"plugin={shown(plugin)} has no __name__: pass a module, what polyattn.kernel.backend "
                "returns, or name="
            )
    problem = plugin_name_problem(name)
    if problem:
        raise PluginError(problem)
    if name in _registered:
        raise PluginError(f"a plugin named {name!r} is registered already; unregister it first")
    _generation += 1
    _registered[name] = _generation, plugin


def unregister(plugin: Any) -> None:
    """Remove a plugin that `register` added.

    Args:
        plugin: the plugin itself, or its name.

    Raises:
        PluginError: no such plugin was registered.

    Examples:
        >>> unregister("mine")
        Traceback (most recent call last):
        polyattn.errors.PluginError: no plugin named 'mine' was registered...

    """
    global _generation
    name = plugin
    if not isinstance(plugin, str):
        name = next((n for n, (_, p) in _registered.items() if p is plugin), shown(plugin))
    if _registered.pop(name, None) is None:
        raise PluginError(f"no plugin named {name!r} was registered{nearest(name, _registered)}")
    _generation += 1


def refresh() -> None:
    """Forget all discoveries and probes. The next `discover` looks again, after an installation."""
    global _generation
    _generation += 1
    _cache.clear()
    _entry_points.cache_clear()
    forget_probes()
    importlib.invalidate_caches()


def changed() -> None:
    """Invalidate earlier selections: something beside the plugins that decides them has changed."""
    global _changes
    _changes += 1


def generation() -> int:
    """Return a number that changes whenever what decides selections may have changed."""
    return _generation + _changes


def plugins_generation() -> int:
    """Return a number that changes whenever the set of plugins may have changed."""
    return _generation


def discover(settings: Settings | None = None) -> Registry:
    """Return the registry of installed plugins, cached until something changes it.

    Args:
        settings: instead of those of the environment and the file.

    Returns:
        The registry: `backends` by name, `plugins`, and `problems` with their remedies.

    Raises:
        SettingsError: a setting names a plugin that isn't installed.

    Examples:
        >>> discover().backends["TORCH_MERGE"].summary
        "attention states merged by torch's elementwise operators"

    """
    settings = current_settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise SettingsError(f"settings={shown(settings)} must be Settings, or None")
    by_hand = tuple((name, at) for name, (at, _) in _registered.items())
    key = (settings.plugins, settings.disabled_plugins, tuple(sys.path), by_hand)
    if key not in _cache:
        _cache[key] = _build(settings)
    return _cache[key]


_Source = tuple[PluginRecord, Callable[[], Any]]
"""A plugin before anything of it is imported, and what imports it."""


def _build(settings: Settings) -> Registry:
    sources = [*_entry_points(tuple(sys.path)), *_by_hand()]
    _check_names(settings, [record.name for record, _ in sources])
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    doubles = _doubles(record for record, _ in sources)
    records = []
    for record, load in sorted(sources, key=lambda source: (source[0].name, source[0].dist)):
        if record.name in settings.disabled_plugins:
            why = "POLYATTN_DISABLE_PLUGINS (disable_plugins) names it"
            records.append(replace(record, status="disabled", problem=why))
        elif settings.plugins is not None and record.name not in settings.plugins:
            why = "POLYATTN_PLUGINS (plugins) doesn't name it"
            records.append(replace(record, status="disabled", problem=why))
        elif record.problem:
            records.append(replace(record, status="broken"))
        elif record in doubles:
            problem, shadowed = doubles[record]
            records.append(replace(record, status="broken", problem=problem, shadowed=shadowed))
        else:
            records.append(_load(record, load, manager, settings.plugin_timeout))
    core = PluginRecord(
        "core",
        PROJECT,
        __version__,
        "polyattn.registry.builtin",
        backends=BUILTIN,
        variants=SHIPPED,
        row_formats=ROW_FORMATS,
    )
    return _assemble((core, *records), manager)


@lru_cache(maxsize=8)
def _entry_points(path: tuple[str, ...]) -> tuple[_Source, ...]:
    """Read the metadata of `sys.path`, which takes most of a discovery's time, once until `refresh`."""
    return tuple(_read_entry_points())


def _read_entry_points() -> Iterator[_Source]:
    """Read metadata only. A distribution that can't be read is a broken plugin, not an end."""
    seen: set[str] = set()
    for dist in distributions():
        name = "unknown distribution"
        try:
            # Most distributions have no entry point of ours: look before parsing anything.
            text = dist.read_text("entry_points.txt")
            if not text or ENTRY_POINT_GROUP not in text:
                continue
            metadata = dist.metadata  # parsed at each access
            name = _name_in(metadata)
            if name in seen:  # a second copy on sys.path is shadowed, as for import
                continue
            seen.add(name)
            points = [ep for ep in dist.entry_points if ep.group == ENTRY_POINT_GROUP]
            version = plain(metadata["Version"] or "(no version)", 64)
            for point in points:
                problem = plugin_name_problem(point.name) or ""
                record = PluginRecord(
                    plain(point.name, 64), name, version, plain(point.value), problem=problem
                )
                yield record, point.load
        except Exception as error:
            where = f"{name} ({plain(str(getattr(dist, '_path', 'unknown path')))})"
            problem = f"its metadata is corrupt: {describe(error)}"
            yield PluginRecord(name, where, "", "", problem=problem), lambda: None


def _name_in(said: metadata.PackageMetadata) -> str:
    name = said["Name"]
    if not name:
        raise ValueError("METADATA has no Name")
    return plain(str(name), 64)


def _by_hand() -> Iterator[_Source]:
    for name, (_, plugin) in _registered.items():
        record = PluginRecord(name, BY_HAND, "", shown(plugin))
        yield record, lambda plugin=plugin: plugin  # type: ignore[misc]


def _check_names(settings: Settings, installed: Sequence[str]) -> None:
    for source, names in (
        (settings.plugins_source, settings.plugins or ()),
        (settings.disabled_source, settings.disabled_plugins),
    ):
        for name in names:
            if name not in installed:
                raise PluginError(
                    f"{source}: no plugin {name!r} is installed{nearest(name, installed)}"
                )


def _load(
    record: PluginRecord, load: Callable[[], Any], manager: pluggy.PluginManager, seconds: float
) -> PluginRecord:
    """Import and register one plugin and call its hooks; an exception becomes its problem."""
    loaded: list[Any] = []
    had_torch, began = "torch" in sys.modules, time.perf_counter()

    def question() -> dict[str, Any]:
        plugin = load()
        other = manager.get_name(plugin)
        if other is not None:  # before it counts as loaded: the other one stays registered
            raise PluginError(
                f"{record.target} is plugin {other!r} already; remove one entry point"
            )
        loaded.append(plugin)
        manager.register(plugin, record.name)
        check_api_versions(ask(manager, plugin, "polyattn_api_versions"), API_VERSION)
        declared = {
            "platforms": Platform,
            "backends": BackendInfo,
            "variants": AttentionVariant,
            "row_formats": RowFormat,
        }
        entries: dict[str, Any] = {
            what: tuple(accepted(hook := f"polyattn_{what}", ask(manager, plugin, hook), kind))
            for what, kind in declared.items()
        }
        return entries | {"timings": accepted_timings(ask(manager, plugin, "polyattn_timings"))}

    try:
        if _is_being_imported(record.target):
            entries = question()
        else:
            setting = "POLYATTN_PLUGIN_TIMEOUT"
            entries = within(seconds, setting, "its import or a hook", question)
        imported = "torch" in sys.modules and not had_torch
        return replace(record, note=_cost(imported, time.perf_counter() - began), **entries)
    except (Exception, SystemExit) as error:
        for plugin in loaded:
            if manager.is_registered(plugin):
                manager.unregister(plugin)
        dist, problem = installed(record.dist), describe(error)
        if dist is not None and (other := of_another_release(dist)):
            problem = f"{other} ({problem})"
        return replace(record, status="broken", problem=problem)


SLOW = 0.5
"""Seconds that a plugin's hooks may take before a note names it; ours take milliseconds."""


def _cost(imports_torch: bool, seconds: float) -> str:
    """Say how long a slow plugin delays every command that lists or selects; "" for a fast one."""
    if not imports_torch and seconds < SLOW:
        return ""
    what = IMPORTS_TORCH if imports_torch else "its import and hooks are slow"
    remedy = "move what its hooks don't need to the backends' modules, or disable the plugin"
    return f"{what}, {seconds:.1f} s before anybody can list or select; {remedy}"


def _is_being_imported(target: str) -> bool:
    """Whether this thread is importing the plugin's package: another thread would wait for its lock."""
    words = target.partition(":")[0].split(".")
    modules = {".".join(words[: n + 1]) for n in range(len(words))}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def _doubles(records: Iterable[PluginRecord]) -> dict[PluginRecord, tuple[str, bool]]:
    """Return the plugins whose name another one claims too: the error, and whether it's one of ours.

    A name of ours stays ours, as in `_settle`.
    """
    claims: dict[str, list[PluginRecord]] = {}
    for record in records:
        claims.setdefault(record.name, []).append(record)
    ours, problems = {PROJECT, *our_distributions()}, {}
    for name, claimants in claims.items():
        keepers = [record for record in claimants if record.dist in ours]
        keeper = keepers[0] if len(keepers) == 1 else None
        both = " and ".join(record.origin for record in claimants)
        remedy = f"{keeper.dist} keeps it" if keeper else "uninstall one"
        for record in claimants if len(claimants) > 1 else ():
            if record is not keeper:
                problem = f"the plugin name {name!r} is claimed by {both}; {remedy}"
                problems[record] = problem, keeper is not None
    return problems


def _assemble(records: tuple[PluginRecord, ...], manager: pluggy.PluginManager) -> Registry:
    conflicts: dict[str, str] = {}
    by_kind = []
    for what in ("backend", "platform", "variant", "row_format"):
        claims: dict[str, list[tuple[Any, PluginRecord]]] = {}
        for record in records:
            for entry in getattr(record, f"{what}s"):
                claims.setdefault(entry.name, []).append((entry, record))
        for name, claimants in claims.items():
            if len(claimants) > 1:
                conflicts[f"{what} {name}"] = _settle(what, name, claimants)
        by_kind.append({name: owners[0] for name, owners in claims.items() if owners})
    backends, platforms, variants, row_formats = by_kind
    ours = (name for brings in catalogue().values() for name in brings["platforms"])
    known = {ANY_PLATFORM, *platforms, *ours}
    for entry, record in backends.values():
        for name in sorted(entry.capabilities.platforms.keys() - known):
            conflicts[f"platform {name} of {entry.name}"] = (
                f"{entry.name} of {record.origin}: Capabilities.platforms: {name!r} "
                f"{unknown('platforms', name, platforms)} (or install the plugin that brings it)"
            )
    return Registry(
        records,
        without_conflicts(
            {name: entry for name, (entry, _) in backends.items()},
            {name: record.origin for name, (_, record) in backends.items()},
            conflicts,
        ),
        {name: record for name, (_, record) in backends.items()},
        {name: entry for name, (entry, _) in platforms.items()},
        {name: record for name, (_, record) in platforms.items()},
        {name: entry for name, (entry, _) in variants.items()},
        {name: entry for name, (entry, _) in row_formats.items()},
        conflicts,
        manager,
    )


def _settle(what: str, name: str, claimants: list[tuple[Any, PluginRecord]]) -> str:
    """Drop all claimants of a name, or all but the one that may keep it; say what to do.

    A name of ours stays ours: else one stray distribution would take the CPU from everybody.
    Between strangers nobody can tell which one is meant.
    """
    origins = " and by ".join(record.origin for _, record in claimants)
    ours = {PROJECT, *our_distributions()}
    keepers = [claim for claim in claimants if claim[1].dist in ours]
    text = f"the {what} name {name!r} is claimed by {origins}; "
    if len(keepers) == 1:
        others = [record for _, record in claimants if record is not keepers[0][1]]
        claimants[:] = keepers
        removals = "; ".join(record.removal for record in others)
        return f"{text}{keepers[0][1].dist} keeps it, remove the other: {removals}"
    removals = "; or ".join(record.removal for _, record in claimants)
    claimants.clear()
    return f"{text}neither is used, remove one: {removals}"
