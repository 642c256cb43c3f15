"""Processes that compile while others are timed, and what Triton has kept of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def compiled_kernels() -> int:
    """Return how many kernels Triton has compiled and kept, in all processes."""
    root = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
    return sum(path.name != "polyattn" for path in root.iterdir()) if root.is_dir() else 0


def started(words: list[str]) -> subprocess.Popen[str]:
    """Start what compiles beside this, with as many compilers as there are cores."""
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "MAX_JOBS": str(os.cpu_count() or 16)},
    )  # fmt: skip


def finished(compiling: subprocess.Popen[str], until: float) -> None:
    """Wait for it until a time of the clock, and print the end of what it said."""
    try:
        said, _ = compiling.communicate(timeout=max(5.0, until - time.time()))
        print(said[-3000:], flush=True)
    except subprocess.TimeoutExpired:
        compiling.kill()
        print("no time left to compile", compiling.args, flush=True)
