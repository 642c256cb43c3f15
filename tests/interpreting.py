"""How does a test run Triton's kernels without a GPU? By Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and a kernel's source from a file.
"""

from __future__ import annotations

from pathlib import Path

from forks import python

INTERPRETED = {
    "TRITON_ATTN": {"TRITON_INTERPRET": "1"},
    "PALLAS_ATTN": {
        "PALLAS_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PALLAS_BUCKETS": "tokens=64,seqs=8,pages=64",
    },
}  # fmt: skip
"""The variables with which a backend's kernels are interpreted here."""


def interpreted(script: str | Path, *words: str, seconds: int = 300, **variables: str) -> str:
    """Run a script, which must succeed, with Triton interpreted; returns what it prints.

    It imports what lies in this folder.
    """
    environ = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent), **variables}
    found = python(script, *words, seconds=seconds, **environ)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout
