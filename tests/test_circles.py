"""Which modules import each other in a circle, imports within functions and for types included?"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules of which each reaches every other."""
    reach = {}
    for start in graph:
        seen, waiting = set[str](), [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reach[start] = seen
    found: list[set[str]] = []
    for name, seen in reach.items():
        circle = {other for other in seen if name in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


@pytest.mark.slow
def test_no_walk_is_longer_than_its_bar() -> None:
    command = [sys.executable, str(Path(__file__).with_name("walks.py"))]
    walks = subprocess.run(command, capture_output=True, text=True, check=False)
    assert walks.returncode == 0, walks.stdout + walks.stderr[-2000:]


def test_no_modules_import_each_other_in_a_circle() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    assert len(texts) > 300
    assert circles(graph_of(texts)) == []


def test_a_circle_within_functions_is_seen() -> None:
    texts = {
        "a": "import b", "b": "def f():\n    from c import name", "c": "if TYPE_CHECKING:\n    import a",
        "d": "import a",
    }  # fmt: skip
    assert circles(graph_of(texts)) == [{"a", "b", "c"}]
