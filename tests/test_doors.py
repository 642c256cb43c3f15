"""What may plugins and integrations import of core? Only their doors, which import-linter can't say."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGIN_DOORS = ("polyattn.kernel", "polyattn.plugin")
HOST_DOORS = ("polyattn", "polyattn.errors", "polyattn.host")
SOURCES = {
    "plugins/*/src/**/*.py": PLUGIN_DOORS,
    "examples/plugin/src/**/*.py": PLUGIN_DOORS,
    "integrations/*/src/**/*.py": HOST_DOORS,
}


def past(text: str, doors: tuple[str, ...]) -> Iterator[str]:
    """Yield each import of core that passes the doors: a module, or a name that a door doesn't offer."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (n for n in names if n.split(".")[0] == "polyattn" and n not in doors)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "polyattn":
            assert node.module is not None
            if node.module not in doors:
                yield node.module
                continue
            door = importlib.import_module(node.module)
            public = getattr(door, "__all__", None) or vars(door)
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in public)


@pytest.mark.parametrize(("pattern", "doors"), SOURCES.items())
def test_strangers_import_core_by_their_doors_alone(pattern: str, doors: tuple[str, ...]) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in paths
        for module in past(path.read_text(encoding="utf-8"), doors)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("from polyattn.kernel import Plan", []),
        ("import polyattn_cpu.hooks, torch\nfrom polyattn_cpu import hooks", []),
        ("from polyattn.runtime.program import Plan", ["polyattn.runtime.program"]),
        ("def later():\n    import polyattn.runtime.program", ["polyattn.runtime.program"]),
        ("from polyattn import LayerSpec", ["polyattn"]),
        ("from polyattn.kernel import torch", ["polyattn.kernel.torch"]),
    ],
)
def test_the_search_sees_every_kind_of_import(text: str, passed: list[str]) -> None:
    assert list(past(text, PLUGIN_DOORS)) == passed


def test_a_submodule_of_polyattn_is_no_public_name() -> None:
    assert list(past("from polyattn import settings, select", HOST_DOORS)) == ["polyattn.settings"]
