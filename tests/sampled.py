"""A kit's plugin for pytest, `-p sampled`: a third of the cases that searches draw, too."""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest

DRAWN = re.compile(r"(.* )?(head_size|block_size|kv_heads|gqa) \d+|rows \S+ .+")
"""Labels of numeric cases: another size, a feature over a format of rows."""


def rare(item: Any) -> bool:
    """Whether CI leaves a case out: by the checksum of its name, so that a new one moves no other."""
    if not hasattr(item, "callspec"):
        return False
    case = item.callspec.params["case"]
    drawn = case.check == "published" or (case.check == "numeric" and DRAWN.fullmatch(case.label))
    return bool(drawn) and bool(zlib.crc32(item.name.encode()) % 3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rare cases out."""
    config.hook.pytest_deselected(items=[item for item in items if rare(item)])
    items[:] = [item for item in items if not rare(item)]
