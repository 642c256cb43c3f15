"""Builds the native library: one object per instruction set, in one shared library.

Imports the standard library only: the build hook runs this file where nothing is installed.
`python -m polyattn_cpu.native.build` builds again in place. `CXX` names the compiler, `CXXFLAGS` adds
flags (sanitizers: `-fsanitize=address,undefined`), `TARGET_MACHINE` is for a compiler that crosses,
`EVERY_ISA=1` is for wheels that others will run: no instruction set may be left out.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "csrc"
LIBRARY = FOLDER / "kernels.lib"
REPORT = FOLDER / "build.txt"

COMPILERS = ("c++", "g++", "clang++")
NEEDED = "GCC 12 or Clang 14"
EVERY_VARIABLE = "EVERY_ISA"
COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    "-Wno-unknown-warning-option",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
_SVE, _SVE_BITS = "-march=armv8.2-a+sve", "-msve-vector-bits=256"
BASES = {"amx": "avx512", "avx512_bf16": "avx512", "sve256_bf16": "sve256", "neon_bf16": "neon"}
"""An instruction set that only multiplies bfloat16: its base has the other kernels."""
ISAS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "avx512_bf16": _BF16,
        "avx512": _AVX512,
        "avx2": _AVX2,
        "generic": (),
    },
    "aarch64": {
        "sve256_bf16": (f"{_SVE}+bf16", _SVE_BITS),
        "sve256": (_SVE, _SVE_BITS),
        "neon_bf16": ("-march=armv8.2-a+bf16",),
        "neon": (),
    },
}
"""Per machine, the best first: the instruction sets and the flags that bring them."""


class BuildError(Exception):
    """The reason why there is no library, for the user."""


def compiler() -> list[str]:
    """Return the C++ compiler's command. Raises `BuildError`."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if not shutil.which(command[0]):
            raise BuildError(f"CXX={named!r} is not an executable; install it or unset CXX")
        return command
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise BuildError(
            f"no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH; install one "
            "(Debian: apt install g++)"
        )
    return [compiler]


def machine() -> str:
    """Return the architecture to build for: this machine's, or `TARGET_MACHINE` where CXX crosses."""
    name = os.environ.get("TARGET_MACHINE") or platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


def fingerprint() -> str:
    """Return a hash of the sources, the command and the compiler's version. Raises `BuildError`."""
    command = compiler()
    # By its version, too: a container that shares this folder may have another compiler of this name.
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    said = (
        command,
        version,
        os.environ.get("CXXFLAGS", ""),
        machine(),
        os.environ.get(EVERY_VARIABLE),
    )
    digest = hashlib.sha256(repr(said).encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(library: Path = LIBRARY, folder: Path | None = None) -> tuple[str, ...]:
    """Build `library`; returns the instruction sets in it. Raises `BuildError`.

    An instruction set that the compiler doesn't know is left out, the last of the list never, and
    none with `EVERY_ISA=1`.
    """
    command = [*compiler(), *COMMON, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    wanted = ISAS.get(machine(), {"generic": ()})
    with tempfile.TemporaryDirectory() as temporary:
        out = folder or Path(temporary)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            results = pool.map(lambda isa: _object(command, isa, wanted[isa], out), wanted)
            failures = {isa: text for isa, text in zip(wanted, results, strict=True) if text}
        for isa in wanted:
            if isa not in failures and BASES.get(isa) in failures:
                failures[isa] = f"it needs {BASES[isa]}"
        base = list(wanted)[-1]
        if base in failures:
            raise BuildError(f"the compiler failed: {failures[base]} ({NEEDED} is needed)")
        without = "; ".join(f"without {isa}: {text}" for isa, text in failures.items())
        if without and os.environ.get(EVERY_VARIABLE) == "1":
            raise BuildError(f"{EVERY_VARIABLE}=1, but {without}")
        built = tuple(isa for isa in wanted if isa not in failures)
        lists = [
            f"-DPA_{name}(X)={' '.join(f'X({isa})' for isa in isas)}"
            for name, isas in (("BUILT", built), ("LEFT_OUT", failures))
        ]
        for name in ("api", "choose", "pool"):
            _run([*command, *lists, "-c", f"{SOURCES / name}.cpp"], out / f"{name}.o")
        objects = [str(out / f"{name}.o") for name in (*built, "api", "choose", "pool")]
        made = out / "library"
        _run([*command, "-shared", *objects, "-lpthread", "-lm", "-ldl"], made)
        library.unlink(missing_ok=True)  # never overwrite: a process may have it mapped
        shutil.copyfile(made, library)
    if without:
        print(f"polyattn-cpu: {without}", file=sys.stderr)
    return built


def build_or_say(library: Path = LIBRARY, report: Path = REPORT, again: bool = False) -> bool:
    """Build, and write the result, or the reason for none, into `report`.

    What was built of the same sources by the same command stays, unless `again`. While another process
    builds, this one waits.
    """
    with _alone(library.parent):
        try:
            stamp = fingerprint()
            if not again and library.is_file() and report.is_file() and stamp in report.read_text():
                return True
            built = build(library)
        except BuildError as error:
            library.unlink(missing_ok=True)
            report.write_text(f"{error}\n")
            print(f"polyattn-cpu: no native kernels: {error}", file=sys.stderr)
            return False
        report.write_text(f"built: {', '.join(built)}; sources and command: {stamp}\n")
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, on systems with such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _object(command: list[str], isa: str, flags: tuple[str, ...], out: Path) -> str:
    """Compile the kernels for one instruction set. Returns the compiler's message if it fails."""
    names = [f'-DPA_ISA="{isa}"', f"-DPA_TABLE=pa_kernels_{isa}"]
    if isa in BASES:
        names.append(f"-DPA_BASE=pa_kernels_{BASES[isa]}")
    try:
        _run([*command, *flags, *names, "-c", str(SOURCES / "kernels.cpp")], out / f"{isa}.o")
    except BuildError as error:
        return str(error)
    return ""


def _run(command: list[str], output: Path) -> None:
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    if done.returncode < 0:
        raise BuildError(f"{command[0]} died of signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{command[0]} returned {done.returncode}"]
        raise BuildError(next((line for line in lines if "error:" in line), lines[-1]).strip())


if __name__ == "__main__":
    sys.exit(0 if build_or_say(again=True) else 1)
