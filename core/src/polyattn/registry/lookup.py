"""Does the class that a path names exist? Answered from source, without importing anything.

Importing `a` to find `a.b` would run a stranger's code in the host. The text can't always decide: think
of `import *`, a module's `__getattr__` or a path that a package changes. The answer is "no problem" then,
so a healthy plugin is never called broken. Loading the class reports real problems.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import symtable
import sys
import warnings
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from polyattn.errors import describe
from polyattn.registry.distributions import find_spec

_DYNAMIC = re.compile(
    r"import\s*\*|__getattr__|globals\(|vars\(|setattr\(|exec\(|sys\.modules|__dict__|__path__"
)
"""Signs that a module's names, or a package's submodules, aren't all in its text."""
_DEFINED = re.compile(r"^(?:\s*(?:class|def)\s+(\w+)|(\w+)\s*[:=])", re.MULTILINE)
"""What a module plainly defines: classes, functions, and names that are assigned at its top."""


@cache
def static_problem(path: str) -> str | None:
    """Return why `"package.module:Class"` can't exist, or None if it does or the source can't tell."""
    module, _, name = path.partition(":")
    try:
        return _problem(module, name)
    except Exception:  # a finder that fails, a file that vanishes: nothing is known of the class
        return None


def forget() -> None:
    """Read the sources again at the next question, after an installation."""
    for remembered in (static_problem, _source_problem, _defined):
        remembered.cache_clear()


def _problem(module: str, name: str) -> str | None:
    loaded = sys.modules.get(module)
    if isinstance(loaded, ModuleType) and name in vars(loaded):
        return None
    origin: str | None = None
    locations: list[str] | None = None
    words = module.split(".")
    for depth, word in enumerate(words):
        full = ".".join(words[: depth + 1])
        if depth and locations is None:
            return _missing(full, origin)
        place = _find(full, word, locations if depth else None)
        if place is None:
            return _missing(full, origin)
        origin, locations = place
        problem = _source_problem(full, origin)
        if problem:
            return problem
    return _name_problem(module, origin, name)


def _find(
    full: str, word: str, locations: list[str] | None
) -> tuple[str | None, list[str] | None] | None:
    """Return a module's file and, of a package, the folders of its submodules."""
    loaded = sys.modules.get(full)
    if isinstance(loaded, ModuleType):
        folders = getattr(loaded, "__path__", None)
        return getattr(loaded, "__file__", None), None if folders is None else list(folders)
    # A top-level name needs no import. Below it the finder gets the last word alone: with a dotted name
    # it would look for a parent that isn't imported.
    spec = PathFinder.find_spec(word, locations) if locations else find_spec(full)
    if spec is None:
        return None
    inner = spec.submodule_search_locations
    return spec.origin if spec.has_location else None, None if inner is None else list(inner)


def _missing(full: str, parent: str | None) -> str | None:
    if parent is not None and (not parent.endswith(".py") or _DYNAMIC.search(_text(parent))):
        return None
    return f"its module {full} is missing; the plugin is incomplete: reinstall it"


@cache
def _source_problem(module: str, origin: str | None) -> str | None:
    """Say why a module's source can't be parsed. A bytecode file of its age proves that it can."""
    if origin is None or not origin.endswith(".py") or _has_bytecode(origin):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(Path(origin).read_bytes(), origin)
    except (SyntaxError, ValueError) as error:
        return f"its module {module} can't be parsed: {describe(error)}; reinstall it"
    return None


def _has_bytecode(origin: str) -> bool:
    try:
        with Path(importlib.util.cache_from_source(origin)).open("rb") as file:
            head = file.read(16)
        stat = Path(origin).stat()
    except (OSError, NotImplementedError):
        return False
    stamp = (int(stat.st_mtime), stat.st_size)
    return head[:8] == importlib.util.MAGIC_NUMBER + bytes(4) and head[8:] == b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in stamp
    )


def _name_problem(module: str, origin: str | None, name: str) -> str | None:
    if origin is None or not origin.endswith(".py"):
        return None
    # A look at the text costs a twentieth of parsing it, and this is on the way of every selection.
    if name in _defined(origin):
        return None
    text = _text(origin)
    table = symtable.symtable(text, origin, "exec")
    if name in table.get_identifiers():
        symbol = table.lookup(name)
        if symbol.is_assigned() or symbol.is_imported():
            return None
    if _DYNAMIC.search(text) or re.search(rf"global\s.*\b{name}\b", text):
        return None
    return f"{module} has no {name!r}; the plugin and its declaration disagree"


@cache
def _defined(origin: str) -> frozenset[str]:
    # One expression for all names: compiling one for each costs more than reading the file.
    return frozenset(match[1] or match[2] for match in _DEFINED.finditer(_text(origin)))


def _text(origin: str) -> str:
    return importlib.util.decode_source(Path(origin).read_bytes())
