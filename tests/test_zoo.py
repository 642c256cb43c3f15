"""A zoo of broken plugins: every healthy one works beside them, and each one's fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from zoo.build import ANIMALS, build


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("zoo"))


def command(zoo: Path, *args: str, code: int = 0, **env: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "polyattn.tools.cli", *args],
        env={**os.environ, "PYTHONPATH": str(zoo), "POLYATTN_PROBE_TIMEOUT": "0.5", **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == code, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    return found.stdout + found.stderr


@pytest.fixture(scope="module")
def reports(zoo: Path) -> dict[str, str]:
    return {"list": command(zoo, "list"), "doctor": command(zoo, "doctor", code=1)}


@pytest.mark.parametrize("animal", [name for name in ANIMALS if name != "healthy"])
@pytest.mark.parametrize("report", ["list", "doctor"])
def test_each_fault_is_named_with_its_distribution(
    reports: dict[str, str], report: str, animal: str
) -> None:
    text = " ".join(reports[report].split())
    assert f"zoo-{animal}" in text and ANIMALS[animal][1] in text


@pytest.mark.parametrize("report", ["list", "doctor"])
def test_corrupt_metadata_is_named(reports: dict[str, str], report: str) -> None:
    assert "metadata is corrupt" in reports[report] and "zoo_corrupt" in reports[report]


def test_doctor_ties_problems_to_distributions(zoo: Path) -> None:
    data: dict[str, Any] = json.loads(command(zoo, "doctor", "--json", code=1))
    problems = "\n".join(data["problems"])
    for animal in ("import-error", "hanging-probe", "missing-class", "duplicate-a", "platform-b"):
        assert f"zoo-{animal} 1.2" in problems


def test_every_healthy_plugin_works_in_the_zoo(zoo: Path) -> None:
    run = ("run", "--requests", "2", "--scale", "0.02", "--max-tokens", "2", "--json")
    data = json.loads(command(zoo, *run))
    assert data["groups"][0]["decode"] == "TORCH_SDPA" and data["checked_tokens"] > 0
    spec = '{"num_heads": 4, "head_size": 64, "dtype": "float32"}'
    text = command(zoo, "explain", "--spec", spec, "--device", "cpu", "--backend", "HEALTHY")
    assert "=> prefill HEALTHY, decode HEALTHY" in text


def test_naming_a_broken_backend_says_why(zoo: Path) -> None:
    text = command(zoo, "explain", "--device", "cpu", "--backend", "TWICE", code=2)
    assert "zoo-duplicate-a 1.2" in text and "zoo-duplicate-b 1.2" in text
    spec = '{"num_heads": 4, "head_size": 64, "dtype": "float32"}'
    args = ("explain", "--spec", spec, "--device", "cpu", "--backend")
    assert "pip install zoo" in command(zoo, *args, "NEEDY", code=1)
    assert "has no 'Ghost'" in command(zoo, *args, "GHOST", code=1)
    assert "did not answer" in command(zoo, *args, "SLEEPY", code=1)


def test_a_disabled_animal_is_not_imported(zoo: Path) -> None:
    text = command(zoo, "list", POLYATTN_DISABLE_PLUGINS="system-exit,import-error")
    assert "SystemExit" not in text and "disabled" in text
