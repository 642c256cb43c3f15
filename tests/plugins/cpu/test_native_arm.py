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
CHECK = Path(__file__).with_name("native_check")
PROCESSORS = {  # an emulated processor: its instruction sets
    "max,sve-default-vector-length=16": ("neon_bf16", "neon"),
    "max,sve-default-vector-length=32": ("sve256_bf16", "sve256", "neon_bf16", "neon"),
    "cortex-a57": ("neon",),
}
CASES = {"attention": 120, "store": 324, "scan": 57}

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)} (apt: g++-aarch64-linux-gnu, qemu-user)"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check, cross-built with the library that it loads."""
    folder = tmp_path_factory.mktemp("arm")
    library, made = folder / "kernels.lib", folder / "check"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        patch.setenv("TARGET_MACHINE", "aarch64")
        assert build.build(library) == ("sve256_bf16", "sve256", "neon_bf16", "neon")
    subprocess.run(
        [COMPILER, "-std=c++17", "-O2", f"-I{build.SOURCES}", str(CHECK / "main.cpp"), str(library),
         "-o", str(made)], check=True,
    )  # fmt: skip
    return made


def emulated(program: Path, processor: str, *arguments: str) -> str:
    """Run the check on a processor; returns what it printed."""
    done = subprocess.run(
        [EMULATOR, "-cpu", processor, "-L", str(SYSROOT), str(program), *arguments],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def agrees(program: Path, processor: str, isa: str, every: int) -> None:
    """Attention, MLA, storing and recurrences, every Nth case of each, are right by `isa`."""
    text = emulated(program, processor, isa, str(every))
    for part, cases in CASES.items():
        assert f"{isa}, {part}: {-(-cases // every)} cases, 0 wrong\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_arm_processor_gets_its_instruction_sets(program: Path, processor: str) -> None:
    """SVE kernels are made for vectors of 32 bytes, and bfloat16 products run where they exist."""
    assert emulated(program, processor).strip() == ",".join(PROCESSORS[processor])


@pytest.mark.slow
@pytest.mark.parametrize("isa", build.ISAS["aarch64"])
def test_arm_agrees_with_double_precision(program: Path, isa: str) -> None:
    agrees(program, "max,sve-default-vector-length=32", isa, 23 if "sve" in isa else 11)


@pytest.mark.sweep
@pytest.mark.parametrize("isa", build.ISAS["aarch64"])
def test_arm_agrees_in_every_case(program: Path, isa: str) -> None:
    agrees(program, "max,sve-default-vector-length=32", isa, 1)
