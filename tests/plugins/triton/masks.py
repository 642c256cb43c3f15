"""Runs TRITON_ATTN over every so many-th case of the mask grid, or of what lies beyond, interpreted.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the counts.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch
from polyattn import Device

sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    from families.mask_grid import BEYOND, GRID, judged

    torch.set_num_threads(1)
    table, first, step = sys.argv[1:]
    cases = {"grid": GRID, "beyond": BEYOND}[table].items()
    found = judged(
        "TRITON_ATTN", Device("cpu", "x86_64", torch_device="cpu"),
        islice(cases, int(first), None, int(step)),
    )  # fmt: skip
    assert not found.wrong, found.wrong
    assert all("window_right" in name for name in found.refused), found.refused
    print(len(found.right), len(found.refused))
