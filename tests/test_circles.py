"""Which modules import each other in a circle, imports within functions and for types included?"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "core/src", *ROOT.glob("plugins/*/src"), *ROOT.glob("integrations/*/src")]


def modules() -> dict[str, Path]:
    """Return every module's file by its name; a package's is that of its `__init__`."""
    found = {}
    for source in SOURCES:
        for file in source.rglob("*.py"):
            words = file.relative_to(source).with_suffix("").parts
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = file
    return found


def imports(text: str) -> Iterator[str]:
    """Yield what a module imports anywhere, and each name that it takes from there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph_of(texts: dict[str, str]) -> dict[str, set[str]]:
    """Return for each module those that it imports; a name of a module stands for the module."""
    graph = {}
    for name, text in texts.items():
        targets = {t if t in texts else t.rpartition(".")[0] for t in imports(text)}
        graph[name] = (targets & texts.keys()) - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the one before it, the first again at the end; [] for none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.slow
def test_no_walk_is_longer_than_its_bar() -> None:
    command = [sys.executable, str(Path(__file__).with_name("walks.py"))]
    walks = subprocess.run(command, capture_output=True, text=True, check=False)
    assert walks.returncode == 0, walks.stdout + walks.stderr[-2000:]


def test_no_modules_import_each_other_in_a_circle() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    assert len(texts) > 300
    assert circle(graph_of(texts)) == []


def test_a_circle_within_functions_is_seen() -> None:
    texts = {
        "a": "import b", "b": "def f():\n    from c import name", "c": "if TYPE_CHECKING:\n    import a",
        "d": "import a",
    }  # fmt: skip
    assert sorted(set(circle(graph_of(texts)))) == ["a", "b", "c"]
