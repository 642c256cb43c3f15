"""At which lengths does code take another path? At the numbers in its sources, and beside them.

Random lengths seldom meet a tile's end or the last row of a table. So this module reads all integers in
a package's sources. One that isn't a size costs a draw; one that is a size becomes a length.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from polyattn.spec.layer import LayerSpec
from polyattn.workload.dice import Dice

LARGEST = 2100
"""The largest length that is taken from the sources: the reference is slow."""
_SHIFTED = re.compile(r"\b(\d+)\s*<<\s*(\d+)\b|\b(\d{1,5})\b")
_COMMENT = re.compile(r"//.*|/\*.*?\*/", re.DOTALL)


@lru_cache(maxsize=64)
def numbers_of(path: str) -> tuple[int, ...]:
    """Return the integers from 2 to `LARGEST` in the sources of the distribution that has an object.

    `path`: `"package.module:name"`. Python, C++ and CUDA are read; a module may be one file.
    """
    numbers: set[int] = set()
    spec = find_spec(re.split("[.:]", path)[0])
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*"))]
    if spec is not None and spec.has_location and not folders:
        files = [Path(spec.origin or "")]
    for file in files:
        if file.suffix == ".py":
            numbers |= set(_of_python(file.read_text(encoding="utf-8")))
        elif file.suffix in (".h", ".cpp", ".cu", ".cuh"):
            text = _COMMENT.sub("", file.read_text(encoding="utf-8"))
            for shifted, by, plain in _SHIFTED.findall(text):
                numbers.add(int(plain) if plain else int(shifted) << min(int(by), 32))
    return tuple(sorted(n for n in numbers if 2 <= n <= LARGEST))


def _of_python(text: str) -> Iterable[int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
            left, right = node.left, node.right
            shifted, by = getattr(left, "value", None), getattr(right, "value", None)
            if isinstance(shifted, int) and isinstance(by, int):
                yield shifted << min(by, 32)


def turning(numbers: Iterable[int], spec: LayerSpec, block: int = 0) -> tuple[int, ...]:
    """Return lengths at which a layer's code may take another path, in ascending order.

    These are each number, its half and its double, in keys and in rows of a KV head's group. The layer's
    window and chunk and the cache's `block` count too. Each comes with its two neighbours.
    """
    group, lengths = max(1, spec.gqa_ratio), set()
    own = [spec.sliding_window, spec.chunk_size, spec.sink_tokens, block]
    own += [(spec.sliding_window or 0) + spec.sink_tokens]
    for number in (*numbers, *(1 << n for n in range(1, 11)), *(n for n in own if n)):
        for size in (number, 2 * number, number // 2, number // group, -(-number // group)):
            lengths |= {size - 1, size, size + 1}
    return tuple(sorted(n for n in lengths if 0 < n <= LARGEST))


def draw_turning(
    dice: Dice, at: tuple[int, ...], count: int, longest: int = LARGEST
) -> list[tuple[int, int]]:
    """Return `count` (query, sequence) lengths of a step: a number of keys, or of queries, that turns."""
    some = [n for n in at if n <= longest] or [1]
    few = [n for n in some if n <= longest // 8] or [1]
    rows = []
    for _ in range(count):
        kind, keys = dice.integer(0, 4), dice.choice(some)
        query = 1 if kind < 2 else min(dice.choice(few), keys)
        rows.append((query, keys if kind != 3 else min(keys + query, longest)))
    return rows
