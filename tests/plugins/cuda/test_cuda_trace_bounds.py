"""Bounds of a trace's integers: whatever the operands, no result lies outside."""

from __future__ import annotations

import random

import pytest
import torch
from polyattn.kernel import Trace
from polyattn_cuda.trace_bounds import ANY64, INT64, PLACES, Bounds, bounds_of

TWO = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "minimum": min, "maximum": max, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip
ONE = {"neg": lambda a: -a, "abs": abs, "not": lambda a: ~a}


def wrapped(value: int) -> int:
    """What 64 bits hold of it."""
    return (value + INT64) % (2 * INT64) - INT64


@pytest.mark.parametrize("seed", range(40))
def test_no_value_lies_outside(seed: int) -> None:
    """A random function of places and constants, evaluated at corners and at random."""
    pick = random.Random(seed)
    traced = Trace()
    places = {name: traced.add("place", what=name, kind="int") for name in PLACES}
    for value in (0, 1, 7, -3, 1 << 20, -(1 << 33)):
        traced.add("constant", what=value, kind="int")
    for _ in range(12):
        op = pick.choice([*TWO, *ONE, "where"])
        count = 1 if op in ONE else 3 if op == "where" else 2
        args = tuple(pick.randrange(len(traced.nodes)) for _ in range(count))
        if op == "where":
            args = (traced.add("lt", (args[0], args[1])), *args[1:])
        traced.add(op, args)
    bounds = bounds_of(traced)
    for trial in range(60):
        values: list[int] = []
        for number, node in enumerate(traced.nodes):
            of = [values[a] for a in node.args]
            if node.op == "place":
                most = PLACES[node.what] - 1
                value = pick.choice([0, most, pick.randrange(most)]) if trial else most
            elif node.op == "constant":
                value = node.what
            elif node.op == "lt":
                value = int(of[0] < of[1])
            elif node.op == "where":
                value = of[1] if of[0] else of[2]
            elif node.op in ("floordiv", "mod") and of[1] == 0:
                value = 0 if bounds[number] == ANY64 else wrapped(of[0])
            else:
                value = wrapped((TWO | ONE)[node.op](*of))
            values.append(value)
            found = bounds[number]
            if node.kind == "int" and not (node.op in ("floordiv", "mod") and of[1] == 0):
                assert found is not None and found.low <= value <= found.high, (node, of)
    assert all(bounds[n] == Bounds(0, PLACES[name] - 1) for name, n in places.items())


def test_what_is_loaded_may_be_anything_of_its_type() -> None:
    from polyattn.spec.variant import VariantInput

    for dtype, short in (("int32", True), ("int64", False)):
        traced = Trace(inputs={"x": VariantInput(dtype)})
        loaded = traced.add("load", (), "x", "int")
        more = traced.add("add", (loaded, loaded))
        found = bounds_of(traced)
        assert found[loaded].short is short and not found[more].short
    assert torch.iinfo(torch.int64).min == -INT64
