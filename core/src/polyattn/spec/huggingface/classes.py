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
    """A config class: its fields' defaults, other names of fields, its sub-configs' types.

    `reads`: fields that its code reads beyond its class's, with the defaults that it states there.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: Any = 10000.0
    reads: Mapping[str, Any] = field(default_factory=dict)


@cache
def _table() -> dict[str, Any]:
    path = resources.files("polyattn").joinpath("data").joinpath("config_classes.json")
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def has_class(model_type: str) -> bool:
    """Return whether transformers' code of a type was read for the table."""
    return model_type in _table()["classes"]


@cache
def model_class(model_type: str) -> ModelClass:
    """Return the class of a type; an empty one where there is none."""
    return ModelClass(**_table()["classes"].get(model_type, {}))


def shared_reads() -> dict[str, Any]:
    """Return the fields that caches, masks and rotations read in any type, with their defaults."""
    return _table()["shared"]  # type: ignore[no-any-return]


@cache
def beside() -> frozenset[str]:
    """Return the fields of transformers' classes that no layer depends on."""
    return frozenset(_table()["beside"].split())
