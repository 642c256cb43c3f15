"""What polyattn raises. Every message names the field, the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolyattnError(Exception):
    """Base of every error that polyattn raises on purpose."""


class SpecError(PolyattnError, ValueError):
    """A `LayerSpec` that no layer can have."""


class ConfigError(PolyattnError, ValueError):
    """A model's `config.json` that can't be read or isn't understood."""


class SettingsError(PolyattnError, ValueError):
    """A setting (argument, flag, variable, file) that can't be honoured."""


class DeviceError(PolyattnError, ValueError):
    """A device or profile that is unknown or can't be detected."""


class PluginError(PolyattnError):
    """A plugin that can't be used."""


class SelectionError(PolyattnError):
    """No backend can serve the layer; the message lists every rejection."""


class BatchError(PolyattnError, ValueError):
    """A batch, or the tensors that came with it, that breaks the contract."""


class CacheError(PolyattnError, ValueError):
    """A KV cache that doesn't fit the layer, or has no room left."""


class TraceError(PolyattnError, ValueError):
    """A request trace with a bad line."""


def nearest(value: str, valid: Iterable[str]) -> str:
    """Return `"; did you mean 'X'?"` with the closest valid spelling, or the list of all."""
    choices = sorted(valid)
    folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(value.casefold(), folded, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folded[close[0]]!r}?"
    return f"; valid: {', '.join(choices)}" if choices else ""
