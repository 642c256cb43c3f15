"""How does a test run Triton's kernels without a GPU? By Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and a kernel's source from a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def interpreted(script: str | Path, *words: str, seconds: int = 300, **variables: str) -> str:
    """Run a script, which must succeed, with Triton interpreted; returns what it prints."""
    found = subprocess.run(
        [sys.executable, script, *words], env={**os.environ, "TRITON_INTERPRET": "1", **variables},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout
