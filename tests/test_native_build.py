"""What does the CPU plugin's distribution hold, and what does its build say?"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
