"""Which distributions are polyattn's own, and which extra installs them? As its metadata says."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata


@cache
def _plugins_by_extra() -> dict[str, tuple[str, ...]]:
    """The plugins that each extra of polyattn installs."""
    found: dict[str, list[str]] = {}
    for text in metadata.requires("polyattn") or ():
        match = re.match(r"(polyattn-[a-z0-9-]+).*\bextra\s*==\s*['\"]([a-z0-9-]+)['\"]", text)
        if match:
            found.setdefault(match[2], []).append(match[1])
    return {extra: tuple(names) for extra, names in found.items()}


def our_distributions() -> frozenset[str]:
    """Return the distributions of plugins that polyattn itself publishes."""
    return frozenset(name for names in _plugins_by_extra().values() for name in names)


def install_advice(platform: str) -> str:
    """Say what brings a platform: our extra, where there is one, else a plugin of others."""
    if platform in _plugins_by_extra():
        return f'pip install "polyattn[{platform}]"'
    return f"install a plugin that brings platform {platform!r}; polyattn has none of its own"
