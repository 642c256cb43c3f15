"""What was served, by whom, and what was not? Counted by call; a fallback is warned of once."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

from polyattn import LayerGroup

_served: Counter[LayerGroup] = Counter()
_fallbacks: Counter[str] = Counter()


@dataclass(frozen=True)
class Report:
    """Calls of attention since the last `reset()`: what they asked for, and how many there were."""

    served: dict[str, int]
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        lines = [f"served {n} calls: {what}" for what, n in self.served.items()]
        lines += [f"fell back for {n} calls: {why}" for why, n in self.fallbacks.items()]
        return "\n".join(lines) or "no calls of attention"


def report() -> Report:
    """Return what was served and what fell back to the model's own attention."""
    served: Counter[str] = Counter()
    for group, count in _served.items():
        served[f"{group.spec}: {group.selection.decision.summary()}"] += count
    return Report(dict(served), dict(_fallbacks))


def reset() -> None:
    """Forget all counts; what was warned of is warned of again."""
    _served.clear()
    _fallbacks.clear()


def count(group: LayerGroup) -> None:
    """Count a call that was served."""
    _served[group] += 1


def count_fallback(who: str, why: str) -> None:
    """Count a call that fell back, and warn of the first."""
    line = f"{who}: {why}"
    _fallbacks[line] += 1
    if _fallbacks[line] == 1:
        warnings.warn(f"polyattn falls back to eager attention for {line}", stacklevel=3)
