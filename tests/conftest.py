from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from polyattn import settings


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the developer's shell decides a test."""
    import os

    for name in list(os.environ):
        if name.startswith("POLYATTN_") or name in settings.FOREIGN_VARIABLES:
            monkeypatch.delenv(name)
    # Nor does a timing table that was measured here.
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(tempfile.gettempdir()) / "polyattn-tests-cache"))
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long ones, whole kits in a process, so that no worker ends with them alone."""
    items.sort(key=lambda item: "conforms" not in item.name)
