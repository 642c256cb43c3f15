"""Do the kernels pass under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from polyattn_cpu.native import build, library

ROOT = Path(__file__).parents[3]
PARTS = ("tests", "NATIVE_ATTN", "NATIVE_MLA", "NATIVE_STORE", "NATIVE_SCAN", "NATIVE_INDEX")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sanitized library stays, once built."""
    return tmp_path_factory.mktemp("sanitized")


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.skipif(library.why_not() is not None, reason=f"native kernels: {library.why_not()}")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_or_written_out_of_bounds(folder: Path, part: str) -> None:
    done = subprocess.run(
        [str(ROOT / "plugins" / "cpu" / "sanitize.sh")], capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "FOLDER": str(folder), "PARTS": part},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout


@pytest.mark.sweep
@pytest.mark.skipif(library.why_not() is not None, reason=f"native kernels: {library.why_not()}")
@pytest.mark.parametrize("threads", [(), ("-DTEAM", "-rdynamic")], ids=["pool", "team"])
@pytest.mark.parametrize("relaxed", [False, True], ids=["as it is", "without its barrier"])
def test_threads_race_only_where_a_barrier_is_missing(
    tmp_path: Path, relaxed: bool, threads: tuple[str, ...]
) -> None:
    """Who ends last merges a group's parts: without acquire and release it reads others' unfinished."""
    here, made = Path(__file__).with_name("native_check"), tmp_path / "threads"
    sources = sorted(build.SOURCES.glob("*.cpp"))
    subprocess.run(
        [*build.compiler(), "-std=c++17", "-O1", "-g", "-fsanitize=thread",
         *threads, *(("-U__ATOMIC_ACQ_REL", "-D__ATOMIC_ACQ_REL=0") if relaxed else ()),
         f"-I{build.SOURCES}",
         '-DPA_ISA="generic"', "-DPA_TABLE=pa_kernels_generic", "-DPA_BUILT(X)=X(generic)",
         "-DPA_LEFT_OUT(X)=", *map(str, sources), str(here / "threads.cpp"), "-o", str(made),
         "-lpthread"], check=True,
    )  # fmt: skip
    done = subprocess.run([str(made)], capture_output=True, text=True)
    assert ("data race" in done.stderr and "merge_parts" in done.stderr) == relaxed, done.stderr[
        -3000:
    ]
    assert relaxed or (done.returncode == 0 and "36 steps, 0 differ" in done.stdout), done.stdout
