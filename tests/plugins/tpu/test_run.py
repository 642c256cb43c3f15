"""`polyattn run` on a TPU that isn't here: its kernels interpreted, every result checked, and said so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")

FEW = ("--requests", "2", "--scale", "0.005", "--max-tokens", "2", "--cache-gb", "0.05")


@pytest.mark.slow
def test_a_model_is_served_on_an_interpreted_tpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    found = subprocess.run(
        [sys.executable, "-m", "polyattn", "run", "llama-3.1-8b", "--device", "tpu-v6e", *FEW,
         "--json"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    report = json.loads(found.stdout)
    assert report["interpreted"] is True
    chosen = report["groups"][0]["chosen"]
    assert (chosen["prefill"], chosen["store"]) == ("PALLAS_ATTN", "JAX_STORE")
    assert report["checked_tokens"] > 0 and report["max_error"] < 0.015


def test_what_nobody_interprets_says_that_it_is_a_profile() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "polyattn", "run", "llama-3.1-8b", "--device", "gaudi3", *FEW],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode != 0 and "profile to reason about" in found.stderr
