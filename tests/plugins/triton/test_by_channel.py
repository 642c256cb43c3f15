"""Do KDA's and RWKV-7's chunks give what their tokens give, whatever is forgotten on the way?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TOLERANCE = 2e-6
"""In float32: what the token at a time has, too."""


def test_chunks_are_the_tokens_one_by_one() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("by_channel.py")], env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    errors = json.loads(found.stdout)
    assert len(errors) == 8
    assert {what: pair for what, pair in errors.items() if max(pair) > TOLERANCE} == {}
