"""Is what a plugin declares usable? Every field of it, before anything of it is registered.

A declaration that passes can't make a list, a selection or a report fail; its texts are one plain
line each.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyattn.errors import PluginError, nearest, plain, shown
from polyattn.registry import typed
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.claims import PLATFORM_NAME, is_arch_pattern
from polyattn.registry.hooks import Platform
from polyattn.registry.info import BackendInfo, Priority, Variant
from polyattn.registry.requirements import requirement_syntax_problem
from polyattn.registry.sizes import Sizes
from polyattn.spec.features import FEATURES
from polyattn.spec.kinds import PHASES
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import FUNCTIONS, AttentionVariant

BACKEND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
PLUGIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
LARGEST_SCORE = 10**6


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
        wrong = list(_problems(entry))
        if wrong:
            raise PluginError("; ".join(wrong))
    found = [_canonical(entry) for entry in answer]
    names = [entry.name for entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PluginError(f"{hook}() declares {', '.join(twice)} twice; rename one")
    return found


def accepted_timings(answer: Any) -> tuple[str, ...]:
    """Return the tables in a hook's answer; who reads them sees what they hold. Raises `PluginError`."""
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
        raise PluginError("does not implement polyattn_api_versions()")
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


def plugin_name_problem(name: Any) -> str | None:
    """Say why a name can't be a plugin's: settings list names with commas between them."""
    if type(name) is str and PLUGIN_NAME.fullmatch(name):
        return None
    return (
        f"the plugin name {shown(name)} can't be used; use letters, digits, '_', '-' and '.', "
        "64 at most"
    )


def _problems(declaration: Any) -> Iterator[str]:
    """Yield what is wrong with a declaration and with the declarations that it holds."""
    wrong = list(typed.mismatches(declaration))
    yield from wrong
    if wrong:
        return
    if type(declaration) in _VALUES:
        yield from _VALUES[type(declaration)](declaration)
    for field in dataclasses.fields(declaration):
        value = getattr(declaration, field.name)
        for part in value if type(value) is tuple else (value,):
            if dataclasses.is_dataclass(part) and type(part) not in _CHECK_THEMSELVES:
                yield from _problems(part)


def _platform_problems(platform: Platform) -> Iterator[str]:
    if not PLATFORM_NAME.fullmatch(platform.name):
        yield (
            f"Platform.name={shown(platform.name)} can't be a platform's name; use lower-case "
            "letters, digits and _"
        )
    yield from _path_problems("Platform.detect", platform.detect, "function")
    if platform.current is not None:
        yield from _path_problems("Platform.current", platform.current, "function")
    if platform.interpret is not None:
        yield from _path_problems("Platform.interpret", platform.interpret, "function")
    for kind in platform.device_types:
        if not PLATFORM_NAME.fullmatch(kind):
            yield f"Platform.device_types: {shown(kind)} can't be a type of torch device"


def _backend_problems(info: BackendInfo) -> Iterator[str]:
    if not BACKEND_NAME.fullmatch(info.name):
        yield (
            f"BackendInfo.name={shown(info.name)} can't be a backend's name; use letters, digits, "
            "_ and -, 64 at most"
        )
    for alias in info.aliases:
        if not BACKEND_NAME.fullmatch(alias):
            yield (
                f"BackendInfo.aliases: {shown(alias)} can't be a backend's name; use letters, digits, "
                "_ and -, 64 at most"
            )
    called = [name.upper() for name in (info.name, *info.aliases)]
    if len(set(called)) < len(called):
        yield f"BackendInfo.aliases: {shown(called)} has a name twice, the backend's own included"
    yield from _build_problems(info)
    for where in info.proof:
        if not is_arch_pattern(where):
            yield f"BackendInfo.proof: {shown(where)} is neither a platform nor an arch"
    for name in info.proof_of_runs:
        if not PLUGIN_NAME.fullmatch(name):
            yield f"BackendInfo.proof_of_runs: {shown(name)} can't be named by `runs`"
    if info.build:
        yield f"BackendInfo.build={shown(info.build)} is not declared; declare variants"
    names = [variant.name for variant in info.variants]
    if len(set(names)) < len(names):
        yield f"BackendInfo.variants: {shown(names)} names a build twice"
    if info.variants and info.builds[0] != dataclasses.replace(
        info, variants=(), build=info.variants[0].name
    ):
        yield (
            "BackendInfo.variants: the backend's own claims aren't those of its first build; declare "
            "it with BackendInfo.of_variants(...)"
        )


def _variant_problems(variant: Variant) -> Iterator[str]:
    if not PLUGIN_NAME.fullmatch(variant.name):
        yield (
            f"Variant.name={shown(variant.name)} can't be a build's name; use letters, digits, '_', "
            "'-' and '.', 64 at most"
        )
    yield from _build_problems(variant)


def _attention_variant_problems(variant: AttentionVariant) -> Iterator[str]:
    for field in FUNCTIONS:
        given = getattr(variant, field)
        if given is not None and not isinstance(given, str):
            yield (
                f"AttentionVariant.{field}={shown(given)}: a plugin names its functions by path, "
                "'package.module:function', so that listing imports no torch"
            )
        elif given is not None:
            yield from _path_problems(f"AttentionVariant.{field}", given, "function")


def _row_format_problems(format: RowFormat) -> Iterator[str]:
    for field in ("encode", "decode"):
        if not isinstance(given := getattr(format, field), str):
            yield (
                f"RowFormat.{field}={shown(given)}: a plugin names its functions by path, "
                "'package.module:function', so that listing imports no torch"
            )
        else:
            yield from _path_problems(f"RowFormat.{field}", given, "function")


def _build_problems(info: BackendInfo | Variant) -> Iterator[str]:
    kind = type(info).__name__
    yield from _path_problems(f"{kind}.path", info.path, "Class")
    if info.probe is not None:
        yield from _path_problems(f"{kind}.probe", info.probe, "function")
    for field in ("runs", "variant_check", "rows_check") if isinstance(info, BackendInfo) else ():
        if getattr(info, field) is not None:
            yield from _path_problems(f"{kind}.{field}", getattr(info, field), "function")
    for text in info.requires:
        problem = requirement_syntax_problem(text)
        if problem:
            yield f"{kind}.requires: {problem}"


def _priority_problems(priority: Priority) -> Iterator[str]:
    if abs(priority.score) > LARGEST_SCORE:
        yield f"Priority.score={shown(priority.score)}: scores go from 0 to 100"
    if priority.platform is not None and not PLATFORM_NAME.fullmatch(priority.platform):
        yield f"Priority.platform={shown(priority.platform)} can't be a platform's name"
    if priority.phase is not None and priority.phase not in PHASES:
        yield f"Priority.phase={shown(priority.phase)} is unknown{nearest(priority.phase, PHASES)}"
    if priority.needs is not None and priority.needs not in FEATURES:
        yield f"Priority.needs={shown(priority.needs)} is unknown{nearest(priority.needs, FEATURES)}"
    for pattern in priority.archs:
        if not is_arch_pattern(pattern):
            yield (
                f"Priority.archs: {shown(pattern)} is no arch pattern; write 'sm_90', 'sm_80+' or "
                "'sm_80-sm_90'"
            )


_VALUES: dict[type, Callable[[Any], Iterator[str]]] = {
    Platform: _platform_problems,
    BackendInfo: _backend_problems,
    Variant: _variant_problems,
    Priority: _priority_problems,
    AttentionVariant: _attention_variant_problems,
    RowFormat: _row_format_problems,
}
"""What is looked at beside the types."""
_CHECK_THEMSELVES = (Capabilities, Sizes)
"""These are checked when they are built."""


def _path_problems(field: str, path: str, what: str) -> Iterator[str]:
    module, colon, name = path.partition(":")
    words = (*module.split("."), name)
    if not colon or not path.isascii() or not all(word.isidentifier() for word in words):
        yield f"{field}={shown(path)} is no path; write 'package.module:{what}'"


def _canonical(declaration: Any) -> Any:
    """Return the declaration with plain texts, and a backend's names as users write them."""
    declaration = _plain(declaration)
    if type(declaration) is BackendInfo:
        names = [name.upper() for name in (declaration.name, *declaration.aliases)]
        if names != [declaration.name, *declaration.aliases]:
            return dataclasses.replace(declaration, name=names[0], aliases=tuple(names[1:]))
    return declaration


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
