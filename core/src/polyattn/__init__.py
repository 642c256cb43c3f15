"""polyattn: one attention interface, every vendor's kernels.

    selection = polyattn.select(spec)                    # a value: what is chosen, and why
    group = polyattn.LayerGroup(selection)               # the loaded kernels, shared by layers
    layers = [polyattn.Attention(group) for _ in range(32)]

    plan = group.plan(batch)                             # once a step; a value
    out = layer(query, key, value, cache, plan)          # each layer

`__init__.pyi` lists the public names, for type checkers and for this module. Python imports a name's
module on first use, so that asking what is installed costs milliseconds.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^from polyattn\.(\S+) import (\w+) as \w+$", re.MULTILINE)
try:
    _LIST = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
except NotADirectoryError as error:
    raise ImportError(
        f"polyattn can't run inside a zip file, {error.filename}: install it in a folder, or have the "
        "application unpacked when it starts (shiv, pex)"
    ) from error
_HOME = {name: module for module, name in _LINE.findall(_LIST)}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'polyattn' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(f"polyattn.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
