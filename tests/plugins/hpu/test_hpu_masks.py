"""Every mask of the shared grid on HPU_ATTN, and in larger sizes, groups of 71 heads and caches."""

from __future__ import annotations

from typing import Any

import pytest
from families.mask_grid import BEYOND, GRID, judged
from polyattn import Device

HOST = Device("cpu", "x86_64", torch_device="cpu")


SAMPLE = dict(list(BEYOND.items())[::3])
"""Three is prime to the number of steps, so that each mask and each step is in it."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(GRID, id="grid"),
        pytest.param(SAMPLE, id="sample", marks=pytest.mark.slow),
        pytest.param(BEYOND, id="beyond", marks=pytest.mark.sweep),
    ],
)
def test_every_mask(cases: dict[str, Any]) -> None:
    found = judged("HPU_ATTN", HOST, cases.items())
    assert not found.wrong and not found.refused
    assert len(found.right) == len(cases)
