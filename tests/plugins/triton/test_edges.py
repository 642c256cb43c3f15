"""Triton's backends where no claim's case goes, interpreted, with each access in its tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_edges() -> None:
    """Blocks that no tile divides, 8-bit values without a softmax, chosen pages, keys of other rows."""
    assert int(interpreted(Path(__file__).with_name("edges.py"), seconds=1200)) == 34
