"""Which distributions and modules are here? As importlib says, but a finder that fails ends nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import metadata, util
from importlib.machinery import ModuleSpec, PathFinder

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


def find_spec(name: str) -> ModuleSpec | None:
    """Return what `importlib.util.find_spec` does of a top-level module; imports nothing of it.

    That ends with whatever an entry of `sys.meta_path` raises; then the folders of `sys.path` are asked.
    """
    try:
        return util.find_spec(name)
    except ValueError:  # a loaded module without a spec
        raise
    except Exception as error:
        log.warning("sys.meta_path: no finder is asked for %s: %s", shown(name), describe(error))
        return PathFinder.find_spec(name)


def requires_of_polyattn() -> list[str]:
    """Return polyattn's own requirements, its extras' among them."""
    own = installed("polyattn")
    return [] if own is None else own.requires or []
