"""The arrival times of requests: the trace's, at random at a rate, or all at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyattn.errors import SettingsError, shown
from polyattn.tools.replay.trace import Request


@dataclass(frozen=True)
class Arrivals:
    """`kind` is "trace", "poisson" or "all"; `rate` in requests per second, for "poisson"."""

    kind: str
    rate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Read `trace`, `poisson:RATE` or `all`. Raises `SettingsError`."""
        kind, _, rate = text.partition(":")
        if text in ("trace", "all"):
            return cls(text)
        try:
            number = float(rate) if kind == "poisson" else math.nan
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise SettingsError(
                f"--arrivals={shown(text)} must be trace, all, or poisson:RATE with a positive "
                "number of requests per second"
            )
        return cls(kind, number)

    def of(self, requests: Sequence[Request], seed: int) -> list[Request]:
        """Return the requests with their times in seconds from the first one's, in order."""
        if self.kind == "all":
            return [replace(request, arrival=0.0) for request in requests]
        if self.kind == "poisson":
            dice, now, out = random.Random(f"{seed}/arrivals"), 0.0, []
            for request in requests:
                out.append(replace(request, arrival=now))
                now += dice.expovariate(self.rate)
            return out
        first = min((request.arrival for request in requests), default=0.0)
        shifted = [replace(request, arrival=request.arrival - first) for request in requests]
        return sorted(shifted, key=lambda request: request.arrival)
