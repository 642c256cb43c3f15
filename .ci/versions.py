"""Do the declared bounds hold? Runs fast tests in an environment of oldest or newest versions.

    python .ci/versions.py oldest [--with torch==2.13.0] [TESTS ...]
    python .ci/versions.py newest [TESTS ...]
    python .ci/versions.py oldest --of core --resolve    # what pip would take; installs nothing

Every distribution of `requirements-dev.txt` is installed: core, the plugins and the integrations, with
what their `EXTRAS` need. The oldest: each dependency at the highest of its lower bounds; one that
nobody bounds is an error. `--with` takes another version in its place, where an
index hasn't that one, or another dependency excludes it; it is printed. `--of` takes one distribution's
bounds, since all of them together have no common oldest versions. What pip is told otherwise
(indexes) it takes from its own variables. The environment lies in build/versions/ and is made anew.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
EXTRAS = {
    "core": ("cli", "plot", "conformance", "weights", "tune"),
    "plugins/tpu": ("tpu",),
}  # fmt: skip
"""Of a project's optional dependencies, what the tests need."""
TESTS = (
    "tests/registry",
    "tests/selection",
    "tests/runtime",
    "tests/workload",
    "tests/tools/test_cli.py",
    "tests/plugins",
    "integrations",
)


def projects() -> list[str]:
    """Return the folders of the repository's distributions."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line.removeprefix("-e ./") for line in lines if line.startswith("-e ./")]


def with_ours(folders: list[str]) -> list[str]:
    """Return distributions and those of this repository that they ask for, which no index has."""
    by_name = {project(path)["name"]: path for path in projects()}
    found = list(folders)
    for path in found:
        names = [Requirement(text).name for text in dependencies(path)]
        found += [by_name[name] for name in names if by_name.get(name, path) not in found]
    return found


def project(path: str) -> dict[str, Any]:
    """Return a distribution's table `project`."""
    table: dict[str, Any] = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
    return table


def dependencies(path: str) -> list[str]:
    """Return what a distribution asks for, with what its `EXTRAS` need."""
    extras = project(path).get("optional-dependencies", {})
    more = [text for name in EXTRAS.get(path, ()) for text in extras[name]]
    return [*project(path)["dependencies"], *more]


def requirements(of: list[str]) -> list[Requirement]:
    """Return what distributions declare about others' projects."""
    texts = dict.fromkeys(text for path in of for text in dependencies(path))
    return [each for each in map(Requirement, texts) if not each.name.startswith("polyattn")]


def oldest(declared: list[Requirement]) -> dict[str, Version]:
    """Return each project's lowest version. Raises `SystemExit` where one has none."""
    lowest: dict[str, Version] = {}
    for each in declared:
        bounds = [Version(s.version) for s in each.specifier if s.operator in (">=", "==")]
        lowest[each.name] = max([*bounds, lowest.get(each.name, Version("0"))])
    missing = sorted(name for name, version in lowest.items() if version == Version("0"))
    if missing:
        raise SystemExit(f"no distribution has a lower bound of {', '.join(missing)}; write one")
    return lowest


def pins(which: str, declared: list[Requirement], instead: dict[str, str]) -> list[str]:
    """Return what pip is asked for beside the repository's own projects."""
    wanted = {each.name: "" for each in declared}
    if which == "oldest":
        wanted = {name: f"=={version}" for name, version in oldest(declared).items()}
    for name, text in instead.items():
        print(f"not {name}{wanted.get(name, '')}, but {text}, as --with says", file=sys.stderr)
    return [instead.get(name, name + version) for name, version in wanted.items()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument(
        "--with", dest="instead", action="append", default=[], metavar="NAME==VERSION"
    )
    parser.add_argument(
        "--of", action="append", metavar="FOLDER", help="this distribution alone (default: all)"
    )
    parser.add_argument("--resolve", action="store_true", help="ask pip alone, install nothing")
    arguments = parser.parse_args()
    instead = {re.split("[=><]", text)[0]: text for text in arguments.instead}
    folders = arguments.of or projects()
    bounds = requirements(folders)
    pinned = pins(arguments.which, bounds, instead)
    if arguments.resolve:
        ask = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        # Else pip builds what has no wheel, to read its requirements.
        ask += ["--only-binary", ":all:"]
        own = [str(each) for each in bounds if each.name not in instead]
        return subprocess.run([*ask, "--report", "-", *pinned, *own], check=False).returncode
    folder = ROOT / "build" / "versions" / arguments.which
    venv.create(folder, clear=True, with_pip=True)
    python = str(folder / "bin" / "python")
    own = []
    for path in sorted(with_ours(folders)):  # core first: pip 23.2 else looks for it in the index
        extras = f"[{','.join(EXTRAS[path])}]" if path in EXTRAS else ""
        own += ["-e", f"{ROOT / path}{extras}"]
    install = [python, "-m", "pip", "install", "-q", "pytest-xdist[psutil]"]
    subprocess.run([*install, *pinned, *own], check=True)
    subprocess.run([python, "-m", "pip", "freeze", "--exclude-editable"], check=True)
    run = [python, "-m", "pytest", "-q", "-n", "2", *arguments.tests]
    return subprocess.run(run, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
