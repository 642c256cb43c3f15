"""The record of a selection: every step and every candidate's verdict. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from polyattn.device import Device
from polyattn.registry.capabilities import Rejection
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate in one phase. No rejections means that it can serve.

    `build` is the package whose claims were judged, where several bring the library; `runs` what of
    the backend runs on this device, where it says so (an instruction set). `record`: which results
    prove it, "" where none do.
    """

    backend: str
    phase: str
    score: int
    rejections: tuple[Rejection, ...] = ()
    why: str = ""
    proof: str = ""
    build: str = ""
    runs: str = ""
    record: str = ""

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
    """The backends chosen for a layer, and why.

    Error texts, `explain` and `--json` all show it.

    Attributes:
        spec: the layer.
        device: what it was chosen for.
        steps: the questions of the decision tree and their answers, in order.
        chosen: (phase, backend's name) pairs.
        candidates: for each phase all backends that can serve it over the same cache, best first.
        cache: the cache's format; None for a layer without one.
        kernel_block_sizes: for each candidate the tokens of a block that its kernel walks. If that
            isn't the cache's, the block table is expanded.
        notes: remarks for people.

    Examples:
        >>> decision = select(LayerSpec(num_heads=8, head_size=64), "x86-avx512").decision
        >>> decision.prefill in dict(decision.chosen).values()
        True

    """

    spec: LayerSpec
    device: Device
    steps: tuple[Step, ...]
    chosen: tuple[tuple[str, str], ...]
    candidates: tuple[tuple[str, tuple[str, ...]], ...]
    cache: CacheFormat | None = None
    kernel_block_sizes: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def backend(self, phase: str) -> str | None:
        """Return who serves `phase`; None where the layer has no such phase."""
        return dict(self.chosen).get(phase)

    @property
    def prefill(self) -> str:
        """Who attends for sequences of several query tokens."""
        return dict(self.chosen)["prefill"]

    @property
    def decode(self) -> str | None:
        """Who attends for sequences of one query token; None for layers without a cache."""
        return self.backend("decode")

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
        who = [f"{phase} {name}" for phase, name in self.chosen if phase in ("prefill", "decode")]
        if self.cache is None:
            return ", ".join(who)
        sizes = dict(self.kernel_block_sizes)
        words = [*who, f"layout {self.cache.layout}, block size {self.cache.block_size}"]
        words += [
            f"{phase} in blocks of {sizes[name]}"
            for phase, name in self.chosen
            if sizes.get(name, self.cache.block_size) != self.cache.block_size
        ]
        others = [f"{phase} {name}" for phase, name in self.chosen if phase in ("store", "merge")]
        return ", ".join([*words, *others])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON values."""
        return {
            "spec": self.spec.to_dict(),
            "device": str(self.device),
            "chosen": dict(self.chosen),
            "candidates": {phase: list(names) for phase, names in self.candidates},
            "cache": None if self.cache is None else asdict(self.cache),
            "kernel_block_sizes": dict(self.kernel_block_sizes),
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
    build = f" ({verdict.build}'s build)" if verdict.build else ""
    text = f"{verdict.backend}{build} for {verdict.phase}"
    if verdict.accepted:
        text += f", by {verdict.runs}" if verdict.runs else ""
        record = f": {verdict.record}" if verdict.record else ""
        text += f" (priority {verdict.score}, {verdict.proof}{record})"
        text += f": {verdict.why}" if verdict.why else ""
    return text


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    return {
        "backend": verdict.backend,
        "build": verdict.build,
        "runs": verdict.runs,
        "phase": verdict.phase,
        "accepted": verdict.accepted,
        "priority": verdict.score,
        "why": verdict.why,
        "proof": verdict.proof,
        "record": verdict.record,
        "rejections": [vars(rejection) for rejection in verdict.rejections],
    }
