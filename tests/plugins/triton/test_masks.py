"""TRITON_ATTN's masks, interpreted: the ranges of keys, in the sweep by exhaustion, and the mask grid."""

from __future__ import annotations

from pathlib import Path

import pytest
from families.mask_grid import BEYOND, GRID
from interpreting import interpreted

pytest.importorskip("triton")
HERE = Path(__file__).parent
STRIDE = 29
"""Prime to the lengths of the grid's axes, so that a sample has every value of each."""


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_kernels_see_what_key_ranges_says(step: int) -> None:
    """Ranges and tiles on the device, and the tiles that plans count, block of queries by block."""
    assert int(interpreted(HERE / "seen.py", str(step), seconds=1400)) > 150_000


@pytest.mark.parametrize(
    ("first", "step"),
    [
        pytest.param(0, STRIDE, marks=pytest.mark.slow),
        *(pytest.param(n, 4, marks=pytest.mark.sweep) for n in range(4)),
    ],
)
def test_every_mask_of_the_grid(first: int, step: int) -> None:
    found = interpreted(HERE / "masks.py", "grid", str(first), str(step), seconds=1400).split()
    assert found == [str(len(range(first, len(GRID), step))), "0"]


@pytest.mark.parametrize(
    ("first", "step"),
    [
        pytest.param(0, 89, marks=pytest.mark.slow),
        *(pytest.param(n, 8, marks=pytest.mark.sweep) for n in range(8)),
    ],
)
def test_every_mask_beyond(first: int, step: int) -> None:
    right, refused = map(
        int, interpreted(HERE / "masks.py", "beyond", str(first), str(step), seconds=1400).split()
    )
    assert right + refused == len(range(first, len(BEYOND), step)) and right > refused
