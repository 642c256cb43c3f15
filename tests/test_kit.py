"""The conformance kit itself: one command, honest about a backend that lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from polyattn.conformance.cases import derive
from polyattn.device import Device
from polyattn.registry.discovery import discover
from polyattn.spec.kinds import AttentionKind
from zoo.build import HEAD, write_wheel

CPU = Device.detect("cpu")


def kit(backend: str, *args: str, path: str = "") -> tuple[int, str]:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
         "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-device", "cpu", *args],
        cwd="/", env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    return found.returncode, found.stdout + found.stderr


def counts(path: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "EXAMPLE_ATTN"])
def test_a_backend_conforms(backend: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, text = kit(backend, "--polyattn-report", str(report))
    assert code == 0, text
    found = counts(report)
    assert found["failed"] == found["skipped"] == 0 and found["passed"] > 25
    assert found["cases"] == found["passed"] + found["refused"]
    if backend == "EXAMPLE_ATTN":
        assert found["refused"] > 10


def test_flex_conforms_on_its_plain_cases(tmp_path: Path) -> None:
    """All cases take eight minutes of compiling; these are one layer's batches, and all refusals."""
    report = tmp_path / "report.json"
    chosen = "decoder-prefill or decoder-mixed or refusal or isolation or feature_alibi"
    code, text = kit("FLEX_ATTENTION", "--polyattn-report", str(report), "-k", chosen)
    assert code == 0, text
    assert counts(report)["refused"] >= 15


LIAR = """
from polyattn_cpu.sdpa import TorchSDPA

class Liar(TorchSDPA):
    def __init__(self, spec, device):
        super().__init__(spec.replace({lie}), device)
"""


@pytest.mark.parametrize(
    ("claim", "lie"),
    [
        ("sliding_window", "sliding_window=None"),
        ("sliding_window", "sliding_window=spec.sliding_window and spec.sliding_window + 1"),
        ("alibi", "alibi=False"),
        ("logit_soft_cap", "logit_soft_cap=None"),
        ("causal", "causal=False"),
    ],
)
def test_a_backend_that_lies_fails(tmp_path: Path, claim: str, lie: str) -> None:
    source = (
        dedent(HEAD)
        + dedent(LIAR.format(lie=lie))
        + dedent(f"""
        @hookimpl
        def polyattn_backends():
            caps = Capabilities(platforms={{"cpu": ()}}, dtypes=frozenset({{"float32"}}),
                                features=frozenset({{"causal", "gqa", {claim!r}}}))
            return [BackendInfo(name="LIAR", summary="", path="zoo_liar:Liar", capabilities=caps)]
        """)
    )
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    wheel = write_wheel(tmp_path, "liar", source)
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    report = tmp_path / "report.json"
    code, text = kit("LIAR", "--polyattn-report", str(report), path=str(site))
    assert code == 1, text
    assert counts(report)["failed"] > 0


def test_an_unknown_backend_is_a_usage_error() -> None:
    code, text = kit("TORCH_SPDA")
    assert code == 4 and "did you mean 'TORCH_SDPA'" in text


ATTENTION = AttentionKind.ATTENTION


def test_cases_follow_from_the_claims() -> None:
    """Every claimed value has a numeric case, every unclaimed one a refusal."""
    for info in discover().backends.values():
        if "cpu" not in info.capabilities.platforms or ATTENTION not in info.capabilities.kinds:
            continue
        cases = derive(info, CPU)
        labels = {c.label for c in cases if c.check == "numeric"}
        refused = {c.label for c in cases if c.check == "refusal"}
        for feature in ("sliding_window", "alibi", "learned_sinks", "lse", "logit_soft_cap"):
            claimed = feature in info.capabilities.features
            assert (f"decoder feature {feature}" in labels) == claimed
            assert (feature in refused) == (not claimed)
        ids = [c.id for c in cases]
        assert len(ids) == len(set(ids))
