"""Finds and reads what a command names: a config or a bundled model, a layer as JSON."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from polyattn.errors import ConfigError, PolyattnError, SettingsError, describe, nearest, shown
from polyattn.spec.layer import LayerSpec

if TYPE_CHECKING:
    from polyattn.tools.cli.options import Reading

log = logging.getLogger("polyattn")

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_TRACE = "azure_conversation.csv"


def bundled(*parts: str) -> Path:
    """Return the path of a file that the package carries."""
    return Path(str(resources.files("polyattn"))).joinpath("data", *parts)


def bundled_models() -> list[str]:
    """Return the names of the bundled configs."""
    return sorted(path.stem for path in bundled("models").glob("*.json"))


def find_config(name: str | None) -> Path:
    """Return the config behind a path or a bundled model's name. Raises `ConfigError`."""
    name = name or DEFAULT_MODEL
    if name in bundled_models():
        return bundled("models", f"{name}.json")
    path = Path(name)
    try:
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return path
        there = path.is_dir() or file.exists()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be read
        raise ConfigError(f"model {shown(name)} can't be read: {describe(error)}") from error
    if there:
        kind = "no such file" if path.is_dir() and not file.exists() else "is not a regular file"
        raise ConfigError(f"{file}: {kind}; name a config.json or its directory")
    raise ConfigError(
        f"model {shown(name)} is neither a file nor a bundled model{nearest(name, bundled_models())}"
    )


def read_specs(
    model: str | None, spec_json: str | None, reading: Reading
) -> tuple[str, list[LayerSpec]]:
    """Return the layers that a command names, and what they are of: a path or `--spec`.

    Raises `SettingsError` when both a model and a layer are named, or a layer and how to read a config;
    `ConfigError`, `SpecError`.
    """
    if spec_json is not None and (reading.assume or reading.ignore):
        raise SettingsError(
            "--assume and --ignore set how a config is read; --spec is a layer itself"
        )
    if spec_json is None:
        path = find_config(model)
        try:
            specs = LayerSpec.from_hf_config(
                path,
                assume=reading.assume,
                ignore=tuple(reading.ignore or ()),
                kv_cache_dtype=reading.kv_cache_dtype,
            )
            _warn_uncached(str(path), specs, reading)
            return str(path), [_in_blocks(spec, reading.block_size) for spec in specs]
        except PolyattnError:
            raise
        except (RecursionError, ValueError) as error:  # lists too deep, numbers too long
            raise ConfigError(f"{path}: is no config: {describe(error)}") from None
    if model is not None:
        raise SettingsError(f"model {model!r} and --spec name different layers; use one of them")
    try:
        spec = LayerSpec.from_json(spec_json)
        if reading.kv_cache_dtype is not None:
            spec = spec.replace(kv_cache_dtype=reading.kv_cache_dtype)
        _warn_uncached("--spec", [spec], reading)
        return "--spec", [_in_blocks(spec, reading.block_size)]
    except PolyattnError:
        raise
    except (RecursionError, ValueError) as error:
        raise SettingsError(f"--spec is no LayerSpec: {describe(error)}") from None


def has_blocks(spec: LayerSpec) -> bool:
    """Whether a layer keeps keys in the blocks of a cache."""
    return bool(spec.cached) and not spec.kind.is_recurrent


def _warn_uncached(path: str, specs: list[LayerSpec], reading: Reading) -> None:
    """Warn of a cache's options where no layer has one: an engine's command passes them to any model."""
    if any(map(has_blocks, specs)):
        return
    block_size, dtype = reading.block_size, reading.kv_cache_dtype
    for flag, value in (("--block-size", block_size), ("--kv-cache-dtype", dtype)):
        if value not in (None, "auto"):
            log.warning("%s=%s changes nothing: no layer of %s has a cache", flag, value, path)


def _in_blocks(spec: LayerSpec, block_size: int | None) -> LayerSpec:
    """Return a layer with another block size, where it has blocks at all."""
    if block_size is None or not has_blocks(spec):
        return spec
    return spec.replace(block_size=block_size)
