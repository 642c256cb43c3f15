"""Records signatures from a package's source.

    python tests/signatures/record.py OUT PACKAGE VERSION FILE NAME...

Reads the file with `ast`, so the package need not be importable here. NAME is a function, or
Class.method. Of a YAML file, such as torch-npu's, torch's schemas are read: its entries `func:`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the last definition of each function and method: overloads come before it."""
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def record(node: ast.FunctionDef) -> dict[str, Any]:
    """Return the parameters as `tests/fake_libraries/polyattn_fakes.py` reads them."""
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg not in ("self", "cls")]
    return {
        "positional": names,
        "defaults": len(args.defaults),
        "varargs": args.vararg.arg if args.vararg else None,
        "keyword": {
            a.arg: default is not None
            for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        },
    }


def schema(text: str, name: str) -> dict[str, Any]:
    """Return the same of a declared operator's schema."""
    line = re.search(rf"^ *- func: ({re.escape(name)}\(.*)$", text, re.MULTILINE)
    assert line is not None, name
    arguments = re.sub(r"Tensor\(\w!\)", "Tensor", line[1])
    parsed = torch._C.parse_schema(f"recorded::{arguments}").arguments
    optional = [a.has_default_value() for a in parsed if not a.kwarg_only]
    return {
        "positional": [a.name for a in parsed if not a.kwarg_only],
        "defaults": sum(optional),
        "varargs": None,
        "keyword": {a.name: a.has_default_value() for a in parsed if a.kwarg_only},
    }


def main() -> None:
    out, package, version, file, *names = sys.argv[1:]
    text = Path(file).read_text()
    path = Path(out)
    before = json.loads(path.read_text())["functions"] if path.exists() else {}
    if file.endswith(".yaml"):
        found = before | {name: schema(text, name) for name in names}
    else:
        known = functions(ast.parse(text))
        found = before | {name: record(known[name]) for name in names}
    result = {"package": package, "version": version, "functions": found}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
