"""Do the public docstrings say all that a caller needs, and do their examples run?"""

from __future__ import annotations

import dataclasses
import doctest
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
PUBLIC = {name: getattr(door, name) for door in reversed(DOORS) for name in door.__all__}
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(inspect.unwrap(PUBLIC[name]))]

CLASSES = [name for name in PUBLIC if inspect.isclass(PUBLIC[name])]


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
    text = inspect.getdoc(PUBLIC[name]) or ""
    own = re.split(r"^(?:Args|Attributes):\n", text, flags=re.MULTILINE)[-1].partition("\n\n")[0]
    assert [
        f for f in fields(PUBLIC[name]) if not re.search(rf"^    {f}: ", own, re.MULTILINE)
    ] == []
    assert "Examples:\n    >>> " in text
    # Whoever checks its fields says what it raises.
    checks = any("__post_init__" in vars(c) for c in PUBLIC[name].__mro__)
    assert "Raises:\n    " in text or not checks, "which errors?"


METHODS = {
    "Attention": ("forward", "store"), "LatentAttention": ("forward", "store"),
    "SparseAttention": ("forward", "store"), "Recurrent": ("forward",), "Indexer": ("__call__",),
    "LayerGroup": ("plan", "allocate_cache", "allocate_states"), "Batch": ("from_lens",),
    "StateCache": ("accepted", "copy"), "StepGraphs": ("capture", "find", "replay"),
    "KVCache": ("allocate", "packed", "joined", "contiguous", "sequence_table", "in_blocks_of",
                "in_pages_of"),
    "CustomMask": ("pack", "tree", "prefix_lm", "documents"),
    "BlockSparseMask": ("of", "of_pages", "sliding_window"),
    "CacheWindow": ("of", "gone", "most_blocks"),
}  # fmt: skip
"""What engines call of the classes; their classes' examples show the calls."""


@pytest.mark.parametrize(("owner", "name"), [(c, m) for c, names in METHODS.items() for m in names])
def test_a_method_that_engines_call_tells_its_arguments_result_and_errors(
    owner: str, name: str
) -> None:
    method = getattr(PUBLIC[owner], name)
    text, signature = inspect.getdoc(method) or "", inspect.signature(method)
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    passed = [p for p in signature.parameters if p != "self"]
    assert [p for p in passed if not re.search(rf"\b{p}\b", arguments)] == []
    assert "Raises:\n" in text
    assert signature.return_annotation in ("None", None) or "Returns:\n" in text


def test_there_are_examples_and_functions() -> None:
    assert len(examples()) > 150 and len(FUNCTIONS) > 75 and len(CLASSES) > 80
