"""Ranges of keys by proof: for positions, lengths and windows of any size, by Z3; chunks of some sizes.

The formulas run as they are, over terms in place of numbers: the host's `key_ranges`, and the device's
of Triton's kernels, which are the same functions without Triton's compiler.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from polyattn.spec.key_ranges import key_ranges

z3 = pytest.importorskip("z3")
pytestmark = pytest.mark.slow
CHUNKS = (None, 1, 2, 7, 16, 1000, 8192)


class Term:
    """A whole number of any size. One that is known to be `above` some number says so in conditions."""

    def __init__(self, of: Any, above: int | None = None):
        self.of, self.above = of, above

    def __add__(self, other: Any) -> Term:
        return Term(self.of + plain(other))

    def __radd__(self, other: Any) -> Term:
        return Term(plain(other) + self.of)

    def __sub__(self, other: Any) -> Term:
        known = self.above is not None and isinstance(other, int)
        return Term(self.of - plain(other), self.above - other if known else None)  # type: ignore[operator]

    def __mul__(self, by: int) -> Term:
        return Term(self.of * by)

    def __floordiv__(self, by: int) -> Term:
        """Divide as devices do, towards zero; what should round down says so (`tiles.floored`)."""
        return Term(z3.If(self.of >= 0, self.of / by, -((-self.of) / by)))

    def __lt__(self, other: Any) -> Any:
        return self.of < plain(other)

    def __gt__(self, other: Any) -> Any:
        known = self.above is not None and isinstance(other, int)
        return self.above >= other if known else self.of > plain(other)  # type: ignore[operator]

    def __ge__(self, other: int) -> bool:
        assert self.above is not None
        return self.above + 1 >= other

    def __bool__(self) -> bool:
        assert self.above is not None
        return self.above >= 0


def plain(number: Any) -> Any:
    return number.of if isinstance(number, Term) else number


def minimum(a: Any, b: Any) -> Term:
    return Term(z3.If(plain(a) < plain(b), plain(a), plain(b)))


def maximum(a: Any, b: Any) -> Term:
    return Term(z3.If(plain(a) > plain(b), plain(a), plain(b)))


def where(condition: Any, a: Any, b: Any) -> Term:
    return Term(z3.If(condition, plain(a), plain(b)))


def down(x: Term, by: int) -> Term:
    return Term(x.of / by)  # Z3 rounds down for a positive divisor


def masks() -> list[SimpleNamespace]:
    """Return all kinds of masks, of windows and sink tokens of any size."""
    found = []
    for causal, window, right, sinks, chunk in product(
        (True, False), (False, True), (False, True), (False, True), CHUNKS
    ):
        if (sinks and not window) or (right and causal):
            continue
        found.append(
            SimpleNamespace(
                causal=causal, chunk_size=chunk,
                sliding_window=Term(z3.Int("window"), 0) if window else None,
                window_right=Term(z3.Int("right"), -1) if right else None,
                sink_tokens=Term(z3.Int("sinks"), 0) if sinks else 0,
            )
        )  # fmt: skip
    return found


first, last, length, key, asked = z3.Ints("first last length key query")


def rule(spec: SimpleNamespace, query: Any) -> Any:
    """Return the layer's definition for a key and a query, as `families.attention.reference` has it."""
    seen = [key >= 0, key < length]
    if spec.causal:
        seen.append(query >= key)
    near, window = [], plain(spec.sliding_window)
    if window is not None:
        near.append(query - key < window)
        if not spec.causal and spec.window_right is None:
            near.append(key - query < window)
    if spec.window_right is not None:
        near.append(key - query <= plain(spec.window_right))
    seen.append(z3.Or(z3.And(near), key < plain(spec.sink_tokens)))
    if spec.chunk_size is not None:
        seen.append(key / spec.chunk_size == query / spec.chunk_size)
    return z3.And(seen)


def check(claim: Any) -> None:
    """Assert that a claim holds whatever the numbers are."""
    solver = z3.Solver()
    solver.set("timeout", 60_000)
    solver.add(first <= last, length >= 0, z3.Int("window") >= 1, z3.Int("right") >= 0,
               z3.Int("sinks") >= 1, z3.Not(claim))  # fmt: skip
    assert solver.check() == z3.unsat, solver


def prove(spec: SimpleNamespace, ranges: Any) -> None:
    """Prove that ranges of keys are those that queries from first to last see, and no others."""
    low, kept, near, high = map(plain, ranges)
    check(z3.And(low >= 0, low <= kept, kept <= near, near <= high, high <= length))
    inside = z3.Or(z3.And(low <= key, key < kept), z3.And(near <= key, key < high))
    among = z3.And(first <= asked, asked <= last)
    check(z3.Implies(z3.And(among, rule(spec, asked)), inside))
    # Of all queries the one nearest to a key sees it, if any does.
    nearest = z3.If(key < first, first, z3.If(key > last, last, key))
    check(z3.Implies(inside, rule(spec, nearest)))


@pytest.mark.parametrize("causal", [True, False])
def test_ranges_are_what_a_mask_shows_at_any_length(causal: bool) -> None:
    for spec in (spec for spec in masks() if spec.causal == causal):
        terms = Term(first), Term(last), Term(length)
        prove(spec, key_ranges(spec, *terms, minimum, maximum, down))  # type: ignore[arg-type]


def test_a_device_s_ranges_are_too() -> None:
    """With `floored` as the next test proves it to be."""
    pytest.importorskip("triton")
    from polyattn_triton.kernels import tiles

    tl = SimpleNamespace(minimum=minimum, maximum=maximum, where=where)
    with patch.object(tiles, "tl", tl), patch.object(tiles, "floored", down):
        for spec in masks():
            if spec.window_right is None:
                terms = Term(first), Term(last), Term(length)
                window, chunk = spec.sliding_window or 0, spec.chunk_size or 0
                prove(
                    spec, tiles.keys_seen.fn(*terms, spec.causal, window, chunk, spec.sink_tokens)
                )


@pytest.mark.parametrize("by", [1, 2, 7, 16, 1000, 8192])
def test_a_device_rounds_down(by: int) -> None:
    pytest.importorskip("triton")
    from polyattn_triton.kernels import tiles

    with patch.object(tiles, "tl", SimpleNamespace(where=where)):
        check(plain(tiles.floored.fn(Term(key), by)) == key / by)


def test_a_wrong_formula_is_refuted() -> None:
    """Else nothing is proven: a bound that is one too far has a counterexample."""
    spec = next(m for m in masks() if m.causal and m.sliding_window is not None)
    ranges = key_ranges(spec, Term(first), Term(last), Term(length), minimum, maximum, down)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        prove(spec, ranges._replace(near_start=ranges.near_start + 1))
