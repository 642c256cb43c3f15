"""Which package reads a Hugging Face config? `polyattn-models`, which core finds by its entry point.

The reader is a distribution of its own, so a newer transformers needs no newer core.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from polyattn.errors import ConfigError, describe

GROUP = "polyattn.models"
"""The entry point's group; its object is a module or value with `ModelReader`'s functions."""
INSTALL = "run `pip install polyattn-models` (from a checkout: `pip install ./integrations/models`)"


class ModelConfig(Protocol):
    """The fields of a model or of its text tower."""

    source: str
    model_type: str
    values: dict[str, Any]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` that the config has and that isn't null, or the default."""

    def given(self, name: str) -> bool:
        """Return whether the config itself has the field, null or not."""

    def only(self, name: str, *valid: Any) -> None:
        """Refuse every other value of a field. Raises `ConfigError`."""

    def error(self, name: str, value: Any, remedy: str) -> ConfigError:
        """Return the error about a field's value."""


class ModelReader(Protocol):
    """A reader of configs; `config` is a mapping, a config object, or a path."""

    def layer_specs(
        self,
        config: object,
        *,
        assume: str | None = None,
        ignore: Collection[str] = (),
        strict: bool = True,
        kv_cache_dtype: str | None = None,
    ) -> list[Any]:
        """Return what `LayerSpec.from_hf_config` returns."""

    def read_config(self, config: object) -> ModelConfig:
        """Return the fields that the config states, the text tower's among the model's."""

    def text_config(self, config: object, assume: str | None = None) -> ModelConfig:
        """Return the text tower's config, with the defaults of its type or of the type to `assume`."""

    def weights_quantized(self, config: ModelConfig) -> bool:
        """Return whether a checkpoint's scheme is of more than cached keys and values."""

    def cache_dtype_of(self, config: ModelConfig) -> str:
        """Return the `kv_cache_dtype` that a checkpoint asks for, else `"auto"`. Raises `ConfigError`."""

    def is_cache_scale(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is a scale of cached keys or values."""

    def cache_scales(self, folder: str) -> dict[int, dict[str, Any]]:
        """Return those scales by layer, as `Attention` takes them. Raises `ConfigError`."""


@cache
def model_reader() -> ModelReader:
    """Return the installed reader. Raises `ConfigError` where there is none or it can't be loaded."""
    for entry in entry_points(group=GROUP):
        try:
            return cast(ModelReader, entry.load())
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            raise ConfigError(
                f"{owner}, which reads models' configs, can't be loaded: {describe(error)}; reinstall it"
            ) from error
    raise ConfigError(f"polyattn-models, which reads models' configs, isn't installed; {INSTALL}")
