"""What do the commands' tests measure once? The machine's limits, for 1.3 s of a processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import LayerSpec
from polyattn.tools.cli import benching

_measured: dict[tuple[str, torch.device], dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def limits_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tests of `bench` take what a first one measured; they depend on a spec's dtype alone."""
    measure = benching.measure_limits

    def once(spec: LayerSpec, device: torch.device) -> dict[str, Any]:
        key = spec.dtype, device
        if key not in _measured:
            _measured[key] = measure(spec, device)
        return _measured[key]

    monkeypatch.setattr(benching, "measure_limits", once)
