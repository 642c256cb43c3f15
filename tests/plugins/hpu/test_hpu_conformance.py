"""Every claim of the Gaudi plugin's backends, by the conformance kit, interpreted on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("backend", "least"), [("HPU_ATTN", 200), ("HPU_MLA", 20)])
def test_conforms(backend: str, least: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
         "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-device", "cpu",
         "--polyattn-report", str(report)],
        cwd="/", env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=1400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    counts = json.loads(report.read_text())
    assert counts["failed"] == counts["skipped"] == 0 and counts["passed"] >= least
