"""Finds the model that a command names: a path or a bundled config."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from polyattn.errors import ConfigError, nearest

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
    if Path(name).exists():
        return Path(name)
    if name in bundled_models():
        return bundled("models", f"{name}.json")
    raise ConfigError(
        f"model {name!r} is neither a file nor a bundled model{nearest(name, bundled_models())}"
    )
