"""Lists every message that a user can meet: errors, reasons, warnings, logs and help texts.

    python tests/golden/messages.py

Read the list aloud once a release, for subject, value, remedy and grammar.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ("core/src", "plugins/*/src", "integrations/*/src")
NO_MESSAGES = ("conformance/cases/", "tools/cli/support.py", "_source.py", "functions/source.py",
               "functions/rows.py", "functions/row_writers.py")  # fmt: skip
"""Names of the kit's cases, a generated page, and templates of kernels' sources."""
FEWEST_WORDS = 3
"""Words that make a text a message wherever it stands; fewer are one where they are raised or logged."""
LONGEST_VALUE = 40
SPOKEN = {
    "debug",
    "info",
    "warning",
    "error",
    "warn",
    "print",
    "help",
    "Argument",
    "Option",
    "count",
}


def text_of(node: ast.AST) -> str | None:
    """Return a string's text, an f-string's with its expressions in braces, or None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(_part(value) for value in node.values)


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.FormattedValue):
        said = ast.unparse(value.value)
        return "{" + (said if len(said) <= LONGEST_VALUE else "…") + "}"
    assert isinstance(value, ast.Constant)
    return str(value.value)


def _spoken(node: ast.AST) -> bool:
    """Return whether any text below is a message: raised, logged, warned of or an option's help."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.keyword):
        return node.arg == "help"
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", None)) in SPOKEN


def _silent(node: ast.AST) -> bool:
    """Return whether a statement is a docstring, or defines an operator by its schema."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) == "library.define"
    )


def messages(tree: ast.AST, spoken: bool = False) -> Iterator[str]:
    """Yield the messages of a module in the order of its lines; a command's docstring is its help."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and "app." in "".join(
            map(ast.unparse, node.decorator_list)
        ):
            yield ast.get_docstring(node) or ""
        text = text_of(node)
        if text is not None:
            words = re.findall(r"(?<![\w{])[A-Za-z']+(?![\w}])", text)
            enough = len(words) >= (1 if spoken else FEWEST_WORDS) and " " in text.strip()
            if enough and "\n  " not in text[1:]:
                yield " ".join(text.split())
        elif not _silent(node):
            yield from messages(node, spoken or _spoken(node))


def native_messages(source: str) -> Iterator[str]:
    """Yield the formats that C++ code passes to `fail`, whose text an error of Python shows."""
    for literals in re.findall(r'\bfail\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', source):
        yield "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals))


READ: dict[str, Callable[[str], Iterator[str]]] = {
    ".py": lambda text: messages(ast.parse(text)), ".cpp": native_messages, ".h": native_messages,
}  # fmt: skip
"""By a file's ending, what yields the messages of its text."""


def listing() -> str:
    """Return the list, as a page."""
    lines = ["# Messages"]
    for pattern in SHIPPED:
        for path in sorted(p for root in ROOT.glob(pattern) for p in root.rglob("*.*")):
            name = path.relative_to(ROOT).as_posix().replace("/src", "", 1)
            if path.suffix in READ and not any(part in name for part in NO_MESSAGES):
                own = dict.fromkeys(READ[path.suffix](path.read_text()))
                lines += ["", f"## {name}", "", *(f"- {text}" for text in own)] if own else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
