"""How does a test run the conformance kit? As a user does: by pytest, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from forks import python

DRAWS = ("--polyattn-seed", "1", "--polyattn-budget", "0")
"""The same eight draws in each search, on any machine; a user's kit draws anew for five seconds."""


def kit(
    backend: str, *options: str, device: str = "cpu", **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, int]]:
    """Run a backend's kit; returns the process and the report's counts, none where there is no report."""
    folders = [variables.get("PYTHONPATH", "")]
    folders += [str(Path(__file__).parent)] if "sampled" in options else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ran = python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "polyattn.conformance",
            "--polyattn-backend", backend, "--polyattn-device", device, *DRAWS,
            "--polyattn-report", report, *options, cwd="/", seconds=7200, traces=True,
            **{**variables, "PYTHONPATH": os.pathsep.join(folders)},
        )  # fmt: skip
        counts: dict[str, int] = json.loads(report.read_text()) if report.is_file() else {}
    return ran, counts


OVER_FAKES = ("-k", "not published", "-x")
"""Published layers are values that other cases have one by one, and that searches join."""
PARTS = pytest.mark.parametrize(
    "part",
    [
        pytest.param(("-p", "sampled"), marks=pytest.mark.slow, id="sampled"),
        pytest.param((), marks=pytest.mark.sweep, id="whole"),
    ],
)
"""A kit in CI (`sampled.py`) and in the sweep."""


def conforms(
    backend: str, least: int, *options: str, device: str = "cpu", **variables: str
) -> dict[str, int]:
    """Assert that a kit passes and runs `least` cases beside refusals; returns the counts."""
    ran, counts = kit(backend, *options, device=device, **variables)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert counts["failed"] == counts["skipped"] == 0 and counts["passed"] >= least
    return counts
