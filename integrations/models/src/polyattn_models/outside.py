"""Readers from outside: a package adds a `model_type` by an entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from polyattn.errors import ConfigError, describe

from polyattn_models.layers import Reader

GROUP = "polyattn.readers"
"""The entry points' group: a name is a `model_type`, its object a `Reader`."""


def outside_reader(model: str) -> Reader | None:
    """Return the reader that an installed package has for a type, None for none.

    Types that are read here stay as they are. Raises `ConfigError` where the package's can't be loaded.
    """
    for entry in entry_points(group=GROUP, name=model):
        try:
            reader: Reader = entry.load()
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            raise ConfigError(
                f"the reader of model_type={model!r} from {owner} can't be loaded: {describe(error)}"
            ) from error
        return reader
    return None
