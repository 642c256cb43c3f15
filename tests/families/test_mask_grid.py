"""Masks of every kind, small and beyond: a backend's results are the float64 reference's."""

from __future__ import annotations

import pytest
from defined_flex import without_compiler
from families.mask_grid import BEYOND, GRID, Case, judged
from polyattn import Device

HOST = Device("cpu", "x86_64", torch_device="cpu")


CASES = [pytest.param(GRID, id="grid"), pytest.param(BEYOND, id="beyond", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cases", CASES)
def test_every_mask(cases: dict[str, Case]) -> None:
    found = judged("TORCH_SDPA", HOST, cases.items())
    assert not found.wrong and not found.refused
    assert len(found.right) == len(cases)


@pytest.mark.parametrize("cases", CASES)
def test_every_mask_of_flex_attention(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that it doesn't take, and windows to the right, are refused by name."""
    without_compiler(monkeypatch)
    found = judged("FLEX_ATTENTION", HOST, cases.items(), needs_lse=False)
    assert not found.wrong
    assert all("gqa_ratio: " in why or "window_right: " in why for why in found.refused.values())
    assert len(found.right) + len(found.refused) == len(cases)
    assert len(found.right) > len(cases) // 2
