"""Which backends run a step? The chosen ones, or, with measured times, those predicted fastest."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyattn.device import Device
from polyattn.errors import PluginError
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.decompositions import Part, by_phase
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.selection.step_choice import ALL, DECODES, REST, StepChoice
from polyattn.spec.layer import LayerSpec

log = logging.getLogger("polyattn")

Assignment = tuple[str, BackendInfo, Part]
"""A phase, who runs it, and the part of the step that it is."""


@dataclass(frozen=True)
class Candidate:
    """A backend that may run a step over the group's cache."""

    info: BackendInfo
    backend: AttentionBackend


class Chooser:
    """Assigns a step's parts to backends, all loaded before the first step.

    A candidate that is still being built competes once it is ready, for later plans. Without measured
    times the selection's pair runs. With them every candidate competes that has a model for the kind of
    step, and the pair runs what no model covers.
    """

    def __init__(self, group: LayerGroup):
        selection = group.selection
        # Planned by bounds, decodes are a call of their own, and lengths predict no time.
        self.bounded = group.spec.length_bounds
        models = selection.timings
        known = {model.backend for model in models}
        self.phases: dict[str, dict[str, Candidate]] = {"prefill": {}, "decode": {}}
        self.chosen: dict[str, Candidate] = {}
        candidates = dict(selection.candidates)
        for phase, members in self.phases.items():
            info = selection.backend(phase)
            if info is None:
                continue
            # Keys that are given whole are the chosen one's at every step.
            others = candidates.get(phase, ()) if group.spec.cached else ()
            for other in (info, *(c for c in others if c.name in known)):
                if other.name not in members:
                    loaded = loaded_candidate(
                        group, phase, other, required=other is info, later=other is not info
                    )
                    if loaded is not None:
                        members[other.name] = loaded
            self.chosen[phase] = members[info.name]
        everyone = [c.info for members in self.phases.values() for c in members.values()]
        # Who may run a step and takes padding rows of one query token alone.
        self.without_padding_rows = [i.name for i in everyone if not i.capabilities.padding_rows]
        decode = self.chosen.get("decode")
        self.mixes = decode is not None and _mixes(decode.info, group.spec, group.device)
        self.group, self.models = group, models
        self._by_time: StepChoice | None = None
        self._joined = -1

    @property
    def by_time(self) -> StepChoice | None:
        """The choice among the candidates that are built; None without times."""
        builds = self.group.builds
        if self.models and self._joined != builds.done:
            self._joined = builds.done
            infos = {
                p: {n: c.info for n, c in m.items() if builds.ready(c.backend)}
                for p, m in self.phases.items()
            }
            chosen = {phase: c.info.name for phase, c in self.chosen.items()}
            self._by_time = StepChoice(self.group.spec, self.models, infos, chosen)
        return self._by_time

    def assign(self, batch: Batch) -> list[Assignment]:
        """Return who runs which part of a step over a cache."""
        by_time = self.by_time
        if by_time is None or self.bounded or batch.num_contexts is not None:
            return self._by_priority(batch)
        if batch.all_decode:
            name = by_time.decode(batch.host_lens, batch.max_seq_len)
            return [("decode", self.phases["decode"][name].info, Part(batch, None))]
        calls = by_time.calls(batch.host_query_lens, batch.host_lens)
        parts: dict[str, Part | None] = {ALL: Part(batch, None)}
        if len(calls) > 1:
            phases = by_phase(batch)
            parts = {DECODES: phases.decode, REST: phases.prefill}
        found: list[Assignment] = []
        for call in calls:
            part = parts[call.rows]
            assert part is not None, f"{call.rows} of {batch}"
            found.append((call.phase, self.phases[call.phase][call.name].info, part))
        return found

    def _by_priority(self, batch: Batch) -> list[Assignment]:
        prefill, decode = self.chosen["prefill"], self.chosen["decode"]
        apart = batch.num_contexts is not None or batch.all_decode or self.bounded
        whole = self.mixes and not apart
        if prefill.info == decode.info and whole:
            return [("prefill", prefill.info, Part(batch, None))]
        parts = _parts(batch, decode, prefill)
        if self.bounded and any(isinstance(part.rows, Tensor) for _, _, part in parts):
            # Gathered rows would have copies of lengths that only the device knows.
            return [("prefill", prefill.info, Part(batch, None))]
        return parts


def _mixes(info: BackendInfo, spec: LayerSpec, device: Device) -> bool:
    """Whether a backend takes a mixed step in one call where no times say who is faster.

    Not where it ranks its one call below its decode: such a call may cut no long row.
    """
    whole, decode = (info.priority(spec, device, phase).score for phase in ("mixed", "decode"))
    return "mixed" in info.capabilities.phases and whole >= decode


def loaded_candidate(
    group: LayerGroup, phase: str, info: BackendInfo, required: bool, later: bool = False
) -> Candidate | None:
    """Load a backend. A competing one that can't be loaded is left out, with a log line."""
    try:
        form = group.kernel_format(info)
        loaded = group.load(phase, info, AttentionBackend, cache=form, later=later)
        return Candidate(info, loaded)
    except PluginError as error:
        if required:
            raise
        log.warning("%s does not compete for %s: %s", info.name, group.spec, error)
        return None


def _parts(batch: Batch, decode: Candidate, prefill: Candidate) -> list[Assignment]:
    phases = by_phase(batch, decode.info.capabilities.decode_query_lens)
    parts: list[tuple[str, BackendInfo, Any]] = [
        ("decode", decode.info, phases.decode),
        ("prefill", prefill.info, phases.prefill),
    ]
    return [
        (p, info, part) for p, info, part in parts if part is not None and part.batch.num_tokens
    ]
