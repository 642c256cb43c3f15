"""What polyattn raises, and checks of values. Every message names the field, the value and the remedy."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Collection, Iterable
from typing import Any

LONGEST_TEXT = 300
"""Characters shown of a text that comes from outside: a plugin, a file, a library's exception."""
LARGEST = 1 << 24
"""No head count, size or window of a model comes near; what exceeds it is a slip."""


class PolyattnError(Exception):
    """Base class of every error that polyattn raises on purpose.

    Examples:
        >>> try:
        ...     LayerSpec(num_heads=0, head_size=64)
        ... except PolyattnError as error:
        ...     print(type(error).__name__)
        SpecError

    """


class SpecError(PolyattnError, ValueError):
    """A `LayerSpec` describes no layer."""


class ConfigError(PolyattnError, ValueError):
    """A model's `config.json` can't be read or isn't understood."""


class SettingsError(PolyattnError, ValueError):
    """A setting (argument, flag, variable or file) can't be honoured.

    Examples:
        >>> Settings(layout="NDH")
        Traceback (most recent call last):
        polyattn.errors.SettingsError: Settings.layout='NDH' is unknown; did you mean 'NHD'?

    """


class DeviceError(PolyattnError, ValueError):
    """A device or a profile is unknown or can't be detected."""


class PluginError(PolyattnError):
    """A plugin can't be used."""


class SelectionError(PolyattnError):
    """No backend can serve the layer; the message lists every rejection."""


class BatchError(PolyattnError, ValueError):
    """A batch, or a tensor that came with it, breaks the contract.

    Examples:
        >>> Batch([0, 5], [3, 4])
        Traceback (most recent call last):
        polyattn.errors.BatchError: ...

    """


class CacheError(PolyattnError, ValueError):
    """A KV cache doesn't fit the layer, or has no room left."""


class TraceError(PolyattnError, ValueError):
    """A request trace has a bad line."""


class WeightsError(PolyattnError, ValueError):
    """A checkpoint can't be read, or isn't of its config's model."""


MOST_NAMES = 20
"""A longer list of names is a command's, not an error's."""


def nearest(value: object, valid: Iterable[str], listed: str = "") -> str:
    """Return `"; did you mean 'X'?"`, or the list of all, or where they are `listed`.

    X is what begins with `value`, each of several, or the one that ends with it, or else the
    closest valid spelling. A first word that all of them have makes none of them closer.
    """
    choices = sorted(valid)
    folded = {choice.casefold(): choice for choice in choices}
    text = (value if isinstance(value, str) else shown(value))[:LONGEST_TEXT].casefold()
    part = [x for x in folded if text and x.startswith(text)]
    last = [x for x in folded if x.endswith(f"_{text}")]
    close = [text] if text in folded else part or (last if len(last) == 1 else [])
    head = text[: text.find("_") + 1]
    start = len(head) if all(name.startswith(head) for name in folded) else 0
    ends = {name[start:]: name for name in folded}
    close = close or [ends[x] for x in difflib.get_close_matches(text[start:], ends, n=1)]
    if close:
        return f"; did you mean {' or '.join(repr(folded[name]) for name in close)}?"
    if listed and len(choices) > MOST_NAMES:
        return f"; {listed}"
    return f"; valid: {', '.join(choices)}" if choices else ""


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)?", re.DOTALL)


def plain(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return `text` as one printable line of at most `limit` characters, without escape sequences."""
    if len(text) <= limit and text.isprintable():
        return text
    # Twice the limit is enough to clean: what is longer is cut anyway.
    text = _ESCAPES.sub("", text[: 2 * limit + 1])
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object, limit: int = 80) -> str:
    """Return the `repr` of a value from outside, plain and short, whatever its `__repr__` does."""
    try:
        return plain(repr(value), limit)
    except Exception:
        return f"<{plain(type(value).__name__, limit)} without a repr>"


def describe(error: BaseException) -> str:
    """Return an exception in one plain line: its type and text, where its text can be had."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be shown)"
    if isinstance(error, PolyattnError):
        return plain(text)
    if isinstance(error, SyntaxError):
        text = f"{error.msg} ({error.filename}, line {error.lineno})"
    return plain(f"{type(error).__name__}: {text}").rstrip(": ")


def ranges(indices: list[int]) -> str:
    """Return the text `0-2, 5` for the layers 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def integer(
    name: str,
    value: Any,
    low: int,
    high: int = LARGEST,
    hint: str = "",
    error: type[PolyattnError] = SpecError,
) -> None:
    """Refuse anything but an integer from `low` to `high`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low:
        wanted = "a positive integer" if low == 1 else f"an integer, {low} or more"
        raise error(f"{name}={value!r} must be {wanted}{hint}")
    if value > high:
        raise error(f"{name}={value!r} is more than {high}, the most that a layer can have")


def number(
    name: str, value: Any, hint: str, low: float = -math.inf, high: float = math.inf
) -> None:
    """Refuse anything but a finite real number from `low` to `high`."""
    if not finite(value) or not low <= value <= high:
        raise SpecError(f"{name}={shown(value)} must be {hint}")


def finite(value: object) -> bool:
    """Whether a value is a finite number that a float holds: 10^400 is none, nor is True."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def flag(name: str, value: Any, error: type[PolyattnError] = SpecError) -> None:
    """Refuse anything but True and False: a text, "no" too, would count as True."""
    if not isinstance(value, bool):
        raise error(f"{name}={shown(value)} must be True or False")


def choice(name: str, value: Any, valid: Collection[str]) -> None:
    """Check that a field's value is one of the names that it can have."""
    if not isinstance(value, str) or value not in valid:
        raise SpecError(f"{name}={value!r} is unknown{nearest(value, valid)}")
