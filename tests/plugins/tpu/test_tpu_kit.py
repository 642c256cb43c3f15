"""Claims of the TPU plugin's backends, by the conformance kit, interpreted on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
sweep = pytest.mark.sweep  # none of the four has passed whole yet


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "chosen", "least"),
    [
        pytest.param("XLA_SCAN", "", 60, marks=sweep),
        pytest.param("XLA_MLA_SPARSE", "", 10, marks=sweep),
        pytest.param("PALLAS_MLA", "", 10, marks=sweep),
        pytest.param("PALLAS_ATTN", "", 100, marks=sweep),
    ],
)
def test_conforms_in_the_interpreter(backend: str, chosen: str, least: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
         "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-device", "cpu",
         "--polyattn-budget", "0.1", "--polyattn-report", str(report), "-k", chosen],
        cwd="/",
        env=os.environ | {"PALLAS_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
                          "PALLAS_BUCKETS": "tokens=1024,seqs=64,pages=1024"},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    counts = json.loads(report.read_text())
    assert counts["passed"] >= least and counts["failed"] == counts["skipped"] == 0
