"""What came of a run: counts, times, achieved rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyattn.runtime.step.cost import Cost
from polyattn.tools.replay.usage import Usage


@dataclass(frozen=True)
class StepRecord:
    """One step: `seconds` are those that the attention layers took, or the whole model."""

    decode: bool
    tokens: int
    seconds: float
    cost: Cost
    cache_use: float


@dataclass
class Report:
    """A run over a trace, of a whole model if `whole_model` is set, or else of layers alone.

    `first_token` holds each request's seconds from its arrival to its first token (TTFT),
    `between_tokens` those from each token to the next of its request (ITL).
    `prompts`, `outputs`: of a whole model, the token ids of each request's prompt, and those that it
    generated.
    """

    requests: int
    whole_model: bool = False
    steps: list[StepRecord] = field(default_factory=list)
    generated: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    max_error: float = 0.0
    checked: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    saved_bytes: int = 0
    states_copied: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def phase(self, decode: bool) -> dict[str, Any]:
        """Return counts, milliseconds a step and achieved rates of one kind of step.

        The rates are attention's, so a whole model's times have none.
        """
        steps = [s for s in self.steps if s.decode is decode]
        seconds = sum(s.seconds for s in steps)
        cost = sum((s.cost for s in steps), start=Cost(0, 0))
        times = sorted(s.seconds for s in steps)
        out = {
            "steps": len(steps),
            "tokens": sum(s.tokens for s in steps),
            "seconds": seconds,
            "p50_ms": _percentile(times, 0.50) * 1e3,
            "p99_ms": _percentile(times, 0.99) * 1e3,
        }
        if not self.whole_model:
            out["gb_per_s"] = cost.bytes / seconds / 1e9 if seconds else 0.0
            out["tflop_per_s"] = cost.flops / seconds / 1e12 if seconds else 0.0
        return out

    def latency(self) -> dict[str, float]:
        """Return milliseconds to the first token and between tokens."""
        kinds = {"ttft": sorted(self.first_token), "itl": sorted(self.between_tokens)}
        return {
            f"{name}_p{share}_ms": _percentile(times, share / 100) * 1e3
            for name, times in kinds.items()
            for share in (50, 99)
        }

    def sharing(self) -> dict[str, int]:
        """Return what sequences had in common: blocks and bytes, over all groups and steps.

        `shared_bytes` would be read once less where each distinct block of a step is read once;
        `saved_bytes` were, by calls over shared blocks. `states_copied`: snapshots of recurrences that
        a sequence went on from.
        """
        return {
            "blocks_read": sum(u.read for u in self.usage),
            "distinct_blocks": sum(u.distinct for u in self.usage),
            "blocks_copied": sum(u.copied for u in self.usage),
            "shared_bytes": sum(u.shared_bytes for u in self.usage),
            "saved_bytes": self.saved_bytes,
            "states_copied": self.states_copied,
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
            "latency": self.latency(),
            "sharing": self.sharing(),
            "cache": [usage.to_dict() for usage in self.usage],
            "cache_use_peak": max((s.cache_use for s in self.steps), default=0.0),
            "checked_tokens": self.checked,
            "max_error": self.max_error,
            **({"prompts": self.prompts, "outputs": self.outputs} if self.whole_model else {}),
        }


def _percentile(ordered: list[float], share: float) -> float:
    """Nearest rank."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
