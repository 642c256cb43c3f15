"""TRITON_ATTN over shared prefixes in its own launch, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sweep = pytest.mark.sweep
NAMES = (
    "plain", "groups of 7", "one head a group", "soft cap, sinks", "values of 48", "int8",
    "int8, scales of heads, sinks", "captured",
)  # fmt: skip
QUICK = ("soft cap, sinks", "int8, scales of heads, sinks", "captured")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else sweep) for n in NAMES]
)
def test_forests(name: str) -> None:
    """One run, several levels, rows apart, padding; NaN elsewhere in the cache; the same bits twice."""
    script = Path(__file__).with_name("forests.py")
    found = subprocess.run(
        [sys.executable, script, name], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-1500:]
    heights = {line.rpartition(" ")[2] for line in found.stdout.splitlines()}
    assert len(heights) > 1 or name == "captured", "tiles fit their groups"
