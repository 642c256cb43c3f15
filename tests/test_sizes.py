"""Is the house small? No file over 600 lines, tests aside; no function over 60, device kernels aside.

Names by participles (`found`) and `fmt: skip` for what is no table become fewer, never more.

What a docstring tells of arguments, fields, result and errors, with its example, isn't counted.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("core", "plugins", "integrations", "examples", "benchmarks", "tests")
FILE, FUNCTION = 600, 60
AT_MOST = {"found": 0, "given": 4, "kept": 32, "fmt: skip": 472}
"""In the product's sources: variables and arguments so named, and statements that aren't formatted."""


def kernels() -> set[str]:
    """The modules of device kernels, which mypy's settings list."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (modules,) = (o["module"] for o in overrides if o.get("disallow_untyped_defs") is False)
    return {f"{module.replace('.', '/')}.py" for module in modules}


def sources() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if not {"build", ".venv"} & set(path.parts))


def told(node: ast.AST) -> int:
    """Return the lines of a docstring's arguments, result, errors and example, which are no code."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    text = ast.get_docstring(node, clean=False) or ""
    section = re.search(r"(Args|Attributes):\n", text)
    return text[section.start() :].count("\n") if section else 0


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all its statements, which are a tenth of what `ast.walk` yields."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from definitions(child)


def too_large(text: str, kernel: bool = False, test: bool = False) -> Iterator[str]:
    nodes = list(definitions(ast.parse(text)))
    count = text.count("\n") - sum(map(told, nodes))
    if count > FILE and not test:
        yield f"{count} lines; at most {FILE}: does it hold one idea?"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not kernel:
            count = (node.end_lineno or 0) - node.lineno + 1 - told(node)
            if count > FUNCTION:
                yield f"{node.name} has {count} lines; at most {FUNCTION}"


def test_no_file_and_no_function_is_too_long() -> None:
    exempt, paths = kernels(), sources()
    assert all(any(path.match(name) for path in paths) for name in exempt)
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in paths
        for problem in too_large(
            path.read_text(encoding="utf-8"),
            any(path.match(name) for name in exempt),
            "tests" in path.relative_to(ROOT).parts,
        )
    ]
    assert len(paths) > 300
    assert not found, "\n".join(found)


def counted(text: str) -> dict[str, int]:
    """Count the bindings of each name in a source, and its statements that aren't formatted."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [n.arg for n in nodes if isinstance(n, ast.arg)]
    return {what: names.count(what) or text.count(f"# {what}\n") for what in AT_MOST}


def test_what_should_become_less_does_not_grow() -> None:
    product = [path for path in sources() if "src" in path.parts]
    counts = [counted(path.read_text(encoding="utf-8")) for path in product]
    totals = {what: sum(count[what] for count in counts) for what in AT_MOST}
    grown = {what: n for what, n in totals.items() if n > AT_MOST[what]}
    assert not grown, f"name a value after the thing, format what is no table: {grown}, {AT_MOST=}"


def test_the_count_sees_bindings_and_marks() -> None:
    text = "found = f(found=1)\n\n\ndef f(given):\n    return [found for found in given]  # fmt: skip\n"
    assert counted(text) == {"found": 2, "given": 1, "kept": 0, "fmt: skip": 1}


def code_lines(text: str) -> list[tuple[int, str]]:
    """Return a source's lines of code by number: no docstrings, imports, headers, brackets."""
    apart: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        last = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.FunctionDef):  # a header is the interface's
            last = node.body[0].lineno - 1
        elif not isinstance(node, ast.Import | ast.ImportFrom) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        apart.update(range(node.lineno, last + 1))
    lines = ((at, line.strip()) for at, line in enumerate(text.split("\n"), 1) if at not in apart)
    return [(at, line) for at, line in lines if re.search(r"^[^#]*\w", line)]


def shared(sources: dict[str, str], length: int = 6) -> list[str]:
    """Return where two plugins, each the first part of a name, have as many equal lines of code."""
    runs: dict[tuple[str, ...], tuple[str, int]] = {}
    pairs = []
    for name, text in sources.items():
        lines = code_lines(text)
        for first in range(len(lines) - length + 1):
            run = tuple(line for _, line in lines[first : first + length])
            other, at = runs.setdefault(run, (name, lines[first][0]))
            if other.split("/")[0] != name.split("/")[0]:
                pairs.append(f"{name}:{lines[first][0]} is {other}:{at}")
    return pairs


def test_no_two_plugins_share_six_lines() -> None:
    root = ROOT / "plugins"
    paths = root.glob("*/src/**/*.py")
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    assert len(sources) > 100
    assert not shared(sources)


def test_shared_lines_are_seen() -> None:
    text = "".join(f"x{n} = {n}\n\n# {n}\n" for n in range(6))
    assert shared({"a/x.py": text, "b/y.py": f"import os\n{text}"}) == ["b/y.py:2 is a/x.py:1"]
    assert not shared({"a/x.py": text, "a/y.py": text, "b/z.py": text[8:]})


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("x = 1\n" * 600, 0), ("x = 1\n" * 601, 1),
        ("def f():\n" + "    x = 1\n" * 59, 0), ("def f():\n" + "    x = 1\n" * 60, 1),
        ("class C:\n    async def f():\n" + "        x = 1\n" * 60, 1),
        ("def f():\n    '''A.\n\n    Args:\n        x: a.\n    '''\n" + "    x = 1\n" * 55, 0),
        ("def f():\n    '''A.\n\n    Args:\n        x: a.\n    '''\n" + "    x = 1\n" * 58, 1),
        ("class C:\n    '''A.\n\n    Attributes:\n        x: a.\n    '''\n" + "x = 1\n" * 596, 0),
        ("class C:\n    '''A.\n\n    Attributes:\n        x: a.\n    '''\n" + "x = 1\n" * 597, 1),
    ],
)  # fmt: skip
def test_the_measure_sees_what_is_too_long(text: str, problems: int) -> None:
    assert len(list(too_large(text))) == problems
    assert not list(too_large(text, kernel=True)) or text.count("\n") > FILE
