"""Is each field what its annotation says? Declarations are plain data: exact types, no subclasses."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from polyattn.errors import shown


def mismatches(declaration: Any) -> Iterator[str]:
    """Yield a line for each field of a dataclass whose value isn't of the annotated type.

    Lists for tuples, sets for frozensets, numpy's integers and bools for `int` are mismatches:
    what is declared is hashed, compared and written as JSON.
    """
    kind: Any = type(declaration)
    for name, words, hint in _annotations(kind):
        value = getattr(declaration, name)
        if not _fits(value, hint):
            yield (
                f"{kind.__name__}.{name}={shown(value)} is of type {type(value).__name__}; "
                f"it must be {words}"
            )


def require(declaration: Any) -> None:
    """Raise `ValueError` with every mismatch of a dataclass."""
    wrong = list(mismatches(declaration))
    if wrong:
        raise ValueError("; ".join(wrong))


@cache
def _annotations(kind: type) -> tuple[tuple[str, str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, str(f.type), hints[f.name]) for f in dataclasses.fields(kind))


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is None:
        if hint is Any:
            return True
        if hint is float:
            return type(value) in (int, float) and math.isfinite(value)
        return type(value) is hint
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        return type(value) in (dict, types.MappingProxyType) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if origin is tuple and inner[-1] is not Ellipsis:
        return type(value) is tuple and len(value) == len(inner) and all(map(_fits, value, inner))
    return type(value) is origin and all(_fits(item, inner[0]) for item in value)
