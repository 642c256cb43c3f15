"""Do the public docstrings say all that a caller needs, and do their examples run?"""

from __future__ import annotations

import dataclasses
import doctest
import functools
import inspect
import re
from enum import Enum
from typing import Any

import numpy as np
import polyattn
import polyattn.host
import polyattn.kernel
import polyattn.plugin
import pytest
import torch

DOORS = (polyattn, polyattn.plugin, polyattn.kernel, polyattn.host)
PUBLIC = {
    name: getattr(door, name)
    for door in reversed(DOORS)
    for name in getattr(door, "__all__", vars(door))
    if not name.startswith("_")
}
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(inspect.unwrap(PUBLIC[name]))]

CLASSES = [name for name in PUBLIC if inspect.isclass(PUBLIC[name])]


REFUSES = re.compile(r"\braise (\w+Error)|\b_?check_\w+\(|\b_?check\(|\bfrom_fields\(")


def unsaid_errors(function: Any, text: str) -> list[str]:
    """Return what a function raises and its docstring doesn't tell; one that checks tells something."""
    refused = list(REFUSES.finditer(inspect.getsource(function)))
    unsaid = [m[1] for m in refused if m[1] and m[1] not in text]
    return unsaid or (["some error"] if refused and "Raises" not in text else [])


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {**PUBLIC, "np": np, "torch": torch}
    tests: dict[str, doctest.DocTest] = {}
    for name, public in PUBLIC.items():
        if name in FUNCTIONS or inspect.isclass(public):
            found = finder.find(inspect.unwrap(public), name, globs=names)
            tests |= {t.name: t for t in found if t.examples}
    return list(tests.values())


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_examples_run(example: doctest.DocTest) -> None:
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.DocTestRunner(optionflags=flags).run(example, out=said.append)
    assert result.attempted and not result.failed, "".join(said)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_tells_its_arguments_result_errors_and_an_example(name: str) -> None:
    function: Any = PUBLIC[name]
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert [p for p in signature.parameters if not re.search(rf"\b{p}\b", arguments)] == []
    assert unsaid_errors(function, text) == []
    assert signature.return_annotation in ("None", None) or "Return" in text
    assert "Examples:\n    >>> " in text


def fields(public: Any) -> list[str]:
    """The names that a user passes to a class, or reads off it."""
    if dataclasses.is_dataclass(public):
        return [f.name for f in dataclasses.fields(public) if f.init and f.name[0] != "_"]
    if issubclass(public, Enum):
        return [member.name for member in public]
    if issubclass(public, Exception):
        return []
    passed = (
        getattr(public, "_fields", None) or [*inspect.signature(public.__init__).parameters][1:]
    )
    return [name for name in passed if name not in ("args", "kwargs")]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_tells_its_fields_and_an_example(name: str) -> None:
    text = told = inspect.getdoc(PUBLIC[name]) or ""
    # Arguments stand where the constructor is declared.
    if not re.search(r"^(Args|Attributes):$", text, re.MULTILINE):
        declaring = [c for c in PUBLIC[name].__mro__[1:] if "Args:" in (c.__doc__ or "")]
        told = inspect.getdoc(declaring[0]) or "" if declaring else text
    own = re.split(r"^(?:Args|Attributes):\n", told, flags=re.MULTILINE)[-1].partition("\n\n")[0]
    assert [
        f for f in fields(PUBLIC[name]) if not re.search(rf"^    {f}: ", own, re.MULTILINE)
    ] == []
    assert "Examples:\n    >>> " in text
    # Whoever checks its fields says what it raises.
    checks = any("__post_init__" in vars(c) for c in PUBLIC[name].__mro__)
    assert "Raises:\n    " in text or not checks, "which errors?"


METHODS = {
    f"{name}.{attribute}": method
    for name in CLASSES
    for attribute, member in inspect.getmembers(PUBLIC[name])
    if attribute == "__call__" or not attribute.startswith("_")
    for method in [inspect.unwrap(getattr(member, "__func__", member))]
    if inspect.isfunction(method) and method.__module__.partition(".")[0] == "polyattn"
}
"""The public methods of public classes, those of their bases too."""


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_its_arguments_result_and_errors(name: str) -> None:
    method = METHODS[name]
    text, signature = inspect.getdoc(method) or "", inspect.signature(method)
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    passed = [p for p in signature.parameters if p not in ("self", "cls")]
    assert [p for p in passed if not re.search(rf"^    {p}: ", arguments, re.MULTILINE)] == []
    returns = signature.return_annotation not in ("None", None)
    assert text.startswith(("Return ", "Yield ")) or "Returns:\n" in text or (text and not returns)
    assert unsaid_errors(method, text) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_property_says_what_it_is(name: str) -> None:
    members = inspect.getmembers(PUBLIC[name])
    own = [(n, m) for n, m in members if isinstance(m, property | functools.cached_property)]
    assert [n for n, member in own if n[0] != "_" and not inspect.getdoc(member)] == []


def test_there_are_examples_and_functions() -> None:
    assert len(examples()) > 150 and len(FUNCTIONS) > 75 and len(CLASSES) > 80
    assert len(METHODS) > 150
