"""Which distributions and modules are here? As importlib, but a failing finder doesn't stop it."""

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

    That stops at any error of an entry of `sys.meta_path`; this function skips such an entry.
    """
    kind = metadata.DistributionFinder.Context
    context = kind() if name is None else kind(name=name)
    for finder in tuple(sys.meta_path):
        try:
            yield from getattr(finder, "find_distributions", lambda _: ())(context)
        except Exception as error:
            log.warning("sys.meta_path: %s is passed over: %s", shown(finder), describe(error))


def installed(name: str) -> metadata.Distribution | None:
    """Return the installed distribution of this name, or None.

    Args:
        name: a distribution's name, in any spelling that pip takes.

    Returns:
        The distribution, with its `version` and `metadata`; None if it isn't installed.

    Examples:
        >>> installed("torch").metadata["Name"], installed("no-such-distribution")
        ('torch', None)

    """
    return next(distributions(name), None)


def find_spec(name: str) -> ModuleSpec | None:
    """Return a top-level module's spec, or None; imports nothing of the module.

    It asks `importlib.util.find_spec`. If an entry of `sys.meta_path` raises, a warning names the error,
    and the folders of `sys.path` answer.

    Args:
        name: the module's name, without dots.

    Returns:
        The spec, or None if there is no such module.

    Raises:
        ValueError: the module is loaded and has no spec.

    Examples:
        >>> find_spec("json").name, find_spec("no_such_module")
        ('json', None)

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
