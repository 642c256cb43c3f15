"""TRITON_ATTN over shared prefixes in its own launch, in Triton's interpreter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")
slow, sweep = pytest.mark.slow, pytest.mark.sweep
NAMES = (
    "plain", "groups of 7", "one head a group", "soft cap, sinks", "values of 48", "int8",
    "int8, scales of heads, sinks", "several tokens", "several tokens, int8", "a window",
    "several tokens, a window", "ALiBi", "several tokens, a window, ALiBi", "captured",
)  # fmt: skip
SLOW = (
    "soft cap, sinks", "int8, scales of heads, sinks", "several tokens, a window, ALiBi", "captured",
)  # fmt: skip


@cache
def told_of(names: tuple[str, ...]) -> list[str]:
    """Return a line for each forest. A process imports for longer than a layer's forests take."""
    script = Path(__file__).with_name("forests.py")
    return interpreted(script, ";".join(names), seconds=600).splitlines()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow if n in SLOW else sweep) for n in NAMES]
)
def test_forests(name: str) -> None:
    """One run, several levels, rows apart, padding; NaN elsewhere in the cache; the same bits twice."""
    lines = told_of(SLOW if name in SLOW else (name,))
    heights = {line.rpartition(" ")[2] for line in lines if line.rpartition(", ")[0] == name}
    assert len(heights) > (name != "captured"), "tiles fit their groups"
