"""Random functions, drawn by hypothesis: every CPU backend that takes variants is the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_functions import check


def test_torch_s() -> None:
    check("TORCH_SDPA", 150)


def run_apart(backend: str, count: int, **variables: str) -> None:
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("random_functions.py"), backend, str(count)],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_generated_ones_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    run_apart("TRITON_ATTN", 8, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_more_of_them_and_torch_s_compiled() -> None:
    pytest.importorskip("triton")
    run_apart("TRITON_ATTN", 60, TRITON_INTERPRET="1")
    run_apart("FLEX_ATTENTION", 8)
