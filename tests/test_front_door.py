"""The README's commands work word for word, and its picture shows today's plugins."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INSTALLS = re.findall(r"^\| [^|]+ \| `(pip install [^`]+)` \|$", README, re.MULTILINE)
WHEELS = re.findall(r"^(pip wheel .+)$", README, re.MULTILINE)
LONGEST_AVERAGE = 22
"""Words that a sentence of the README has on average, at most."""


def test_every_vendor_has_a_command_from_a_checkout_and_from_wheels() -> None:
    assert len(INSTALLS) == 13 and len(WHEELS) == 1
    extras = set(re.findall(r'"polyattn\[(\w+)\]"', README))
    assert extras == {"cpu", "cuda", "rocm", "tpu", "hpu", "metal", "all"}
    assert len(README.splitlines()) <= 120


@pytest.mark.slow
def test_the_install_commands_resolve_in_a_fresh_environment(tmp_path: Path) -> None:
    """Word for word, with --dry-run: what each would install is found, and fits together."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}

    def run(command: str) -> str:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, env=environ,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stderr}"
        return ran.stdout

    folder = tmp_path / "dist"
    run(WHEELS[0].replace("--wheel-dir dist", f"--wheel-dir {folder}"))
    for command in INSTALLS:
        text = run(command.replace("--find-links dist", f"--find-links {folder}") + " --dry-run")
        planned = text.rpartition("Would install")[2]
        assert "polyattn-0" in planned and "polyattn-cpu-0" in planned, command
        for plugin in re.findall(r"plugins/(\w+)", command):
            assert f"polyattn-{plugin}-0" in planned, command


def test_the_pictures_show_what_the_code_says() -> None:
    folder = ROOT / "docs" / "pictures"
    for name, draw in runpy.run_path(str(folder / "draw.py"))["PICTURES"].items():
        assert (folder / name).read_text() == draw(), "stale: python docs/pictures/draw.py"


def test_the_readmes_sentences_are_short() -> None:
    prose = re.sub(r"```.*?```|^[|#!].*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    sentences = [s.split() for s in re.split(r"(?<=[.:;])\s+", prose) if s.strip()]
    assert sum(map(len, sentences)) / len(sentences) < LONGEST_AVERAGE
