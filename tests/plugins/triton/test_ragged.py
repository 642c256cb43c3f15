"""TRITON_ATTN and TRITON_MLA over uneven steps, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sweep = pytest.mark.sweep
NAMES = (
    "plain", "groups of 7", "window, sink tokens", "window", "chunks", "soft cap, sinks", "ALiBi",
    "not causal", "int8", "captured", "latent",
)  # fmt: skip
QUICK = ("soft cap, sinks", "captured", "latent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else sweep) for n in NAMES]
)
def test_uneven_steps(name: str) -> None:
    """Decode, few tokens and prefill, with padding, empty rows and NaN elsewhere in the cache."""
    script = Path(__file__).with_name("ragged.py")
    found = subprocess.run(
        [sys.executable, script, name], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=1400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-1500:]
    if name == "captured":
        assert "listed" in found.stdout
    elif name == "soft cap, sinks":
        assert all(way in found.stdout for way in ("listed", "few", "pieces"))
