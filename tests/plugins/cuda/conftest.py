from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from polyattn.runtime import workspaces


@pytest.fixture
def fakes(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' fakes, whose empty rows are zeros, and a chip of 132 multiprocessors."""
    import polyattn_fakes

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(polyattn_fakes, "EMPTY_ROW", 0.0)
    monkeypatch.setattr(workspaces, "torch", polyattn_fakes.UNFILLED)
