"""What does the CPU plugin's distribution hold, and what does its build say?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from polyattn.device import Device
from polyattn.plugin import Proof
from polyattn.registry.info import Record
from polyattn_cpu.hooks import NATIVE_ATTN
from polyattn_cpu.native import build, library

ROOT = Path(__file__).parents[3]
NO_VECTORS = """#!/bin/sh
case "$*" in *-mavx*|*-march=*) echo "In a file: so
cc1plus: error: no such option" >&2; exit 1;; esac
exec "{compiler}" "$@"
"""


def test_a_source_distribution_holds_sources_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=ROOT / "plugins" / "cpu", check=True, capture_output=True,
    )  # fmt: skip
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"build.py", "kernels.cpp", "hatch_build.py"} <= names
    assert not {"kernels.lib", "build.txt"} & names


def test_without_a_compiler_the_build_says_so(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build; from pathlib import Path; "
        "p = Path(sys.argv[2]); ok = build.build_or_say(p / 'lib', p / 'why'); "
        "print(ok, (p / 'why').read_text())"
    )
    folder = ROOT / "plugins" / "cpu" / "src" / "polyattn_cpu" / "native"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "CXX": "no-such-compiler"}, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("False CXX='no-such-compiler' is not an executable")


def test_two_builds_of_one_library_take_turns(tmp_path, monkeypatch):
    made, report, running, most = tmp_path / "kernels.lib", tmp_path / "build.txt", [], []

    def build_slowly(path):
        running.append(path)
        most.append(len(running))
        time.sleep(0.2)
        path.touch()
        running.remove(path)
        return ("generic",)

    monkeypatch.setattr(build, "build", build_slowly)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: build.build_or_say(made, report), range(3))) == [True] * 3
    assert most == [1]  # the others found what the first one made


@pytest.fixture
def no_vectors(tmp_path, monkeypatch):
    """A compiler that knows no instruction set but the last."""
    script = tmp_path / "c++"
    script.write_text(NO_VECTORS.format(compiler=shutil.which("c++")))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CXXFLAGS", "-O0")


def test_what_the_compiler_fails_at_is_said(tmp_path, no_vectors, capfd):
    isas = list(build.ISAS[build.machine()])
    made = tmp_path / "kernels.lib"
    assert build.build(made) == (isas[-1],)
    assert f"without {isas[0]}: cc1plus: error: no such option; without" in capfd.readouterr().err
    code = (
        "import sys; from pathlib import Path; from polyattn_cpu.native import library; "
        "library.LIBRARY = Path(sys.argv[1]); print(library.isas(), library.runs())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(made)], capture_output=True, text=True, check=True
    )
    had = set(library.isas()) - {isas[-1]}
    left_out = f" (built without {', '.join(isa for isa in isas if isa in had)})" if had else ""
    assert done.stdout.strip() == f"{(isas[-1],)} {isas[-1]}{left_out}"


def test_every_set_that_the_compiler_knows_is_built():
    """An error in our own sources leaves a set out as an old compiler does: the report tells."""
    assert build.REPORT.exists(), "run python -m polyattn_cpu.native.build"
    built = build.REPORT.read_text().split(";")[0].removeprefix("built: ").split(", ")
    for isa, flags in build.ISAS[build.machine()].items():
        command = [*build.compiler(), *flags, "-E", "-x", "c++", os.devnull]
        known = subprocess.run(command, capture_output=True, check=False).returncode == 0
        assert (isa in built) == known, isa


def test_proof_is_of_the_set_that_runs_whatever_the_build_lacks(monkeypatch):
    def record(runs: str, of: int) -> Record:
        return Record("x86_64", "", runs, of == 839, 839, of, "", "2026-11-26", "a.json")

    records = (record("amx", 900), record("avx512", 839))
    monkeypatch.setattr("polyattn.registry.info._all", lambda: {"NATIVE_ATTN": records})
    info = replace(NATIVE_ATTN, proof_of_runs={"avx2": Proof.COMPILED})
    device = Device("cpu", "x86_64")
    assert info.proof_on(device, "avx2 (built without amx)") is Proof.COMPILED
    assert info.proof_on(device, "amx (built without avx2)") is Proof.IN_PART
    assert info.proof_on(device, "avx512 (built without amx)") is Proof.MEASURED
    assert info.proof_on(device, "avx10 (built without amx)") is Proof.DECLARED  # has no record


def test_a_wheel_for_others_lacks_no_instruction_set(tmp_path, no_vectors, monkeypatch):
    monkeypatch.setenv(build.EVERY_VARIABLE, "1")
    monkeypatch.setenv("CXXFLAGS", "-E")  # nothing is linked: its sources needn't be compiled
    made, report = tmp_path / "kernels.lib", tmp_path / "build.txt"
    assert not build.build_or_say(made, report)
    best = next(iter(build.ISAS[build.machine()]))
    said = f"EVERY_ISA=1, but without {best}: cc1plus: error: no such option; without"
    assert report.read_text().startswith(said)
    assert not made.exists()


def test_wheels_for_linux_are_whole_and_checked_outside_the_checkout():
    settings = tomllib.loads((ROOT / "plugins" / "cpu" / "pyproject.toml").read_text())
    linux = settings["tool"]["cibuildwheel"]["linux"]
    assert linux["environment"] == {build.EVERY_VARIABLE: "1"}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    (kit,) = (step for step in steps if "polyattn.conformance" in step.get("run", ""))
    # The checkout's settings of pytest name plugins that the kit doesn't need.
    assert kit["working-directory"] == "${{ runner.temp }}"
