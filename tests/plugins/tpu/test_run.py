"""`polyattn run` on a TPU that isn't here: its kernels interpreted, every result checked, and said so."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from forks import python

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")

RUN = ("-m", "polyattn", "run", "llama-3.1-8b")
FEW = ("--requests", "2", "--scale", "0.005", "--max-tokens", "2", "--cache-gb", "0.05")


@pytest.mark.slow
def test_a_model_is_served_on_an_interpreted_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = python(*RUN, "--device", "tpu-v6e", *FEW, "--json", seconds=500)
    assert found.returncode == 0, found.stderr[-3000:]
    report = json.loads(found.stdout)
    assert report["interpreted"] is True
    chosen = report["groups"][0]["chosen"]
    assert (chosen["prefill"], chosen["store"]) == ("PALLAS_ATTN", "JAX_STORE")
    assert report["checked_tokens"] > 0 and report["max_error"] < 0.015


def test_what_nobody_interprets_says_that_it_is_a_profile() -> None:
    found = python(*RUN, "--device", "gaudi3", *FEW)
    assert found.returncode != 0 and "profile to reason about" in found.stderr
