"""What does every case need? A backend under test, its layers, and steps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

import torch

from polyattn.api import select
from polyattn.conformance.case import Case, served_phases
from polyattn.device import Device
from polyattn.registry.capabilities import SERVICES
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo
from polyattn.registry.machine import build_here
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.plan_checks import PlanChecks
from polyattn.selection.selection import Selection
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec
from polyattn.workload.base import family_of, workload
from polyattn.workload.dice import Dice
from polyattn.workload.steps import RECURRENT, Lengths, batches, pairs, reaching


class Harness:
    """Selects one backend on one device by name, and draws its steps.

    `budget`: seconds that a search of cases may take.
    """

    budget = 5.0

    def __init__(self, backend: str, device: Device, seed: int):
        self.backend, self.device, self.seed = backend, device, seed
        self.dice = Dice(seed, device.torch_device or "cpu")
        self.checks: list[PlanChecks] = []

    @cached_property
    def info(self) -> BackendInfo:
        """The backend under test, as it is built here."""
        declared, timeout = discover().backend(self.backend), current_settings().probe_timeout
        return build_here(declared, self.device.platform, timeout)

    @property
    def torch_device(self) -> torch.device:
        """The device on which tensors are drawn."""
        return self.dice.device

    def select(self, spec: LayerSpec, layout: str | None = None) -> Selection:
        """Select the backend under test, by name, for the phases it claims."""
        caps, named = self.info.capabilities, self.backend
        for service in caps.phases & SERVICES:
            named = f"{service}={self.backend}"
        if spec.cached and named == self.backend:
            served = served_phases(caps, spec, self.device)
            if len(served) == 1:  # another backend serves the other phase
                named = f"{served[0]}={self.backend}"
        selection = select(
            spec, self.device, backend=named, settings=replace(current_settings(), layout=layout)
        )
        ran = {name for _, name in selection.decision.chosen}
        assert self.backend in ran, f"{self.backend} was named, {ran} was chosen"
        return selection

    def group(self, spec: LayerSpec, layout: str | None = None) -> LayerGroup:
        """Return a fresh group: nothing is left of another case. All its plans are checked."""
        group = LayerGroup(self.select(spec, layout))
        group.plan_checks = checks = PlanChecks(share=inf)
        self.checks.append(checks)
        return group

    def layer(
        self,
        spec: LayerSpec,
        layout: str | None = None,
        group: LayerGroup | None = None,
        **how: Any,
    ) -> Any:
        """Return a layer with random parameters; `how`: the family's own options."""
        return family_of(spec).layer_of(group or self.group(spec, layout), self.dice, **how)

    def step(self, layer: Any, lengths: Lengths | str, **how: Any) -> Any:
        """Return a step of a layer, by its lengths or their name; `how`: the family's own options."""
        if isinstance(lengths, str):
            lengths = named(lengths, layer.spec, block_size(layer))
        return workload(layer, lengths, self.dice, step=how)

    def work(self, case: Case, layout: str | None = None, **how: Any) -> Any:
        """Return a case's own step, of a fresh layer; `how`: the family's own options."""
        return self.step(self.layer(case.spec, layout), case.batch, **how)

    def interleaved(
        self, spec: LayerSpec, batches: Sequence[Lengths | str]
    ) -> tuple[list[list[Any]], list[StepPlan]]:
        """Return these steps, each of two layers that share a group, and their plans."""
        group = self.group(spec)
        one, other = [self.layer(spec, group=group) for _ in range(2)]
        firsts = [self.step(one, lengths) for lengths in batches]
        steps = [[step, self.step(other, pairs(step.batch), like=step)] for step in firsts]
        return steps, [group.plan(step.batch) for step in firsts]


def block_size(layer: Any) -> int:
    """Return the tokens of a block of a layer's cache; 16 where it has none."""
    form = layer.group.cache_format
    return form.block_size if form else 16


def named(name: str, spec: LayerSpec, block: int) -> Lengths:
    """Return the step of a name, for a layer."""
    if spec.recurrent is not None:
        return RECURRENT[name]
    if name == "reaching decodes":
        return [(1, length) for _, length in reaching(spec, block)]
    return reaching(spec, block) if name == "reaching" else batches(name, block)
