"""Which row formats exist? Core's, plugins' and those registered in this process."""

from __future__ import annotations

from polyattn.errors import PluginError, nearest
from polyattn.registry.discovery import changed, discover
from polyattn.registry.info import load_object
from polyattn.spec.kinds import KV_CACHE_DTYPES
from polyattn.spec.row_format import RowFormat

_registered: dict[str, RowFormat] = {}


def register_row_format(format: RowFormat) -> RowFormat:
    """Make a format of rows known to this process. Returns it.

    Args:
        format: its name, functions and sizes.

    Raises:
        PluginError: the name is taken.
        SpecError: its functions contradict each other.

    Examples:
        >>> plain = RowFormat(
        ...     name="plain",
        ...     encode=lambda row: row.round().clamp(-127, 127).to(torch.int8).view(torch.uint8),
        ...     decode=lambda row, d, size: torch.where(row[d] > 127, row[d] - 256.0, row[d] * 1.0),
        ...     row_bytes=lambda size: size,
        ...     largest=127.0,
        ... )
        >>> register_row_format(plain).name
        'plain'
        >>> unregister_row_format("plain")

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
    """Forget a format that `register_row_format` made known.

    Args:
        name: the format's.

    Raises:
        PluginError: no such format was registered.

    Examples:
        >>> unregister_row_format("plain")
        Traceback (most recent call last):
        polyattn.errors.PluginError: no format of rows named 'plain' was registered...

    """
    if _registered.pop(name, None) is None:
        raise PluginError(
            f"no format of rows named {name!r} was registered{nearest(name, _registered)}"
        )
    changed()


def row_formats() -> dict[str, RowFormat]:
    """Return every format of rows that is known, by name.

    Examples:
        >>> row_formats()["nvfp4"].row_bytes(128)
        72

    """
    return discover().row_formats | _registered
