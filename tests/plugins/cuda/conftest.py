from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from adapters import LIBRARIES, use_fakes
from polyattn.runtime import workspaces


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries' fakes, whose empty rows are zeros, and a chip of 132 multiprocessors."""
    use_fakes(monkeypatch, 0.0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    import polyattn_fakes

    monkeypatch.setattr(workspaces, "torch", polyattn_fakes.UNFILLED)
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in LIBRARIES]:
        del sys.modules[name]
