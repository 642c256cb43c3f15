"""Are a plugin's declarations usable? Checks every field before anything is registered.

Declarations are dataclasses of plain data. Each field has exactly its annotation's type. A class may
also have a method `problems`, which yields a line for each fault of its values. A declaration that
passes can't make a list, a selection or a report fail; its texts are one plain line each.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from polyattn.errors import PluginError, plain, shown
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import FUNCTIONS, AttentionVariant

BACKEND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
PLATFORM_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
PLUGIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ARCH = re.compile(r"[A-Za-z0-9_.]{1,32}")
_ARCHS = re.compile(r"([a-z_]+)(\d+)(?:\+|-\1(\d+))")


def accepted(hook: str, answer: Any, kind: type) -> list[Any]:
    """Return the declarations in a hook's answer, ready to register. Raises `PluginError`."""
    if answer is None:
        return []
    if type(answer) not in (list, tuple):
        raise PluginError(f"{hook}() returned {shown(answer)}, not a list of {kind.__name__}")
    for entry in answer:
        if type(entry) is not kind:
            raise PluginError(
                f"{hook}() returned {shown(entry)} in its list, not a {kind.__name__} (a subclass "
                "of it isn't taken either)"
            )
        wrong = list(problems(entry))
        if wrong:
            raise PluginError("; ".join(wrong))
    entries = [_canonical(entry) for entry in answer]
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PluginError(f"{hook}() declares {', '.join(twice)} twice; rename one")
    return entries


def accepted_timings(answer: Any) -> tuple[str, ...]:
    """Return the tables in a hook's answer, unread. Raises `PluginError`."""
    if answer is None:
        return ()
    if type(answer) not in (list, tuple):
        raise PluginError(f"polyattn_timings() returned {shown(answer)}, not a list of paths")
    for path in answer:
        if type(path) is not str or plain(path) != path or not os.path.isabs(path):  # noqa: PTH117
            raise PluginError(
                f"polyattn_timings() returned {shown(path)}, which is not an absolute path as text; "
                'write str(Path(__file__).with_name("timings.json"))'
            )
    return tuple(answer)


def check_api_versions(answer: Any, version: int) -> None:
    """Raise `PluginError` unless a plugin's (lowest, highest) API version includes ours."""
    if answer is None:
        raise PluginError(
            "does not implement polyattn_api_versions(); a plugin is a module of hooks, or a function "
            "under polyattn.kernel.backend's decorator"
        )
    if (
        type(answer) not in (tuple, list)
        or len(answer) != 2
        or any(type(number) is not int for number in answer)
        or answer[0] > answer[1]
    ):
        raise PluginError(
            f"polyattn_api_versions() returned {shown(answer)}; it must be two whole numbers, the "
            "lowest and the highest version"
        )
    low, high = answer
    if not low <= version <= high:
        newer = "upgrade polyattn" if low > version else "upgrade the plugin"
        raise PluginError(
            f"needs API version {low} to {high}; this polyattn has {version}: {newer}"
        )


def problems(declaration: Any) -> Iterator[str]:
    """Yield the errors of a declaration and of those inside it.

    A class that checks itself when it is built (`__post_init__`) isn't checked again inside another
    one.
    """
    wrong = list(mismatches(declaration))
    yield from wrong
    if wrong:
        return
    kind = type(declaration)
    yield from declaration.problems() if hasattr(kind, "problems") else _path_problems(declaration)
    for field in dataclasses.fields(declaration):
        value = getattr(declaration, field.name)
        for part in value if type(value) is tuple else (value,):
            if hasattr(type(part), "problems") and not hasattr(part, "__post_init__"):
                yield from problems(part)


def require(declaration: Any) -> None:
    """Raise `ValueError` with everything that is wrong with a declaration."""
    wrong = list(problems(declaration))
    if wrong:
        raise ValueError("; ".join(wrong))


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
                f"it must be {words}{_members(value, hint)}"
            )


def _members(value: Any, hint: Any) -> str:
    """Say how texts are written that are values of the enumeration that a field holds."""
    kinds = (k for k in get_args(hint) if isinstance(k, type) and issubclass(k, Enum))
    members: dict[Any, str] = {m.value: f"{kind.__name__}.{m.name}" for kind in kinds for m in kind}
    if not isinstance(value, set | frozenset | tuple | list):
        return ""
    names = sorted(members[item] for item in value if type(item) is str and item in members)
    return f"; write {', '.join(names)}" if names else ""


def is_arch_pattern(pattern: str) -> bool:
    """Return whether a text is an arch, `"sm_80+"`, or a range with its ends in order."""
    bounds = _ARCHS.fullmatch(pattern)
    if bounds:
        return bounds[3] is None or int(bounds[2]) <= int(bounds[3])
    return _ARCH.fullmatch(pattern) is not None


def plugin_name_problem(name: Any) -> str | None:
    """Return why a name can't be a plugin's, or None. Settings list names with commas between."""
    if type(name) is str and PLUGIN_NAME.fullmatch(name):
        return None
    return (
        f"the plugin name {shown(name)} can't be used; use letters, digits, '_', '-' and '.', "
        "64 at most"
    )


def path_problems(field: str, path: str | None, what: str) -> Iterator[str]:
    """Yield the errors of a function's or class's path. None is valid."""
    if path is None:
        return
    module, colon, name = path.partition(":")
    words = (*module.split("."), name)
    if not colon or not path.isascii() or not all(word.isidentifier() for word in words):
        yield f"{field}={shown(path)} is no path; write 'package.module:{what}'"


_PATHS: dict[type, tuple[str, ...]] = {AttentionVariant: FUNCTIONS, RowFormat: ("encode", "decode")}
"""The functions of declarations whose classes belong to a layer's spec."""


def _path_problems(declaration: Any) -> Iterator[str]:
    """Yield which functions a declaration doesn't name by path, or by none."""
    kind = type(declaration)
    for field in _PATHS[kind]:
        value, where = getattr(declaration, field), f"{kind.__name__}.{field}"
        if value is None or isinstance(value, str):
            yield from path_problems(where, value, "function")
        else:
            yield (
                f"{where}={shown(value)}: a plugin names its functions by path, "
                "'package.module:function', so that listing imports no torch"
            )


def _canonical(declaration: Any) -> Any:
    """Return the declaration with plain texts, and names as users write them."""
    declaration = _plain(declaration)
    return declaration.canonical() if hasattr(declaration, "canonical") else declaration


def _plain(value: Any) -> Any:
    """Return a value whose every text is plain; the same object where all of them were."""
    if type(value) is str:
        return plain(value)
    if type(value) is tuple:
        items = tuple(map(_plain, value))
        return value if _same(items, value) else items
    if type(value) is dict:
        items = tuple(map(_plain, value.values()))
        return (
            value if _same(items, tuple(value.values())) else dict(zip(value, items, strict=True))
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, v in old.items() if (new := _plain(v)) is not v}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


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
