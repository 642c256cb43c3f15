from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from adapters import LIBRARIES, use_fakes


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries' fakes; what a row without keys gets is nobody's promise here."""
    use_fakes(monkeypatch, torch.nan)
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in LIBRARIES]:
        del sys.modules[name]
