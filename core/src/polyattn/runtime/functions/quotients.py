"""When may a generator multiply instead of dividing? If a score is divided by a constant."""

from __future__ import annotations

from polyattn.runtime.functions.tracing import Trace


def reciprocal(trace: Trace, number: int) -> float | None:
    """Return the factor by which a generator multiplies instead of dividing a score by a constant.

    A quotient of positions stays a division: 49 times 1 / 49 is less than 1, and would round to 0.

    Args:
        trace: the functions' operations.
        number: the operation's number in the trace.

    Returns:
        1 / divisor, or None where the operation isn't such a division.

    Examples:
        >>> def halved(score, b, h, q_idx, kv_idx):
        ...     return score / 2.0
        >>> found = trace(Function(halved, ()), (), {})
        >>> [reciprocal(found, n) for n, node in enumerate(found.nodes) if node.op == "truediv"]
        [0.5]

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
