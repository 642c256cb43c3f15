"""What came of a run: counts, times, achieved rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyattn.runtime.cost import Cost


@dataclass(frozen=True)
class StepRecord:
    """One step: `seconds` are those that the attention layers took."""

    decode: bool
    tokens: int
    seconds: float
    cost: Cost
    cache_use: float


@dataclass
class Report:
    """A run over a trace."""

    requests: int
    steps: list[StepRecord] = field(default_factory=list)
    generated: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    max_error: float = 0.0
    checked: int = 0

    def phase(self, decode: bool) -> dict[str, Any]:
        """Return counts, milliseconds a step and achieved rates of one kind of step."""
        steps = [s for s in self.steps if s.decode is decode]
        seconds = sum(s.seconds for s in steps)
        cost = sum((s.cost for s in steps), start=Cost(0, 0))
        times = sorted(s.seconds for s in steps)
        return {
            "steps": len(steps),
            "tokens": sum(s.tokens for s in steps),
            "seconds": seconds,
            "p50_ms": _percentile(times, 0.50) * 1e3,
            "p99_ms": _percentile(times, 0.99) * 1e3,
            "gb_per_s": cost.bytes / seconds / 1e9 if seconds else 0.0,
            "tflop_per_s": cost.flops / seconds / 1e12 if seconds else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "requests": self.requests,
            "steps": len(self.steps),
            "tokens": sum(s.tokens for s in self.steps),
            "generated_tokens": self.generated,
            "shared_prefix_tokens": self.shared_tokens,
            "preemptions": self.preemptions,
            "prefill": self.phase(decode=False),
            "decode": self.phase(decode=True),
            "cache_use_peak": max((s.cache_use for s in self.steps), default=0.0),
            "checked_tokens": self.checked,
            "max_error": self.max_error,
        }


def _percentile(ordered: list[float], share: float) -> float:
    """Nearest rank."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
