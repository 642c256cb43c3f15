"""The README's commands work word for word, and its picture shows today's plugins."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_promises import DISTRIBUTIONS, assert_uploadable

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INSTALLS = re.findall(r"^\| [^|]+ \| `(pip install [^`]+)` \|$", README, re.MULTILINE)
WHEELS = re.findall(r"^(pip wheel .+)$", README, re.MULTILINE)


def test_every_vendor_has_a_command_from_a_checkout_and_from_wheels() -> None:
    assert len(INSTALLS) == 19 and len(WHEELS) == 1
    extras = set(re.findall(r'"polyattn\[(\w+)\]"', README))
    assert extras == {
        "ascend", "cpu", "cuda", "rocm", "tpu", "hpu", "metal", "neuron", "xpu", "all",
    }  # fmt: skip
    assert len(README.splitlines()) <= 120


def test_a_zipped_application_is_told_to_unpack(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as app:
        for path in (ROOT / "core" / "src" / "polyattn").glob("__init__.py*"):
            app.write(path, f"polyattn/{path.name}")
    words = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path = [{str(tmp_path / 'app.zip')!r}] + sys.path; import polyattn",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    assert "ImportError: polyattn can't run inside a zip file" in said and "unpacked" in said


def test_each_extra_names_distributions_of_this_tree_at_its_version() -> None:
    """And `all` names what each of the others does: what installs it installs any of them."""
    release = runpy.run_path(str(ROOT / ".ci" / "release.py"))
    assert not list(release["problems"]())
    extras = release["projects"]()["core"]["optional-dependencies"]

    def brought(extra: str) -> set[str]:
        found = set()
        for requirement in map(Requirement, extras[extra]):
            inner = requirement.extras if requirement.name == "polyattn" else ()
            found |= set().union(*map(brought, inner)) if inner else {requirement.name}
        return found

    for extra in re.findall(r'"polyattn\[(\w+)\]"', README):
        assert "polyattn-cpu" in brought(extra) <= brought("all"), extra
    for command in INSTALLS:
        for folder in re.findall(r"\./((?:plugins|integrations)/\w+)", command):
            assert folder in release["projects"](), command
    for line in WHEELS:
        wanted = {path for pattern in re.findall(r"\./(\S+)", line) for path in ROOT.glob(pattern)}
        built = {path.relative_to(ROOT).as_posix() for path in wanted}
        assert built == set(release["projects"]()), line


class FreshEnvironment:
    """An environment without packages, in which commands run from the checkout's root."""

    def __init__(self, folder: Path):
        self.dist = folder / "dist"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.programs = folder / "venv" / "bin"

    def run(self, command: str, programs: Path | None = None, **more: str) -> str:
        """Run a command with `dist` as the test's own folder; return its output."""
        path = f"{programs or self.programs}{os.pathsep}{os.environ['PATH']}"
        constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", re.sub(r"\bdist\b", str(self.dist), command)],
            cwd=ROOT, env=os.environ | constraints | {"PATH": path} | more,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stderr}"
        return ran.stdout

    def planned(self, install: str) -> str:
        """Return what a command would install."""
        return self.run(f"{install} --dry-run").rpartition("Would install")[2]


NEEDED = (
    "polyattn/py.typed", "polyattn/data/models/llama-3.1-8b.json",
    "polyattn/data/azure_conversation.csv", "polyattn/conformance/test_conformance.py",
    "polyattn_cpu/hooks.py", "polyattn_cuda/hooks.py", "polyattn_triton/hooks.py",
)  # fmt: skip
"""Files that wheels hold beside their packages' modules, and some of those."""


@pytest.mark.slow
def test_the_wheels_resolve_in_a_fresh_environment(tmp_path: Path) -> None:
    """By the widest extra: a part of what fits together fits. And they hold what is needed."""
    fresh = FreshEnvironment(tmp_path)
    # The tools that build are here already: an environment for each of the wheels costs half a minute.
    fresh.run(WHEELS[0], Path(sys.executable).parent, PIP_NO_BUILD_ISOLATION="0")
    assert_uploadable(fresh.dist)
    assert len([*fresh.dist.glob("*.whl")]) == len(DISTRIBUTIONS) > 20
    names = {n for wheel in fresh.dist.glob("*.whl") for n in zipfile.ZipFile(wheel).namelist()}
    assert names.issuperset(NEEDED), {*NEEDED} - names
    (command,) = (c for c in INSTALLS if "[all]" in c)
    planned = fresh.planned(command)
    for plugin in (
        "ascend", "cpu", "cuda", "hpu", "metal", "neuron", "rocm", "tpu", "triton", "xpu",
    ):  # fmt: skip
        assert f"polyattn-{plugin}-0" in planned


@pytest.mark.sweep
def test_every_install_command_resolves_in_a_fresh_environment(tmp_path: Path) -> None:
    """Word for word, each by itself."""
    fresh = FreshEnvironment(tmp_path)
    fresh.run(WHEELS[0])
    for command in INSTALLS:
        planned = fresh.planned(command)
        assert "polyattn-0" in planned and "polyattn-cpu-0" in planned, command
        for plugin in re.findall(r"plugins/(\w+)", command):
            assert f"polyattn-{plugin}-0" in planned, command


def test_the_pictures_show_what_the_code_says() -> None:
    folder = ROOT / "docs" / "pictures"
    for name, draw in runpy.run_path(str(folder / "draw.py"))["PICTURES"].items():
        assert (folder / name).read_text() == draw(), "stale: python docs/pictures/draw.py"
