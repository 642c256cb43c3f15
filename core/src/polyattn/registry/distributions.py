"""Which distributions are installed? As importlib.metadata says, but a finder that fails ends nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
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
