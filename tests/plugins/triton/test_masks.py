"""TRITON_ATTN's masks, interpreted: the ranges of keys, in the sweep by exhaustion, and the mask grid."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from families.mask_grid import BEYOND, GRID, judged
from interpreting import interpreted
from polyattn import Device

pytest.importorskip("triton")
STRIDE = 29
"""Prime to the lengths of the grid's axes, so that a sample has every value of each."""


def counts(table: str, first: int, step: int) -> tuple[int, ...]:
    """Run every so many-th case of a table; returns how many are right, and how many are refused."""
    numbers = interpreted(__file__, table, str(first), str(step), seconds=1400).split()
    return tuple(map(int, numbers))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_kernels_see_what_key_ranges_says(step: int) -> None:
    """Ranges and tiles on the device, and the tiles that plans count, block of queries by block."""
    assert int(interpreted(Path(__file__).with_name("seen.py"), str(step), seconds=1400)) > 150_000


@pytest.mark.parametrize(
    ("first", "step"),
    [
        pytest.param(0, STRIDE, marks=pytest.mark.slow),
        *(pytest.param(n, 4, marks=pytest.mark.sweep) for n in range(4)),
    ],
)
def test_every_mask_of_the_grid(first: int, step: int) -> None:
    assert counts("grid", first, step) == (len(range(first, len(GRID), step)), 0)


@pytest.mark.parametrize(
    ("first", "step"),
    [
        pytest.param(0, 89, marks=pytest.mark.slow),
        *(pytest.param(n, 8, marks=pytest.mark.sweep) for n in range(8)),
    ],
)
def test_every_mask_beyond(first: int, step: int) -> None:
    right, refused = counts("beyond", first, step)
    assert right + refused == len(range(first, len(BEYOND), step)) and right > refused


if __name__ == "__main__":
    torch.set_num_threads(1)
    table, *places = sys.argv[1:]
    first, step = map(int, places)
    cases = {"grid": GRID, "beyond": BEYOND}[table].items()
    host = Device("cpu", "x86_64", torch_device="cpu")
    found = judged("TRITON_ATTN", host, islice(cases, first, None, step))
    assert not found.wrong, found.wrong
    assert all("window_right" in name for name in found.refused), found.refused
    print(len(found.right), len(found.refused))
