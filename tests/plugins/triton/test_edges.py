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


def test_heads_far_apart(tmp_path: Path) -> None:
    """A product of a head and its stride that int32 doesn't hold, of what is read and stored."""
    assert int(interpreted(Path(__file__).with_name("far_heads.py"), str(tmp_path))) == 3
