"""A kit's plugin for pytest, `-p sampled`: of cases that join what others have one by one, a third."""

from __future__ import annotations

import zlib
from typing import Any

import pytest


def rare(item: Any) -> bool:
    """Whether CI leaves a case out: by the checksum of its name, so that a new one moves no other.

    It may have a published layer, two features, or a feature over a format of rows.
    """
    if not hasattr(item, "callspec"):
        return False
    case = item.callspec.params["case"]
    over_rows = case.label.startswith("rows ") and case.label.count(" ") > 1
    joins = case.check == "published" or " pair " in case.label or over_rows
    return joins and bool(zlib.crc32(item.name.encode()) % 3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rare cases out."""
    config.hook.pytest_deselected(items=[item for item in items if rare(item)])
    items[:] = [item for item in items if not rare(item)]
