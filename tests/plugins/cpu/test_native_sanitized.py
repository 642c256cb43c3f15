"""Do the kernels' tests and the kit pass under AddressSanitizer and UndefinedBehaviorSanitizer?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from polyattn_cpu.native import library

ROOT = Path(__file__).parents[3]
PARTS = ("tests", "NATIVE_ATTN", "NATIVE_MLA", "NATIVE_STORE", "NATIVE_SCAN")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sanitized library stays, once built."""
    return tmp_path_factory.mktemp("sanitized")


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.skipif(library.why_not() is not None, reason=f"native kernels: {library.why_not()}")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_or_written_out_of_bounds(folder: Path, part: str) -> None:
    done = subprocess.run(
        [str(ROOT / "plugins" / "cpu" / "sanitize.sh")], capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "FOLDER": str(folder), "PARTS": part},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
