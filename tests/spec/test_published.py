"""Are published configs read, with all the fields that their publishers left in them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from polyattn.spec.decompose import group_layers
from polyattn.spec.huggingface import model_layers

PUBLISHED = [
    json.loads(line)
    for line in Path(__file__).with_name("published.jsonl").read_text().splitlines()
]
"""Configs of well-known models, lists of numbers and bookkeeping shortened, and their layers."""


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_a_published_config(model: dict[str, Any]) -> None:
    groups = group_layers(model_layers(model["config"]).specs)
    assert [f"{len(layers)} x {spec}" for spec, layers in groups.items()] == model["layers"]
