"""Writes what our plugins bring: `python -m polyattn.tools.cli.catalogue`, with all of them installed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from polyattn.registry.catalogue import CATALOGUE, our_distributions
from polyattn.registry.discovery import discover
from polyattn.registry.installed import Registry


def generated(registry: Registry) -> str:
    """Return the catalogue's text, from the declarations of our plugins that are installed."""
    entries: dict[str, dict[str, list[str]]] = {}
    for plugin in registry.plugins:
        if plugin.dist not in our_distributions():
            continue
        owned = [p for n, p in registry.platforms.items() if registry.platform_owners[n] is plugin]
        entries[plugin.dist] = {
            "folder": [f"plugins/{plugin.name}"],
            "platforms": _names(name for p in owned for name in (p.name, *p.device_types)),
            "profiles": _names(name for p in owned for name, _ in p.profiles),
            "backends": _names(info.name for info in plugin.backends),
            "aliases": _names(alias for info in plugin.backends for alias in info.aliases),
        }
    ordered: dict[str, Any] = dict(sorted(entries.items()))
    return json.dumps(ordered, indent=1) + "\n"


def _names(names: Iterable[str]) -> list[str]:
    return sorted(set(names))


if __name__ == "__main__":
    CATALOGUE.write_text(generated(discover()), encoding="utf-8")
