"""Run part of the masks' grid on PALLAS_ATTN, interpreted: `masks.py grid|beyond STEP`.

STEP n runs every n-th case. The process ends with 1, and a line for each wrong case.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from families.mask_grid import BEYOND, GRID, judged
from polyattn import Device

host = Device("cpu", "x86_64", torch_device="cpu")
which, step = sys.argv[1], int(sys.argv[2])
cases = list({"grid": GRID, "beyond": BEYOND}[which].items())[::step]
found = judged("PALLAS_ATTN", host, cases)
print(len(found.right), "right of", len(cases))
sys.exit("\n".join(f"{name}: {why}" for name, why in (found.wrong | found.refused).items()) or 0)
