"""What did the user ask for? Argument, flag, environment variable, file, in this order."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polyattn.errors import SettingsError, describe, finite, flag, integer, nearest, shown
from polyattn.spec.kinds import LAYOUTS, AttentionKind, Role
from polyattn.spec.layer import LayerSpec

PREFIX = "POLYATTN_"
MEANT = ("POLYATTN", "POLYATN", "POLYATTEN", "POLY_ATT")
"""What a variable begins with, in any case, that is meant for polyattn, and ignored if misspelt."""
VARIABLES: dict[str, str] = {
    "POLYATTN_BACKEND": "a backend's name, or scoped names: prefill=NAME,decode=NAME,mla=NAME",
    "POLYATTN_PLUGINS": "comma-separated plugins to load; all others stay unimported",
    "POLYATTN_DISABLE_PLUGINS": "comma-separated plugins whose code is never imported",
    "POLYATTN_LAYOUT": "physical KV-cache layout: NHD, HND or contiguous",
    "POLYATTN_VERIFY": "1 or 0: run each chosen backend once against the reference at start-up",
    "POLYATTN_CHECKS": "1 or 0: check each step's block tables and slots, plans, native scratch",
    "POLYATTN_PROBE_TIMEOUT": "seconds that a plugin's probe or ranking may take (default 2)",
    "POLYATTN_PLUGIN_TIMEOUT": "seconds that a plugin's import, with its hooks, or its detector may "
    "take (default 30)",
    "POLYATTN_CPU_ISA": "instruction set of the native CPU kernels, instead of the best one here",
    "POLYATTN_CPU_PAIRS": "1: instruction set avx512_bf16 multiplies pairs of bfloat16 on Intel's "
    "processors, too, where float32 is faster",
    "POLYATTN_MULTI_BLOCK": "multi-block threshold of TRITON_ATTN's decode: the fewest keys of a "
    "sequence for each of several blocks that share it (default 128), or 0: one block a sequence",
    "POLYATTN_TIMINGS": "a timing table of `polyattn tune` (default: ~/.cache/polyattn/timings.json, "
    "then the plugins' tables), or 0: choose by priority alone",
    "POLYATTN_WHY": "1 or 0: record for `polyattn why` what this process runs (default 1)",
    "POLYATTN_CONFIG": "configuration file (default: ./polyattn.toml, ~/.config/polyattn.toml)",
}
"""Every variable that has an effect."""

FOREIGN_VARIABLES: dict[str, str] = {
    "VLLM_ATTENTION_BACKEND": "alias of POLYATTN_BACKEND",
    "VLLM_USE_FLASHINFER": "deprecated: 1, true or yes means POLYATTN_BACKEND=FLASHINFER",
    "TRTLLM_FORCE_XQA": "1, true or yes means "
    "POLYATTN_BACKEND=attention.decoder.decode=FLASHINFER_TRTLLM where that can serve",
}
XQA = "attention.decoder.decode=FLASHINFER_TRTLLM"
"""The backend of TensorRT-LLM's variable: decodes by its XQA kernels (trtllm-gen on Blackwell)."""
FILE_KEYS = (
    "backend", "plugins", "disable_plugins", "layout", "verify", "checks", "probe_timeout",
    "plugin_timeout", "timings", "multi_block", "why",
)  # fmt: skip
LONGEST_WAIT = 3600
MOST_KEYS = 10**9 - 1
NO_TIMINGS = "0"
PHASE_SCOPES = ("prefill", "decode", "store", "merge", "index")
KIND_SCOPES = tuple(k.value for k in AttentionKind)
ROLE_SCOPES = tuple(r.value for r in Role)
SCOPES = (*PHASE_SCOPES, *KIND_SCOPES, *ROLE_SCOPES)


@dataclass(frozen=True)
class Override:
    """A backend that the user named, for a scope (all of it must match), and where they did.

    `optional`: where it can't serve a layer, a note says so, and another one serves.
    """

    backend: str
    scope: tuple[str, ...]
    source: str
    optional: bool = False

    def applies(self, spec: LayerSpec, phase: str) -> bool:
        """Whether the scope matches `phase` of `spec`. An empty scope matches everything."""
        return set(self.scope) <= {phase, spec.kind.value, spec.role.value}

    def __str__(self) -> str:
        scope = ".".join(self.scope)
        return f"{scope}={self.backend}" if scope else self.backend


@dataclass(frozen=True)
class Settings:
    """What the user set by arguments, variables and the configuration file, resolved.

    Attributes:
        sources: lists of overrides, the strongest first.
        plugins: the only plugins to load; None: all.
        disabled_plugins: plugins not to load.
        layout: of new caches; None: the selection chooses.
        verify: whether each backend is checked against the reference before its first use; None: what
            `select` and `LayerGroup` do by default.
        checks: whether block tables and slots are checked on the device at each step.
        why: whether the process answers `polyattn why`.
        probe_timeout: of a backend's probe, in seconds.
        plugin_timeout: of a plugin's import and hooks, in seconds.
        timings: the file of a timing table; `"0"`: none; None: the user's and the plugins'.
        multi_block: the fewest keys that a thread block takes when several share a sequence; 0: one
            block for each sequence; None: the kernel decides.
        plugins_source: where `plugins` was set, for errors.
        disabled_source: where `disabled_plugins` was set.
        notes: remarks for people.

    Raises:
        SettingsError: a field has a value that isn't understood.

    Examples:
        >>> Settings().with_backend("decode=TORCH_SDPA", "a test").sources[0][0].backend
        'TORCH_SDPA'

    """

    sources: tuple[tuple[Override, ...], ...] = ()
    plugins: tuple[str, ...] | None = None
    disabled_plugins: tuple[str, ...] = ()
    layout: str | None = None
    verify: bool | None = None
    checks: bool = False
    why: bool = True
    probe_timeout: float = 2.0
    plugin_timeout: float = 30.0
    timings: str | None = None
    multi_block: int | None = None
    plugins_source: str = "POLYATTN_PLUGINS"
    disabled_source: str = "POLYATTN_DISABLE_PLUGINS"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("verify", "checks", "why"):
            if getattr(self, name) is not None:
                flag(f"Settings.{name}", getattr(self, name), SettingsError)
        for name in ("plugins", "disabled_plugins"):
            names = getattr(self, name)
            if names is not None and not (
                isinstance(names, tuple) and set(map(type, names)) <= {str}
            ):
                raise SettingsError(
                    f"Settings.{name}={shown(names)} must be a tuple of plugins' names"
                )
        for name in ("probe_timeout", "plugin_timeout"):
            seconds = getattr(self, name)
            if not finite(seconds) or not 0 < seconds <= LONGEST_WAIT:
                raise SettingsError(_not_seconds(f"Settings.{name}", seconds))
        if self.multi_block is not None:
            hint = "; None: the kernel decides"
            integer("Settings.multi_block", self.multi_block, 0, MOST_KEYS, hint, SettingsError)
        if not isinstance(self.timings, str | None):
            raise SettingsError(
                f"Settings.timings={shown(self.timings)} must be a timing table's file, '0' or None"
            )
        for source in self.sources if isinstance(self.sources, tuple) else ("",):
            if not isinstance(source, tuple) or not all(isinstance(o, Override) for o in source):
                raise SettingsError(
                    f"Settings.sources={shown(self.sources)} must be tuples of Override; use "
                    'Settings().with_backend("NAME", "where it was set")'
                )
        if self.layout is not None and self.layout not in LAYOUTS:
            raise SettingsError(
                f"Settings.layout={shown(self.layout)} is unknown{nearest(self.layout, LAYOUTS)}"
            )

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __hash__(self) -> int:
        """Return the hash of all fields, computed once: callers that keep nothing look up by settings."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Another process hashes text otherwise.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def override(self, spec: LayerSpec, phase: str) -> Override | None:
        """Return the strongest source's most specific override; None if there is none.

        Args:
            spec: the layer.
            phase: `"prefill"`, `"decode"` or a service's name.

        """
        for source in self.sources:
            matching = [o for o in source if o.applies(spec, phase)]
            if matching:
                return max(matching, key=lambda o: len(o.scope))
        return None

    def renamed(self, names: Mapping[str, str]) -> Settings:
        """Return the settings with backends' own names for their aliases; a note tells each alias.

        Args:
            names: each backend's own name by the name that the settings have.

        """
        aliases = [f"{alias} is {name}" for alias, name in names.items() if alias != name]
        if not aliases:
            return self
        sources = tuple(
            tuple(replace(o, backend=names[o.backend]) for o in source) for source in self.sources
        )
        return replace(self, sources=sources).noting(*aliases)

    def without_optional(self) -> Settings:
        """Return the settings without the overrides that give way where they can't serve."""
        sources = tuple(tuple(o for o in source if not o.optional) for source in self.sources)
        return replace(self, sources=tuple(filter(None, sources)))

    def noting(self, *notes: str) -> Settings:
        """Return the settings with more notes.

        Args:
            notes: remarks for people.

        """
        return replace(self, notes=(*self.notes, *notes))

    def without_timings(self) -> Settings:
        """Return the settings with every timing table ignored: priorities choose the backends."""
        return replace(self, timings=NO_TIMINGS)

    def with_backend(self, text: str | None, source: str) -> Settings:
        """Return the settings with a stronger source in front.

        Args:
            text: a backend's name, or `"prefill=A,mla.decode=B"`; None changes nothing.
            source: where the text was set, for errors.

        Raises:
            SettingsError: the text isn't such a list.

        """
        if text is None:
            return self
        return replace(self, sources=(parse_overrides(text, source), *self.sources))


def parse_overrides(text: str, source: str) -> tuple[Override, ...]:
    """Parse `"NAME"` or `"prefill=A,mla.decode=B"`. Raises `SettingsError` naming the source."""
    if not isinstance(text, str):  # an argument's, which may be anything
        raise SettingsError(f"{source}={text!r} must be a backend's name, or scope=NAME")
    overrides: dict[tuple[str, ...], Override] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        left, equals, right = (word.strip() for word in item.partition("="))
        scope = tuple(sorted(word.strip() for word in left.split("."))) if equals else ()
        for word in scope:
            if word not in SCOPES:
                raise SettingsError(f"{source}: scope {word!r} is unknown{nearest(word, SCOPES)}")
        for what, words in (("phase", PHASE_SCOPES), ("kind", KIND_SCOPES), ("role", ROLE_SCOPES)):
            if sum(word in words for word in scope) > 1:
                raise SettingsError(
                    f"{source}: {item!r} names a {what} twice, which no layer has; write one item for "
                    "each, with commas between"
                )
        name = right if equals else left
        if not name:
            raise SettingsError(f"{source}: {item!r} names no backend; write scope=NAME")
        if scope in overrides:
            raise SettingsError(
                f"{source}: {item!r} and {str(overrides[scope])!r} apply to the same layers; keep one"
            )
        # vLLM's names from its first engine with two versions. The suffix has no meaning here.
        overrides[scope] = Override(name.upper().removesuffix("_VLLM_V1"), scope, source)
    if not overrides:
        raise SettingsError(f"{source}: is empty; unset it, or name a backend")
    return tuple(overrides.values())


def load(environ: Mapping[str, str], config: Mapping[str, Any], config_name: str) -> Settings:
    """Resolve variables over a configuration file's values. Pure. Raises `SettingsError`."""
    for name in environ:
        if name.upper().startswith(MEANT) and name not in VARIABLES:
            raise SettingsError(
                f"environment variable {name} has no effect{nearest(name, VARIABLES)}"
            )
    for key in config:
        if key not in FILE_KEYS:
            raise SettingsError(f"{config_name}: key {key!r} is unknown{nearest(key, FILE_KEYS)}")

    notes: list[str] = []
    sources = []
    for key, own in config.items():
        name = PREFIX + key.upper()
        if name in environ and environ[name].lower() != str(own).lower():
            where = ", where both name a backend" if key == "backend" else ""
            notes.append(f"{name}={environ[name]} wins over {config_name}: {key}={own}{where}")

    def value(key: str) -> tuple[Any, str]:
        name = PREFIX + key.upper()
        if name in environ:
            return environ[name], f"environment variable {name}"
        return config.get(key), f"{config_name}: {key}"

    if "POLYATTN_BACKEND" in environ:
        sources.append(parse_overrides(environ["POLYATTN_BACKEND"], "POLYATTN_BACKEND"))
    sources += _foreign_overrides(environ, notes)
    if "backend" in config:
        sources.append(parse_overrides(_backend_text(config["backend"], config_name), config_name))
    plugins, plugins_source = value("plugins")
    disabled, disabled_source = value("disable_plugins")
    layout, layout_source = value("layout")
    layouts = {name.upper(): name for name in LAYOUTS}
    if layout is not None and str(layout).upper() not in layouts:
        raise SettingsError(f"{layout_source}={layout!r} is unknown{nearest(str(layout), LAYOUTS)}")
    return Settings(
        sources=tuple(sources),
        plugins=_names(plugins, plugins_source),
        disabled_plugins=_names(disabled, disabled_source) or (),
        layout=layouts[str(layout).upper()] if layout is not None else None,
        verify=_flag(*value("verify")),
        checks=bool(_flag(*value("checks"))),
        why=_flag(*value("why")) is not False,
        probe_timeout=_seconds(*value("probe_timeout"), 2.0),
        plugin_timeout=_seconds(*value("plugin_timeout"), 30.0),
        timings=_timings(*value("timings")),
        multi_block=_keys(*value("multi_block")),
        plugins_source=plugins_source,
        disabled_source=disabled_source,
        notes=tuple(notes),
    )


_cached: tuple[Any, Settings] | None = None


def current_settings() -> Settings:
    """Return the settings of this process.

    Each call compares the environment (about a microsecond), so a changed variable counts at once. The
    configuration file is read again when the environment changes, or after `reload()`.

    Returns:
        The settings: what the variables and the file say, resolved.

    Raises:
        SettingsError: a variable or the file has a value that isn't understood.

    Examples:
        >>> current_settings().checks
        False

    """
    global _cached
    # The raw mapping compares 30 times faster than os.environ, which decodes each entry.
    raw = getattr(os.environ, "_data", None)
    snapshot = raw if raw is not None else dict(os.environ)
    if _cached is not None and _cached[0] == snapshot:
        return _cached[1]
    config, name = read_config_file(os.environ)
    settings = load(os.environ, config, name)
    _cached = (dict(snapshot), settings)
    return settings


def reload() -> Settings:
    """Read the environment and the configuration file again."""
    global _cached
    _cached = None
    return current_settings()


def read_config_file(environ: Mapping[str, str]) -> tuple[Mapping[str, Any], str]:
    """Return the configuration file's values and its name, none without one. Raises `SettingsError`."""
    named = environ.get("POLYATTN_CONFIG")
    if named is not None:
        path = Path(named)
        if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a folder is locked
            what = "is not a regular file" if os.path.exists(path) else "no such file"  # noqa: PTH110
            raise SettingsError(f"POLYATTN_CONFIG={named!r}: {what}")
    else:
        standard = next((p for p in _config_paths() if os.path.isfile(p)), None)  # noqa: PTH113
        if standard is None:
            return {}, ""
        path = standard
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig")), str(path)
    except (ValueError, OSError, RecursionError) as error:
        text = f"{path}: can't be read as TOML: {describe(error)}"
        if isinstance(error, tomllib.TOMLDecodeError) and "\\" in path.read_text("utf-8-sig"):
            text += r"; write \ within single quotes: 'C:\folder'"
        raise SettingsError(text) from error


def _config_paths() -> list[Path]:
    paths = [Path("polyattn.toml")]
    with contextlib.suppress(RuntimeError):  # a container's user may have no home directory
        paths.append(Path.home() / ".config" / "polyattn.toml")
    return paths


def _foreign_overrides(
    environ: Mapping[str, str], notes: list[str]
) -> Iterator[tuple[Override, ...]]:
    """Yield what other engines' variables ask for, each with a note."""
    names: list[tuple[str, str]] = []
    if _flag(environ.get("TRTLLM_FORCE_XQA") or None, "TRTLLM_FORCE_XQA"):
        names.append((XQA, "TRTLLM_FORCE_XQA"))
    if "VLLM_ATTENTION_BACKEND" in environ:
        names.append((environ["VLLM_ATTENTION_BACKEND"], "VLLM_ATTENTION_BACKEND"))
    if _flag(environ.get("VLLM_USE_FLASHINFER") or None, "VLLM_USE_FLASHINFER"):
        names.append(("FLASHINFER", "VLLM_USE_FLASHINFER"))
        notes.append("VLLM_USE_FLASHINFER is deprecated; set POLYATTN_BACKEND=FLASHINFER")
    vllm = "VLLM_ATTENTION_BACKEND"
    for name, source in names:
        stronger = ["POLYATTN_BACKEND", *[vllm] * (source == "VLLM_USE_FLASHINFER")]
        if over := next((each for each in stronger if each in environ), ""):
            notes.append(f"{source} gives way to {over} where both apply to a layer")
        else:
            notes.append(f"{source} is honoured as an alias of POLYATTN_BACKEND")
        optional = source == "TRTLLM_FORCE_XQA"  # TensorRT-LLM serves other layers without it, too
        yield tuple(replace(o, optional=optional) for o in parse_overrides(name, source))


def _backend_text(value: Any, source: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ",".join(_scoped(value, source))
    raise SettingsError(f"{source}: backend={value!r} must be a name or a table of scope = name")


def _scoped(table: Mapping[str, Any], source: str, outer: str = "") -> Iterator[str]:
    """Yield `scope=NAME` for each entry; in TOML `mla.decode` is a table within a table."""
    for scope, name in table.items():
        if isinstance(name, Mapping):
            yield from _scoped(name, source, f"{outer}{scope}.")
        elif isinstance(name, str) and not set(",=") & set(name + scope):
            yield f"{outer}{scope}={name}"
        else:
            raise SettingsError(
                f"{source}: backend.{outer}{scope}={name!r} must be a backend's name"
            )


def _names(value: Any, source: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, str):
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    raise SettingsError(f"{source}={value!r} must be plugin names")


def _flag(value: Any, source: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{source}={value!r} must be 1 or 0")


def _timings(value: Any, source: str) -> str | None:
    """A file, or a word for no. Reading it checks whether it is a table."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if value is False or str(value).strip().lower() in ("0", "false", "no", "off"):
        return NO_TIMINGS
    if not isinstance(value, str) or not os.path.isfile(value):  # noqa: PTH113 - as above
        missing = isinstance(value, str) and not os.path.exists(value)  # noqa: PTH110 - as above
        why = "; no such file" if missing else ""
        raise SettingsError(
            f"{source}={value!r} must be the file of a timing table, as `polyattn tune --out FILE` "
            f"writes it, or 0{why}"
        )
    return value


def _keys(value: Any, source: str) -> int | None:
    """A number of keys, or a word for no: 0."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    text = str(value).strip().lower()
    if value is False or text in ("false", "no", "off"):
        return 0
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise SettingsError(f"{source}={value!r} must be a number of keys, or 0 for one block each")
    return int(text)


def _seconds(value: Any, source: str, default: float) -> float:
    if value is None:
        return default
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds <= LONGEST_WAIT:
        raise SettingsError(_not_seconds(source, value))
    return seconds


def _not_seconds(source: str, value: Any) -> str:
    return f"{source}={shown(value)} must be a positive number of seconds, {LONGEST_WAIT} at most"
