"""Writes the config classes' fields and defaults, as the installed transformers has them.

Run after a newer transformers: `python tests/spec/update_classes.py`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import transformers
from polyattn.spec.huggingface import READERS
from polyattn.spec.huggingface.known import HARMLESS
from polyattn.tools.cli.models import bundled
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PUBLISHED_AS = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax"}
"""Types whose code is their publishers' own, and the type here that they became."""

BASE = {f.name for f in dataclasses.fields(PretrainedConfig)}


def fields(cls: Any) -> dict[str, Any]:
    """Return each field's default; null for what the class derives from others."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in BASE or HARMLESS.fullmatch(field.name):
            continue
        value = field.default
        if value is dataclasses.MISSING:
            factory = field.default_factory
            value = None if factory is dataclasses.MISSING else factory()
        out[field.name] = value if isinstance(value, (int, float, str, list, tuple)) else None
    try:
        derived = cls().to_dict()
    except Exception:  # a class that can't be made without arguments derives nothing
        derived = {}
    for name in derived:
        if name not in BASE and not HARMLESS.fullmatch(name):
            out.setdefault(name, None)
    return out


def table() -> dict[str, Any]:
    classes = {}
    for name in sorted(READERS):
        source = PUBLISHED_AS.get(name, name)
        if source in CONFIG_MAPPING:
            cls = CONFIG_MAPPING[source]
            aliases = {
                alias: own
                for alias, own in cls.attribute_map.items()
                if not HARMLESS.fullmatch(own) and not callable(getattr(cls, own, None))
            }
            classes[name] = {"fields": fields(cls), "aliases": aliases, "theta": cls.default_theta}
    classes["mpt_attention"] = {"fields": fields(CONFIG_MAPPING["mpt"].sub_configs["attn_config"])}
    return {"transformers": transformers.__version__, "classes": classes}


if __name__ == "__main__":
    text = json.dumps(table(), indent=None, sort_keys=True)
    text = text.replace('}, "', '},\n"')
    bundled("config_classes.json").write_text(text + "\n")
