"""Which distributions are installed, which are polyattn's own, and which extra installs them?"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata

from polyattn.errors import describe, shown

log = logging.getLogger("polyattn")


def distributions(name: str | None = None) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions (of a name), as `importlib.metadata` does.

    That ends with whatever an entry of `sys.meta_path` raises; here one that fails is passed over.
    """
    kind = metadata.DistributionFinder.Context
    context = kind() if name is None else kind(name=name)
    for finder in tuple(sys.meta_path):
        try:
            yield from getattr(finder, "find_distributions", lambda _: ())(context)
        except Exception as error:
            log.warning("sys.meta_path: %s is passed over: %s", shown(finder), describe(error))


def installed(name: str) -> metadata.Distribution | None:
    """Return the installed distribution of a name, None where there is none."""
    return next(distributions(name), None)


def requires_of_polyattn() -> list[str]:
    """Return polyattn's own requirements, its extras' among them."""
    own = installed("polyattn")
    return [] if own is None else own.requires or []


@cache
def _plugins_by_extra() -> dict[str, tuple[str, ...]]:
    """The plugins that each extra of polyattn installs."""
    found: dict[str, list[str]] = {}
    for text in requires_of_polyattn():
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
