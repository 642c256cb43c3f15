"""Do the native kernels agree with double precision on Arm? Cross-built, run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from polyattn_cpu.native import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
SYSROOT = Path("/usr/aarch64-linux-gnu")


@pytest.mark.slow
@pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)} (apt: g++-aarch64-linux-gnu, qemu-user)"
)
def test_arm_agrees_with_double_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", COMPILER)
    monkeypatch.setenv("TARGET_MACHINE", "aarch64")
    library, program = tmp_path / "kernels.lib", tmp_path / "check"
    assert build.build(library) == ("sve256", "neon")
    source = Path(__file__).with_name("native_check.cpp")
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", f"-I{build.SOURCES}", str(source), str(library),
         f"-Wl,-rpath,{tmp_path}", "-o", str(program)], check=True,
    )  # fmt: skip

    def check(vector_bytes: int, every: int) -> str:
        """Run every Nth case on a processor of so wide SVE vectors; returns what was printed."""
        done = subprocess.run(
            [EMULATOR, "-cpu", f"max,sve-default-vector-length={vector_bytes}", "-L", str(SYSROOT),
             str(program), str(every)], capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Made for vectors of 32 bytes, the SVE kernels are no other processor's.
    narrow = check(16, 1)
    assert "instruction sets here: neon\n" in narrow and "neon: 96 cases, 0 wrong" in narrow
    wide = check(32, 8)
    assert "instruction sets here: sve256,neon\n" in wide and "sve256: 12 cases, 0 wrong" in wide
