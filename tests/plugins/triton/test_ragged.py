"""TRITON_ATTN over uneven steps, in Triton's interpreter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")
sweep = pytest.mark.sweep
NAMES = (
    "plain", "groups of 7", "window, sink tokens", "window", "chunks", "soft cap, sinks", "ALiBi",
    "not causal", "int8", "captured", "wide groups", "turned, int8", "turned, kept tokens",
    "turned, warm",
)  # fmt: skip
slow = pytest.mark.slow
SLOW = ("soft cap, sinks", "captured", "wide groups", "turned, int8", "turned, kept tokens")
MARKS = dict.fromkeys(SLOW, slow)


@cache
def told_of(names: tuple[str, ...]) -> list[str]:
    """Return a line for each step. A process imports for longer than a layer's steps take."""
    script = Path(__file__).with_name("ragged.py")
    return interpreted(script, ";".join(names), seconds=1400).splitlines()


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, sweep)) for n in NAMES])
def test_uneven_steps(name: str) -> None:
    """Decode, few tokens and prefill, with padding, empty rows and NaN elsewhere in the cache."""
    lines = told_of(SLOW if name in SLOW else (name,))
    told = "\n".join(line for line in lines if line.rpartition(", ")[0] == name)
    assert told
    if name == "captured":
        assert "listed" in told
    elif name == "wide groups":  # of more rows than a tile has: several tiles a decode
        assert "one long decode: few" in told and "listed" not in told
    elif name.startswith("turned"):
        assert all(f": {way}" in told for way in ("listed", "many", "few", "prefill"))
    elif name == "soft cap, sinks":
        assert all(way in told for way in ("listed", "split", "many", "few", "pieces"))
        assert "drafts: few" in told
