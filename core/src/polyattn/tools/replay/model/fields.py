"""What does a model's config say beyond its attention? The fields that a whole decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.errors import nearest
from polyattn.spec.models import model_reader

ONLY = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}}
"""Fields of the publisher's own code with the only value that transformers computes."""


class Fields:
    """A decoder's config: each field of its type, or of the type to `assume`, checked, or its default.

    Raises `ConfigError` for a field's value.
    """

    def __init__(self, source: object, assume: str | None = None):
        self.cfg = model_reader().text_config(source, assume)
        self.model_type: str = self.cfg.model_type
        self.defaults: Mapping[str, Any] = self.cfg.cls.decoder
        for field, value in ONLY.get(self.model_type, {}).items():
            self.cfg.only(field, value)

    def value(self, name: str) -> Any:
        """Return a field as the file has it, null included, or its default."""
        return self.cfg.values[name] if self.cfg.given(name) else self.defaults[name]

    def size(self, name: str) -> int:
        """Return a positive integer."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.cfg.error(name, value, "must be a positive integer")
        return value

    def index(self, name: str) -> int:
        """Return 0 or a positive integer."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.cfg.error(name, value, "must be 0 or a positive integer")
        return value

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.value(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self.cfg.error(name, value, "must be a positive number")
        return float(value)

    def optional(self, name: str) -> float | None:
        """Return a positive number, or None where the field is null."""
        return None if self.value(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.cfg.error(name, value, "must be true or false")
        return value

    def choice(self, name: str, valid: Mapping[str, Any]) -> Any:
        """Return what a name stands for."""
        value = self.value(name)
        if not isinstance(value, str) or value not in valid:
            raise self.cfg.error(name, value, f"is unknown{nearest(str(value), valid)}")
        return valid[value]

    def below(self, name: str, limit: str) -> int:
        """Return a positive integer that is at most another field's."""
        value, most = self.size(name), self.size(limit)
        if value > most:
            raise self.cfg.error(name, value, f"must be at most {limit}={most}")
        return value
