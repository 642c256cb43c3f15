"""What does a choice consist of? `Selection`: a value, the decision and who was decided for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyattn.device import Device
from polyattn.registry.info import BackendInfo
from polyattn.selection.cache_format import CacheFormat
from polyattn.selection.decision import Decision
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import KINDS, TERMS, TimingModel


@dataclass(frozen=True)
class Selection:
    """The backends chosen for a layer, and why. A value: it loads nothing and remembers nothing.

    `backends` holds what a plugin declared of each chosen backend, by phase; `candidates` of all that
    can serve a phase over the same cache, best first. `timings` are measured times of the candidates
    on this device, where there are any: then the group chooses for each step by what is predicted.
    `LayerGroup(selection)` loads the kernels.
    """

    decision: Decision
    backends: tuple[tuple[str, BackendInfo], ...]
    candidates: tuple[tuple[str, tuple[BackendInfo, ...]], ...] = ()
    timings: tuple[TimingModel, ...] = ()

    @property
    def spec(self) -> LayerSpec:
        """The layer that was asked about."""
        return self.decision.spec

    @property
    def device(self) -> Device:
        """The device that was asked about."""
        return self.decision.device

    @property
    def cache_format(self) -> CacheFormat | None:
        """The form of the cache that the chosen backends share; None for layers without one."""
        return self.decision.cache

    def backend(self, phase: str) -> BackendInfo | None:
        """Return what was declared of the backend for `phase`; None where there is no such phase."""
        return dict(self.backends).get(phase)

    def alone(self, name: str) -> Selection:
        """Return the selection with one candidate for all the steps that it can serve."""
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
    """The layers of a model that compute the same, and what was selected for them.

    `kv_source`: for each of `layers` the index of the layer whose cache it reads, most often its own.
    """

    spec: LayerSpec
    layers: tuple[int, ...]
    selection: Selection
    kv_source: tuple[int, ...]

    def num_caches(self, count: int) -> int:
        """Return how many caches the first `count` layers need."""
        return len(set(self.kv_source[:count]))
