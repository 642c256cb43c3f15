"""Who runs a step? The chosen backends, or where times were measured, the fastest predicted ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from polyattn.errors import PluginError
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.batch import Batch
from polyattn.runtime.decompositions import Part, by_phase
from polyattn.runtime.group import LayerGroup
from polyattn.selection.prediction import Predictor, StepShape, kind_of_step, shape_of_step

log = logging.getLogger("polyattn")

Assignment = tuple[str, BackendInfo, Part]
"""A phase, who runs it, and the part of the step that it is."""
LONGEST_SHORT = 16
"""Query tokens up to which rows are looked at as short ones."""


@dataclass(frozen=True)
class Candidate:
    """A backend that may run a step over the group's cache."""

    info: BackendInfo
    backend: AttentionBackend

    @property
    def longest_decode(self) -> int:
        """The most query tokens of a row that it takes as a decode."""
        return self.info.capabilities.decode_query_lens

    @property
    def mixes(self) -> bool:
        """Whether it takes a whole step in one call."""
        return "mixed" in self.info.capabilities.phases


class Chooser:
    """Assigns a step's parts to backends, all of them loaded before the first step.

    Without measured times that is the selection's pair. With them every candidate competes that has
    a model for the kind of step; what no model speaks of stays with the pair.
    """

    def __init__(self, group: LayerGroup):
        selection = group.selection
        self.spec = group.spec
        models = selection.timings
        self.predictor = Predictor(self.spec, models) if models else None
        known = {model.backend for model in models}
        self.phases: dict[str, dict[str, Candidate]] = {"prefill": {}, "decode": {}}
        self.chosen: dict[str, Candidate] = {}
        candidates = dict(selection.candidates)
        for phase, members in self.phases.items():
            info = selection.backend(phase)
            if info is None:
                continue
            for other in (info, *(c for c in candidates.get(phase, ()) if c.name in known)):
                if other.name not in members:
                    loaded = _loaded(group, phase, other, required=other is info)
                    if loaded is not None:
                        members[other.name] = loaded
            self.chosen[phase] = members[info.name]

    def find(self, phase: str, name: str) -> Candidate:
        """Return a loaded candidate by name."""
        return self.phases[phase][name]

    def assign(self, batch: Batch) -> list[Assignment]:
        """Return who runs which part of a step over a cache."""
        if self.predictor is None:
            return self._by_priority(batch)
        if batch.all_decode:
            best = self._best("decode", self._shape(batch), self.phases["decode"])
            return [("decode", best.info, Part(batch, None))]
        return self._by_time(batch)

    def _by_priority(self, batch: Batch) -> list[Assignment]:
        prefill, decode = self.chosen["prefill"], self.chosen["decode"]
        if prefill.info == decode.info and prefill.mixes and not batch.all_decode:
            return [("prefill", prefill.info, Part(batch, None))]
        return _parts(batch, decode, prefill)

    def _by_time(self, batch: Batch) -> list[Assignment]:
        """Weigh one call for all against a call for each phase."""
        assert self.predictor is not None
        kind = kind_of_step(batch.query_lens, LONGEST_SHORT)
        shape = self._shape(batch)
        decode, prefill = self.chosen["decode"], self.chosen["prefill"]
        if kind == "short":
            takes = {n: c for n, c in self.phases["decode"].items() if self._takes(c, batch)}
            one = self._fastest(kind, shape, takes | self.phases["prefill"])
            if one is not None and one[0].info.name in takes:
                return [("decode", one[0].info, Part(batch, None))]
            return [("prefill", (one[0] if one else prefill).info, Part(batch, None))]
        if kind == "prefill":
            best = self._best(kind, shape, self.phases["prefill"])
            return [("prefill", best.info, Part(batch, None))]
        phases = by_phase(batch)
        if phases.decode is None or phases.prefill is None:
            best = self._best("prefill", shape, self.phases["prefill"])
            return [("prefill", best.info, Part(batch, None))]
        first, second = self._shape(phases.decode.batch), self._shape(phases.prefill.batch)
        apart = (
            self._fastest("decode", first, self.phases["decode"]),
            self._fastest("prefill", second, self.phases["prefill"]),
        )
        # Who was named for one phase keeps it: one call for all is for who may serve both.
        both = self.phases["prefill"].keys() & self.phases["decode"].keys()
        mixing = {n: c for n, c in self.phases["prefill"].items() if c.mixes and n in both}
        whole = self._fastest("mixed", shape, mixing)
        if apart[0] and apart[1]:
            decode, prefill = apart[0][0], apart[1][0]
            if whole is not None and whole[1] < apart[0][1] + apart[1][1]:
                return [("prefill", whole[0].info, Part(batch, None))]
        return [("decode", decode.info, phases.decode), ("prefill", prefill.info, phases.prefill)]

    def _takes(self, candidate: Candidate, batch: Batch) -> bool:
        return candidate.longest_decode >= batch.max_query_len

    def _shape(self, batch: Batch) -> StepShape:
        return shape_of_step(self.spec, batch.query_lens, batch.lens)

    def _fastest(
        self, kind: str, shape: StepShape, among: dict[str, Candidate]
    ) -> tuple[Candidate, float] | None:
        assert self.predictor is not None
        times = self.predictor.times(kind, shape)
        able = [(times[name], name) for name in among if name in times]
        if not able:
            return None
        time, name = min(able)
        return among[name], time

    def _best(self, kind: str, shape: StepShape, among: dict[str, Candidate]) -> Candidate:
        found = self._fastest(kind, shape, among)
        return found[0] if found else self.chosen["decode" if kind == "decode" else "prefill"]


def _loaded(group: LayerGroup, phase: str, info: BackendInfo, required: bool) -> Candidate | None:
    """Load a backend. One that only competes is left out, and named, where it can't be loaded."""
    try:
        form = group.kernel_format(info)
        return Candidate(info, group.load(phase, info, AttentionBackend, cache=form))
    except PluginError as error:
        if required:
            raise
        log.warning("%s does not compete for %s: %s", info.name, group.spec, error)
        return None


def _parts(batch: Batch, decode: Candidate, prefill: Candidate) -> list[Assignment]:
    phases = by_phase(batch, decode.longest_decode)
    parts: list[tuple[str, BackendInfo, Any]] = [
        ("decode", decode.info, phases.decode),
        ("prefill", prefill.info, phases.prefill),
    ]
    return [
        (p, info, part) for p, info, part in parts if part is not None and part.batch.num_tokens
    ]
