"""Bounds of a trace's integers, operation by operation: which fit 32 bits or are never negative.

A device computes 32-bit integers at four times the speed of 64-bit ones, and an index that can't be
negative needs no wrapping. Places in a sequence are taken to be below 2^30, other sizes below 2^31.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.kernel import Trace

INT32, INT64 = 1 << 31, 1 << 63
PLACES = {"b": 1 << 30, "h": 1 << 16, "q_idx": 1 << 30, "kv_idx": 1 << 30}


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest value that an integer may have."""

    low: int
    high: int

    @property
    def short(self) -> bool:
        """Whether 32 bits hold it."""
        return self.low >= -INT32 and self.high < INT32

    @property
    def natural(self) -> bool:
        """Whether it is never negative."""
        return self.low >= 0

    def around(self, other: Bounds) -> Bounds:
        """Return what holds both."""
        return Bounds(min(self.low, other.low), max(self.high, other.high))


ANY32, ANY64 = Bounds(-INT32, INT32 - 1), Bounds(-INT64, INT64 - 1)


def bounds_of(traced: Trace) -> list[Bounds | None]:
    """Return the bounds of each node of a trace, None of those that are no integers."""
    bounds: list[Bounds | None] = []
    for node in traced.nodes:
        if node.kind != "int":
            bounds.append(None)
            continue
        args = [
            bounds[a] or (Bounds(0, 1) if traced.nodes[a].kind == "bool" else ANY64)
            for a in node.args
        ]
        if node.op == "place":
            bounds.append(Bounds(0, PLACES[node.what] - 1))
        elif node.op == "constant":
            bounds.append(Bounds(node.what, node.what))
        elif node.op == "size":
            bounds.append(Bounds(0, INT32 - 1))
        elif node.op == "load":
            bounds.append(ANY32 if traced.inputs[node.what].dtype == "int32" else ANY64)
        else:
            bounds.append(_computed(node.op, args))
    return bounds


def _computed(op: str, args: list[Bounds]) -> Bounds:
    """The bounds of an operation's result; a 64-bit overflow wraps, so that it may be anything."""
    a, b = args[0], args[-1]
    if op == "add":
        result = Bounds(a.low + b.low, a.high + b.high)
    elif op == "sub":
        result = Bounds(a.low - b.high, a.high - b.low)
    elif op == "mul":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        result = Bounds(min(corners), max(corners))
    elif op == "neg":
        result = Bounds(-a.high, -a.low)
    elif op == "abs":
        result = Bounds(0, max(abs(a.low), abs(a.high)))
    elif op == "minimum":
        result = Bounds(min(a.low, b.low), min(a.high, b.high))
    elif op == "maximum":
        result = Bounds(max(a.low, b.low), max(a.high, b.high))
    elif op == "where":
        result = args[1].around(b)
    elif op == "mod" and b.low > 0:
        result = Bounds(0, b.high - 1)
    elif op == "floordiv" and b.low > 0:
        result = Bounds(a.low // b.low if a.low < 0 else 0, max(a.high, 0))
    elif op in ("floor", "ceil", "to_int"):
        result = a
    else:
        result = (
            ANY32 if all(x.short for x in args) and op in ("and", "or", "xor", "not") else ANY64
        )
    return result if result.low >= -INT64 and result.high < INT64 else ANY64
