"""What is the result of a selection? `Selection`: a value, with the `Decision` that explains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from polyattn.device import Device
from polyattn.registry.capabilities import SERVICES, Rejection, rotates
from polyattn.registry.info import BackendInfo
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.timing import KINDS, TERMS, TimingModel


@dataclass(frozen=True)
class Verdict:
    """The verdict on one candidate in one phase. A candidate without rejections can serve.

    `build` is the package whose claims were judged, if several bring the library. `runs` is what of the
    backend runs on this device, if it tells (an instruction set). `record` is the results that prove
    it, or "".
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
        """Return the name of the backend for a phase; None if the layer has no such phase.

        Args:
            phase: `"prefill"`, `"decode"` or a service's name.

        """
        return dict(self.chosen).get(phase)

    @property
    def prefill(self) -> str:
        """The backend for sequences of several query tokens."""
        return dict(self.chosen)["prefill"]

    @property
    def decode(self) -> str | None:
        """The backend for sequences of one query token; None for layers without a cache."""
        return self.backend("decode")

    def verdicts(self) -> Iterator[Verdict]:
        """Yield every candidate's verdict, in the order of the tree."""
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
        others = [f"{phase} {name}" for phase, name in self.chosen if phase in SERVICES]
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


@dataclass(frozen=True)
class Selection:
    """The backends chosen for a layer, and why.

    A selection is a value and loads nothing; `LayerGroup(selection)` loads the kernels.

    Attributes:
        decision: the choice and its reasons.
        backends: for each phase what a plugin declared of the chosen backend.
        candidates: for each phase all that can serve it over the same cache, best first.
        timings: measured times of the candidates on this device. With them, a group chooses the backend
            with the lowest predicted time for each step.

    Examples:
        >>> selection = select(LayerSpec(num_heads=8, head_size=64), "x86-avx512")
        >>> selection.decision.device.platform
        'cpu'

    """

    decision: Decision
    backends: tuple[tuple[str, BackendInfo], ...]
    candidates: tuple[tuple[str, tuple[BackendInfo, ...]], ...] = ()
    timings: tuple[TimingModel, ...] = ()

    @property
    def spec(self) -> LayerSpec:
        """The layer of the request."""
        return self.decision.spec

    @property
    def device(self) -> Device:
        """The device of the request."""
        return self.decision.device

    @property
    def cache_format(self) -> CacheFormat | None:
        """The form of the cache that the chosen backends share; None for layers without one."""
        return self.decision.cache

    def backend(self, phase: str) -> BackendInfo | None:
        """Return the declaration of the backend for a phase; None if there is no such phase.

        Args:
            phase: `"prefill"`, `"decode"` or a service's name.

        """
        return dict(self.backends).get(phase)

    def alone(self, name: str) -> Selection:
        """Return the selection with one backend for all the steps that it can serve.

        Args:
            name: a candidate's.

        """
        serves = {p: {i.name: i for i in infos} for p, infos in self.candidates}
        attending = ("prefill", "decode")
        backends = tuple(
            (phase, serves.get(phase, {}).get(name, info) if phase in attending else info)
            for phase, info in self.backends
        )
        once = tuple(float(term == "launch") for term in TERMS)
        models = tuple(TimingModel(name, kind, once) for kind in KINDS)
        return replace(self, backends=backends, timings=models)

    def explain(self) -> str:
        """Return the decision tree with every candidate's verdict, as text."""
        return self.decision.explain()

    def __repr__(self) -> str:
        return f"<Selection: {self.decision.summary()}>"


@dataclass(frozen=True)
class SelectedLayers:
    """Layers of a model that compute the same, and their selection.

    Attributes:
        spec: of each of them.
        layers: their indices in the model.
        selection: what was selected.
        kv_source: for each layer the index of the layer whose cache it reads, most often its own.
        choice_source: for each layer the index of the layer whose indexer chooses its keys; None: it
            attends to no choice, or no layer has an indexer.
        candidate_source: for each layer the index of the layer within whose choice its indexer stays
            (`IndexerSpec.within`), else None.

    Examples:
        >>> (group,) = select_layers([LayerSpec(num_heads=8, head_size=64)] * 2, "x86-avx512")
        >>> group.layers, group.kv_source
        ((0, 1), (0, 1))

    """

    spec: LayerSpec
    layers: tuple[int, ...]
    selection: Selection
    kv_source: tuple[int, ...]
    choice_source: tuple[int | None, ...]
    candidate_source: tuple[int | None, ...]

    def num_caches(self, count: int) -> int:
        """Return how many caches the first layers need.

        Args:
            count: how many layers.

        """
        return len(set(self.kv_source[:count]))


def prepared_for(selection: Selection, spec: LayerSpec) -> Selection:
    """Return the selection for `spec` from the one for the spec without its rope and transforms."""
    notes = []
    rope = spec.rope if selection.spec.rope is None else None
    if rope is not None or spec.qk_norm is not None:
        forms = [_norm(spec.qk_norm)] if spec.qk_norm is not None else []
        forms += [_form(rope)] if rope is not None else []
        asks, who = "q_norm" if rope is None else "rotate=True", _who(selection, spec)
        if rope is not None and rope.learned:
            asks, who = "rotate=False", "the model, by its weights"
        notes.append(f"{' and '.join(forms)}, where a layer has {asks}: {who}")
    if spec.variant != selection.spec.variant:
        notes.append(f"variant {spec.variant}: core's torch operators, before and after attention")
    decision = selection.decision
    return replace(
        selection, decision=replace(decision, spec=spec, notes=(*decision.notes, *notes))
    )


def noted(selection: Selection) -> Selection:
    """Return the selection with notes on what core does beside the backends."""
    prefill = selection.backend("prefill")
    if not selection.spec.dense_context or prefill is None:
        return selection
    note = f"dense context: {prefill.name} computes whole prompts without the window, in their own call"
    notes = (*selection.decision.notes, note)
    return replace(selection, decision=replace(selection.decision, notes=notes))


def _form(rope: RopeSpec) -> str:
    if not rope.rotary_size:
        return "query temperature"
    scaling = "" if rope.scaling == "none" else f", {rope.scaling}"
    return f"rotary embedding ({rope.pairing} pairs, {rope.rotary_size} elements{scaling})"


def _norm(norm: NormSpec) -> str:
    return f"RMS norm of each {norm.over}'s query and key"


def _who(selection: Selection, spec: LayerSpec) -> str:
    store = selection.backend("store")
    if store is None:
        return "core's torch operators, before attention, since nothing is stored"
    caps, norm = store.capabilities, spec.qk_norm
    if rotates(caps, spec):
        return f"in the call in which {store.name} stores"
    does, claims = "rotates", caps.rotates
    if norm is not None and norm.over not in caps.norms:
        does, claims = "norms", caps.norms
    claimed = ", ".join(sorted(claims)) or "nothing"
    return f"core's torch operators, before {store.name}, which {does} {claimed}"
