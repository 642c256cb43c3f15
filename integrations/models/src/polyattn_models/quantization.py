"""What does a checkpoint say about its cached keys and values? Its quantisation may name a format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyattn_models.config import Config

WHERE = ("quantization_config", "compression_config")
PLAIN: tuple[Any, ...] = (None, False, "", "none", "auto", [], {})
"""Values that leave the cache as it is."""


def check_cache_scheme(cfg: Config) -> None:
    """Refuse a quantised cache that the checkpoint asks for, in the model or a tower of it.

    compressed-tensors and fp8 call it `kv_cache_scheme`, ModelOpt `kv_cache_quant_algo`, Quark
    `kv_cache_group`. Raises `ConfigError`.
    """
    for place in WHERE:
        for path, value in _schemes(cfg.values.get(place), place):
            raise cfg.error(
                path,
                value,
                "is a format of cached keys and values that isn't read yet; name the cache's dtype "
                "yourself, kv_cache_dtype='auto' for the model's own (--kv-cache-dtype auto)",
            )
    for part in cfg.parts:
        check_cache_scheme(part)


def _schemes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return every field about the cache, at any depth, with its path."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if "kv_cache" in str(name) and inner not in PLAIN:
            yield f"{path}.{name}", inner
        else:
            yield from _schemes(inner, f"{path}.{name}")
