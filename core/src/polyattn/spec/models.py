"""Which package reads a Hugging Face config? `polyattn-models`, which core finds by its entry point.

The reader is a distribution of its own, so a newer transformers needs no newer core.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from polyattn.errors import ConfigError, describe

GROUP = "polyattn.models"
"""The entry point's group; its object is the module polyattn_models, or one with its functions."""
INSTALL = "run `pip install polyattn-models` (from a checkout: `pip install ./integrations/models`)"


@cache
def model_reader() -> Any:
    """Return the installed reader. Raises `ConfigError` where there is none or it can't be loaded."""
    for entry in entry_points(group=GROUP):
        try:
            return entry.load()
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            raise ConfigError(
                f"{owner}, which reads models' configs, can't be loaded: {describe(error)}; reinstall it"
            ) from error
    raise ConfigError(f"polyattn-models, which reads models' configs, isn't installed; {INSTALL}")
