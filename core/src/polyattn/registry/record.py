"""What is known about one plugin? `PluginRecord`: its origin, its state and its declarations."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.registry.hooks import Platform
from polyattn.registry.info import BackendInfo
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
        """What a user does to be rid of the plugin."""
        if not self.target:
            return f"reinstall or uninstall {self.dist}"
        if self.dist == BY_HAND:
            return "register a fixed one"
        if self.shadowed:  # a setting would disable ours
            return f"pip uninstall {self.dist}"
        disabling = f"POLYATTN_DISABLE_PLUGINS={self.name}"
        if plugin_name_problem(self.name) is not None:  # no list can name it
            disabling = "POLYATTN_PLUGINS to the names of the others"
        return f"pip uninstall {self.dist}, or set {disabling}"
