"""Which fields has each type of model, and what are their defaults? Facts from transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class ModelClass:
    """A config class: its fields' defaults, other names of fields, and its sub-configs' types."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: Any = 10000.0


@cache
def _table() -> dict[str, Any]:
    path = resources.files("polyattn").joinpath("data").joinpath("config_classes.json")
    return json.loads(path.read_text(encoding="utf-8"))["classes"]  # type: ignore[no-any-return]


@cache
def model_class(model_type: str) -> ModelClass:
    """Return the class of a type; an empty one where there is none."""
    return ModelClass(**_table().get(model_type, {}))
