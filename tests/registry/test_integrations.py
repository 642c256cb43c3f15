"""Integrations are named with their hosts' versions, from metadata alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import install
from polyattn.registry.integrations import GROUP, Integration, integrations

HOSTED = "[vllm.general_plugins]\npolyattn = polyattn_host:register\n"


def found(name: str) -> Integration:
    return next(i for i in integrations() if i.name == name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def requires(*names: str) -> str:
    return "".join(f"Requires-Dist: {n}>=0.32,<0.33; extra == 'x'\n" for n in names)


def test_a_host_is_any_build_of_it(folder: Path) -> None:
    points = f"[{GROUP}]\nhostx = polyattn_host:register\n\n{HOSTED}"
    install(folder, "polyattn-hostx", "0.1.0", requires("hostx", "hostx-cpu"), points)
    assert found(
        "hostx"
    ).host == "hostx>=0.32,<0.33 or hostx-cpu>=0.32,<0.33 is not installed".replace(
        ">=0.32,<0.33", "<0.33,>=0.32"
    )
    install(folder, "hostx-cpu", "0.32.1")
    assert found("hostx") == Integration(
        "hostx", "polyattn-hostx", "0.1.0", "hostx-cpu 0.32.1",
        "by its host, which loads vllm.general_plugins",
    )  # fmt: skip


def test_another_version_of_the_host_is_a_problem(folder: Path) -> None:
    points = f"[{GROUP}]\nhosty = polyattn_hosty\n"
    install(folder, "polyattn-hosty", "0.1.0", requires("hosty"), points)
    install(folder, "hosty", "0.33.0")
    problem = found("hosty").problem
    assert problem.startswith("hosty 0.33.0 is not what polyattn-hosty is made for: pip install")
    assert found("hosty").registered == "by import polyattn_hosty"


def test_an_unreadable_distribution_hides_no_other(folder: Path) -> None:
    install(folder, "a-unreadable", "1.0")
    (folder / "a_unreadable-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff")
    install(folder, "polyattn-hostv", "0.1.0", "", f"[{GROUP}]\nhostv = polyattn_hostv\n")
    assert found("hostv").version == "0.1.0"


def test_another_release_is_a_problem(folder: Path) -> None:
    needs = "Requires-Dist: polyattn>=99,<100\n"
    install(folder, "polyattn-hostw", "9.0", needs, f"[{GROUP}]\nhostw = polyattn_hostw\n")
    problem = found("hostw").problem
    assert problem.startswith("polyattn-hostw 9.0: polyattn ")
    assert problem.endswith(
        "polyattn>=99,<100 is needed; pip install --upgrade polyattn polyattn-hostw"
    )
    code = "from polyattn.host import of_tomorrow"  # a name that this release doesn't have
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | path, capture_output=True)
    assert ended.stderr.decode().startswith(problem) and b"ImportError" in ended.stderr


def test_a_host_may_be_absent_by_design(folder: Path) -> None:
    install(folder, "polyattn-hostz", "0.1.0", "", f"[{GROUP}]\nhostz = polyattn_hostz:install\n")
    assert found("hostz").host == "none needed" and not found("hostz").problem
    assert found("hostz").registered == "by polyattn_hostz.install()"
