"""Masks of every kind, small and beyond: a backend's results are the float64 reference's."""

from __future__ import annotations

import pytest
from families.mask_grid import BEYOND, GRID, Case, judged
from polyattn import Device

HOST = Device("cpu", "x86_64", torch_device="cpu")


@pytest.mark.parametrize("cases", [GRID, BEYOND], ids=["grid", "beyond"])
@pytest.mark.parametrize("backend", ["TORCH_SDPA"])
def test_every_mask(backend: str, cases: dict[str, Case]) -> None:
    found = judged(backend, HOST, cases.items())
    assert not found.wrong and not found.refused
    assert len(found.right) == len(cases)
