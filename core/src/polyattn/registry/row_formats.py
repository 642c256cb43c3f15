"""Which formats of rows are there? Core's, plugins' and those registered in this process."""

from __future__ import annotations

from polyattn.errors import PluginError, nearest
from polyattn.registry.discovery import changed, discover
from polyattn.registry.info import load_object
from polyattn.spec.kinds import KV_CACHE_DTYPES
from polyattn.spec.row_format import RowFormat

_registered: dict[str, RowFormat] = {}


def register_row_format(format: RowFormat) -> RowFormat:
    """Make a format of rows known to this process; returns it.

    Raises `PluginError` where the name is taken, `SpecError` where its functions contradict each other.
    """
    if type(format) is not RowFormat:
        raise PluginError(f"register_row_format takes a RowFormat, not {format!r}")
    if format.name in row_formats() or format.name in KV_CACHE_DTYPES:
        raise PluginError(
            f"a format of rows named {format.name!r} is registered already; choose another name, or "
            f"unregister_row_format({format.name!r}) first"
        )
    load_object("polyattn.runtime.cache.rows:check_format")(format)
    _registered[format.name] = format
    changed()
    return format


def unregister_row_format(name: str) -> None:
    """Forget a format that `register_row_format` made known. Raises `PluginError`."""
    if _registered.pop(name, None) is None:
        raise PluginError(
            f"no format of rows named {name!r} was registered{nearest(name, _registered)}"
        )
    changed()


def row_formats() -> dict[str, RowFormat]:
    """Return every format of rows that is known, by name."""
    return discover().row_formats | _registered
