"""Every version of vLLM that we are made for has what we stand on, as `upstream.py` recorded it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
import upstream
from packaging.requirements import Requirement

RECORDED = upstream.recorded()
BACKEND = upstream.BACKEND


@pytest.mark.parametrize("version", RECORDED)
def test_a_version_has_what_we_stand_on(version: str) -> None:
    assert not list(upstream.problems(RECORDED[version]))


@pytest.mark.parametrize("version", RECORDED)
def test_a_version_names_what_latents_are_refused_by(version: str) -> None:
    """Sparse MLA's indexer among them: `PolyattnMLAImpl` refuses these of its keyword arguments."""
    tree = ast.parse((upstream.SOURCE / "mla.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign))
    refused = ast.literal_eval(value)
    assert "indexer" in refused
    assert not {*refused} - {*RECORDED[version][f"{BACKEND}.MLAAttentionImpl.__init__"]}


def test_the_bounds_are_the_recorded_versions() -> None:
    project = tomllib.loads((upstream.FOLDER.parent / "pyproject.toml").read_text())["project"]
    minors = sorted(int(version.split(".")[1]) for version in RECORDED)
    assert minors == [*range(minors[0], minors[-1] + 1)] and len(minors) >= 6
    for extra in ("cpu", "cuda"):
        (requirement,) = map(Requirement, project["optional-dependencies"][extra])
        assert str(requirement.specifier) == f"<0.{minors[-1] + 1},>=0.{minors[0]}"


@pytest.mark.parametrize(
    "name, told",
    [
        (f"{BACKEND}.MultipleOf", "attention.py imports it"),
        (f"{upstream.COMMON}.seq_lens", "we read or override it"),
        (f"{BACKEND}.AttentionImpl.forward", "attention.PolyattnImpl.forward stands for it"),
        (upstream.EITHER[0][0], "layouts.py stands on it"),
    ],
)
def test_a_name_that_goes_is_told(name: str, told: str) -> None:
    has = dict(RECORDED["0.33.0"])
    del has[name]
    (text,) = upstream.problems(has)
    assert text == f"{name} is gone: {told}"


@pytest.mark.parametrize("name", [*upstream.METHODS, *upstream.BY_NAME, *upstream.CALLS])
def test_another_parameter_is_told(name: str) -> None:
    has = RECORDED["0.33.0"] | {name: ["renamed", *RECORDED["0.33.0"][name][1:]]}
    (text,) = upstream.problems(has)
    assert name in text


def test_names_are_looked_up_in_sources(tmp_path: Path) -> None:
    """Through what a package imports, a class's bases, and attributes that methods set."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Kind as Other\n")
    (package / "inner.py").write_text(
        "class Base:\n    def call(self, a, *, b): self.set = a\nclass Kind(Base): one: int\n"
    )
    for name in ("Other", "Other.one", "Other.call", "Other.set", "inner.Base.set"):
        assert upstream.look(tmp_path, f"vllm.{name}") is not None
    for name in ("Kind", "Other.two", "inner.Base.one", "gone.Kind"):
        assert upstream.look(tmp_path, f"vllm.{name}") is None
