"""When may a generator multiply instead of dividing? Where a score is divided by a constant."""

from __future__ import annotations

from polyattn.runtime.functions.tracing import Trace


def reciprocal(trace: Trace, number: int) -> float | None:
    """Return what a value is multiplied by where a score is divided by a constant; None elsewhere.

    A quotient of places is left one: times 1 / 49, 49 is less than 1.
    """
    node = trace.nodes[number]
    if node.op != "truediv" or trace.nodes[node.args[1]].op != "constant":
        return None
    divisor = float(trace.nodes[node.args[1]].what)
    return 1 / divisor if 1e-30 < abs(divisor) < 1e30 and _of_score(trace, number) else None


def _of_score(trace: Trace, number: int) -> bool:
    """Whether a value depends on the score."""
    known, waiting = {number}, [number]
    while waiting:
        node = trace.nodes[waiting.pop()]
        if (node.op, node.what) == ("place", "score"):
            return True
        waiting += set(node.args) - known
        known |= set(node.args)
    return False
