"""Which plugins, backends and platforms are installed? `Registry`: what discovery found, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import pluggy

from polyattn.errors import PluginError
from polyattn.registry.hooks import Platform
from polyattn.registry.info import BackendInfo
from polyattn.registry.names import backend_named, not_a_backend
from polyattn.registry.validate import plugin_name_problem
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import AttentionVariant

BY_HAND = "this process"
"""What stands in place of a distribution for a plugin that was registered by hand."""


@dataclass(frozen=True)
class PluginRecord:
    """One plugin and its status: `"ok"`, `"broken"` or `"disabled"`.

    `note` has the time that it took to load, if that delays others. `shadowed`: its name is one of
    core's.
    """

    name: str
    dist: str
    version: str
    target: str
    status: str = "ok"
    problem: str = ""
    note: str = ""
    shadowed: bool = False
    backends: tuple[BackendInfo, ...] = ()
    platforms: tuple[Platform, ...] = ()
    timings: tuple[str, ...] = ()
    variants: tuple[AttentionVariant, ...] = ()
    row_formats: tuple[RowFormat, ...] = ()

    @property
    def origin(self) -> str:
        """The plugin with its distribution and version, for messages."""
        return f"plugin {self.name!r} of {self.dist} {self.version}".rstrip()

    @property
    def removal(self) -> str:
        """The command or setting that removes the plugin."""
        if not self.target:
            return f"reinstall or uninstall {self.dist}"
        if self.dist == BY_HAND:
            return f"polyattn.unregister({self.name!r})"
        if self.shadowed:  # a setting would disable ours
            return f"pip uninstall {self.dist}"
        disabling = f"POLYATTN_DISABLE_PLUGINS={self.name}"
        if plugin_name_problem(self.name) is not None:  # no list can name it
            disabling = "POLYATTN_PLUGINS to the names of the others"
        return f"pip uninstall {self.dist}, or set {disabling}"


IMPORTS_TORCH = "its hook module imports torch"


@dataclass(frozen=True)
class Registry:
    """The installed plugins, their backends and platforms, and all problems."""

    plugins: tuple[PluginRecord, ...]
    backends: dict[str, BackendInfo]
    owners: dict[str, PluginRecord]
    platforms: dict[str, Platform]
    platform_owners: dict[str, PluginRecord]
    variants: dict[str, AttentionVariant]
    row_formats: dict[str, RowFormat]
    conflicts: dict[str, str]
    manager: pluggy.PluginManager = field(repr=False)
    late_policies: set[str] = field(default_factory=set, repr=False)

    @cached_property
    def problems(self) -> list[str]:
        """One line for each plugin that is broken and each name that two plugins claim."""
        broken = [
            f"{p.origin}: {p.problem} (until it is fixed: {p.removal})"
            for p in self.plugins
            if p.status == "broken"
        ]
        return broken + list(self.conflicts.values())

    @property
    def notes(self) -> list[str]:
        """A line for each plugin that serves but is slow to load."""
        return [f"{p.origin}: {p.note}" for p in self.plugins if p.note]

    @property
    def torch_importers(self) -> dict[str, str]:
        """The name of the one that imported torch; those after it find torch loaded."""
        return {
            p.name: f"{p.origin}: {p.note}"
            for p in self.plugins
            if p.note.startswith(IMPORTS_TORCH)
        }

    @property
    def disabled(self) -> list[str]:
        """A line for each plugin that settings (`plugins`, `disable_plugins`) leave out."""
        return [
            f"{p.origin} is disabled: {p.problem}" for p in self.plugins if p.status == "disabled"
        ]

    def backend(self, name: str) -> BackendInfo:
        """Return a backend by a name or an alias in any case. Raises `PluginError`: why there is none."""
        name = name.upper()
        own = backend_named(name, self.backends)
        if own is not None:
            return self.backends[own]
        key = f"backend {name}"
        if key in self.conflicts:
            raise PluginError(self.conflicts[key])
        notes = "".join(f"\n  note: {text}" for text in (*self.disabled, *self.problems))
        raise PluginError(f"backend {name!r} {not_a_backend(name, self.backends)}{notes}")
