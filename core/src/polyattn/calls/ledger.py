"""Which backends served which calls of a host, and which calls fell back? A fallback warns once."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from polyattn.runtime.group import LayerGroup
from polyattn.selection.running import record_fallback


@dataclass(frozen=True)
class Report:
    """The calls of attention since the last `reset()`.

    Attributes:
        served: for each layer and its backends the number of calls.
        fallbacks: for each reason the number of calls that the host served itself.

    Examples:
        >>> print(Report(served={}, fallbacks={"dropout": 2}))
        fell back for 2 calls: dropout

    """

    served: dict[str, int]
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        lines = [f"served {n} calls: {what}" for what, n in self.served.items()]
        lines += [f"fell back for {n} calls: {why}" for why, n in self.fallbacks.items()]
        return "\n".join(lines) or "no calls of attention"


class Ledger:
    """The calls of one integration. Compiled graphs find it in `Ledger.known` by the host's name.

    Args:
        host: the host's name.
        own: the host's attention that serves the other calls, as messages name it.

    Examples:
        >>> ledger = Ledger("my_engine", "the engine's own attention")
        >>> str(ledger.report())
        'no calls of attention'

    """

    known: ClassVar[dict[str, Ledger]] = {}

    def __init__(self, host: str, own: str):
        self.host, self.own = host, own
        self.known[host] = self
        self._served: Counter[LayerGroup] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def report(self) -> Report:
        """Return the served calls, and those that fell back to the host's own attention."""
        served: Counter[str] = Counter()
        for group, count in self._served.items():
            served[f"{group.spec}: {group.selection.decision.summary()}"] += count
        return Report(dict(served), dict(self._fallbacks))

    def reset(self) -> None:
        """Forget all counts; warnings come again."""
        self._served.clear()
        self._fallbacks.clear()

    def count(self, group: LayerGroup) -> None:
        """Count a call that was served.

        Args:
            group: the layers that served it.

        """
        self._served[group] += 1

    def count_fallback(self, who: str, why: str) -> None:
        """Count a call that fell back, and warn of the first.

        Args:
            who: the module that called; `""` for none.
            why: the reason, as in the warning.

        """
        line = f"{who}: {why}" if who else why
        self._fallbacks[line] += 1
        if self._fallbacks[line] == 1:
            record_fallback(f"{self.host}: {self.own} for {line}")
            warnings.warn(f"polyattn falls back to {self.own} for {line}", stacklevel=3)
