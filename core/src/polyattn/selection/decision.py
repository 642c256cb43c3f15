"""The record of a selection: every step and every candidate's verdict. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyattn.device import Device
from polyattn.registry.capabilities import Rejection
from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate in one phase. No rejections means that it can serve."""

    backend: str
    phase: str
    score: int
    rejections: tuple[Rejection, ...] = ()
    why: str = ""
    proof: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the backend can serve the phase."""
        return not self.rejections


@dataclass(frozen=True)
class Step:
    """One question of the decision tree, its answer, and the candidates that it judged."""

    question: str
    answer: str
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Who was chosen for a layer and why: error text, `explain` and `--json` are all this.

    `prefill` and `decode` are backend names; `decode` is None for layers without a cache.
    `kernel_block_sizes` are what each phase's kernel walks in; where they differ from
    `block_size`, the block table is expanded.
    """

    spec: LayerSpec
    device: Device
    steps: tuple[Step, ...]
    prefill: str
    decode: str | None
    layout: str
    block_size: int | None
    kernel_block_sizes: tuple[int | None, int | None]
    notes: tuple[str, ...] = ()

    def verdicts(self) -> Iterator[Verdict]:
        """Every candidate's verdict, in the order they were asked."""
        for step in self.steps:
            yield from step.verdicts

    def explain(self) -> str:
        """Return the tree as plain text."""
        lines = [f"{self.spec}", f"on {self.device}"]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"{number}. {step.question} {step.answer}")
            for v in step.verdicts:
                lines.append(f"   {'+' if v.accepted else '-'} {verdict_line(v)}")
                lines += [f"       {rejection}" for rejection in v.rejections]
        lines.append(f"=> {self.summary()}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the choice in one line."""
        if self.decode is None:
            return f"prefill {self.prefill}"
        if self.block_size is None:
            return f"prefill {self.prefill}, decode {self.decode}"
        cache = f"layout {self.layout}, block size {self.block_size}"
        expanded = [
            f"{phase} in blocks of {size}"
            for phase, size in zip(("prefill", "decode"), self.kernel_block_sizes, strict=True)
            if size not in (None, self.block_size)
        ]
        return ", ".join([f"prefill {self.prefill}, decode {self.decode}, {cache}", *expanded])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON values."""
        return {
            "spec": self.spec.to_dict(),
            "device": str(self.device),
            "prefill": self.prefill,
            "decode": self.decode,
            "layout": self.layout,
            "block_size": self.block_size,
            "kernel_block_sizes": list(self.kernel_block_sizes),
            "notes": list(self.notes),
            "steps": [
                {
                    "question": step.question,
                    "answer": step.answer,
                    "candidates": [_verdict_dict(v) for v in step.verdicts],
                }
                for step in self.steps
            ],
        }


def verdict_line(verdict: Verdict) -> str:
    """Return a candidate in one line, without its rejections."""
    text = f"{verdict.backend} for {verdict.phase}"
    if verdict.accepted:
        text += f" (priority {verdict.score}, {verdict.proof})"
        text += f": {verdict.why}" if verdict.why else ""
    return text


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    return {
        "backend": verdict.backend,
        "phase": verdict.phase,
        "accepted": verdict.accepted,
        "priority": verdict.score,
        "why": verdict.why,
        "proof": verdict.proof,
        "rejections": [vars(rejection) for rejection in verdict.rejections],
    }
