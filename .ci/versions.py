"""Do the declared bounds hold? Runs core's fast tests in an environment of oldest or newest versions.

    python .ci/versions.py oldest [--with torch==2.13.0]
    python .ci/versions.py newest

The oldest: every dependency of core's, and of the extras `cli`, `plot` and `conformance`, at the lower
bound that pyproject.toml declares. `--with` takes another version in its place, where an index hasn't
that one; it is printed. What pip is told otherwise (indexes) it takes from its own variables. The
environment lies in build/versions/ and is made anew.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLUGINS = ("plugins/cpu", "plugins/cuda", "plugins/hpu", "plugins/metal", "plugins/rocm", "examples/plugin")
EXTRAS = ("cli", "plot", "conformance")
TESTS = (
    "tests/registry",
    "tests/selection",
    "tests/runtime",
    "tests/workload",
    "tests/tools/test_cli.py",
)


def requirements() -> list[str]:
    """What core and the extras that the tests need declare."""
    project = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(text for name in EXTRAS for text in extras[name])]


def oldest(declared: list[str]) -> list[str]:
    """Each at its lower bound. Raises `SystemExit` where one has none: nobody can test that."""
    pins = []
    for text in declared:
        found = re.fullmatch(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", text)
        if found is None:
            raise SystemExit(
                f"core/pyproject.toml: {text!r} has no lower bound; write 'name>=version'"
            )
        pins.append(f"{found[1]}=={found[2]}")
    return pins


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument(
        "--with", dest="instead", action="append", default=[], metavar="NAME==VERSION"
    )
    arguments = parser.parse_args()
    instead = {text.partition("==")[0]: text for text in arguments.instead}
    wanted = oldest(requirements()) if arguments.which == "oldest" else requirements()
    pins = [instead.get(re.split("[=><]", text)[0], text) for text in wanted]
    for before, pin in zip(wanted, pins, strict=True):
        if before != pin:
            print(f"not {before}, but {pin}, as --with says")
    folder = ROOT / "build" / "versions" / arguments.which
    venv.create(folder, clear=True, with_pip=True)
    python = str(folder / "bin" / "python")
    editable = [part for path in ("core", *PLUGINS) for part in ("-e", str(ROOT / path))]
    install = [python, "-m", "pip", "install", "-q", *pins, "pytest-xdist", *editable]
    subprocess.run(install, check=True)
    print(f"Python {sys.version.split()[0]}", *pins)
    listed = subprocess.run(
        [python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    )
    print(listed.stdout)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "2", *TESTS], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
