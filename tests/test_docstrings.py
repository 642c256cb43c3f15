"""Do the public functions' docstrings say all that a caller needs, and do their examples run?"""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import numpy as np
import polyattn
import polyattn.host
import polyattn.kernel
import polyattn.plugin
import pytest
import torch

DOORS = (polyattn, polyattn.plugin, polyattn.kernel, polyattn.host)
PUBLIC = {name: getattr(door, name) for door in reversed(DOORS) for name in door.__all__}
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(inspect.unwrap(PUBLIC[name]))]


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
    assert not signature.parameters or "Raises:\n" in text
    assert signature.return_annotation in ("None", None) or "Return" in text
    assert "Example:\n    >>> " in text


@pytest.mark.parametrize(
    "name", ["LayerSpec", "LayerGroup", "Attention", "Batch", "CacheWindow", "AttentionState"]
)
def test_a_class_that_every_engine_uses_has_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "Example:\n    >>> " in text and ("Raises" in text or name == "AttentionState")


def test_there_are_examples_and_functions() -> None:
    assert len(examples()) > 20 and len(FUNCTIONS) > 20
