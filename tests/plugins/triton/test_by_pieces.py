"""Do tiles of RG-LRU and of normalised linear attention give the formulas, whole and in pieces?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")
TOLERANCE = {"float32": 2e-6, "float16": 5e-4}
"""Of outputs; half a place of float16 is 2.4e-4 of the largest element. States are float32."""


@pytest.mark.slow
def test_tiles_are_the_formulas() -> None:
    errors = json.loads(interpreted(Path(__file__).with_name("by_pieces.py")))
    assert len(errors) == 6
    for what, (out, state, pieces) in errors.items():
        assert out < TOLERANCE["float16" if "relu" in what else "float32"], what
        assert state < TOLERANCE["float32"], what
        assert (pieces >= 4) is ("pieces" in what), what
