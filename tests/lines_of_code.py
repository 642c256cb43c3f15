"""How many lines does a format of rows take? What its functions are, and all of their module they use."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

from polyattn import RowFormat
from polyattn.runtime.cache.rows import function_of


def lines_of(format: RowFormat) -> int:
    """Return a format's lines of code: no blank ones, comments, docstrings and imports.

    Its `RowFormat(...)` counts as a line a field that it gives.
    """
    functions = [function_of(format, which) for which in ("encode", "decode") if format]
    functions += [function_of(format, "turn")] if format.turn else []
    fields = sum(getattr(format, name) != kind.default for name, kind in fields_of(format))
    return fields + sum(map(len, _spans(functions)))


def fields_of(format: RowFormat) -> list[tuple[str, Any]]:
    """Return the fields of a format."""
    return list(type(format).__dataclass_fields__.items())


def _spans(functions: list[Callable[..., Any]]) -> list[set[int]]:
    """Return the lines of code of functions, and of what they use of their module."""
    module = sys.modules[functions[0].__module__]
    text = inspect.getsource(module)
    tree = ast.parse(text)
    known = {name: node for node in tree.body for name in _named(node)}
    wanted, seen = [f.__name__ for f in functions], set[str]()
    while wanted:
        name = wanted.pop()
        if name in known and name not in seen:
            seen.add(name)
            wanted += [n.id for n in ast.walk(known[name]) if isinstance(n, ast.Name)]
    return [_code(known[name], text.splitlines()) for name in seen]


def _named(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _code(node: ast.stmt, lines: list[str]) -> set[int]:
    assert node.end_lineno is not None
    span = {n for n in range(node.lineno, node.end_lineno + 1) if lines[n - 1].strip()}
    body = node.body[0] if isinstance(node, ast.FunctionDef) else None
    if isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant):
        span -= {*range(body.lineno, (body.end_lineno or 0) + 1)}
    return {n for n in span if not lines[n - 1].lstrip().startswith("#")}
