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
    """Layers of a model that compute the same, and their selection.

    Attributes:
        spec: of each of them.
        layers: their indices in the model.
        selection: what was selected.
        kv_source: for each layer the index of the layer whose cache it reads, most often its own.

    Examples:
        >>> (group,) = select_layers([LayerSpec(num_heads=8, head_size=64)] * 2, "x86-avx512")
        >>> group.layers, group.kv_source
        ((0, 1), (0, 1))

    """

    spec: LayerSpec
    layers: tuple[int, ...]
    selection: Selection
    kv_source: tuple[int, ...]

    def num_caches(self, count: int) -> int:
        """Return how many caches the first `count` layers need."""
        return len(set(self.kv_source[:count]))
