"""Runs a step of a recurrence: fresh inputs, poisoned states, the published recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.checking.compare import output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.cases.recurrent import BATCHES
from polyattn.conformance.harness.base import Harness, Lengths, bits, lens_of, unchanged
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.inputs import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.families.recurrent.layer import Recurrent
from polyattn.families.recurrent.planning import RecurrentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.plan import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec

GROWTH, FORGETTING = 0.03, 40.0
"""What a token multiplies the state by in unusual inputs: up to exp(GROWTH), down to exp(-FORGETTING).

No trained model grows for long; none is forbidden to.
"""


@dataclass
class RecurrentInputs:
    """All that one step of one recurrent layer takes."""

    batch: Batch
    inputs: list[Tensor]
    states: StateCache
    used: list[int]


class RecurrentHarness(Harness):
    """Builds and runs recurrent layers."""

    def layer(
        self, spec: LayerSpec, numbers: str = "usual", group: LayerGroup | None = None
    ) -> Recurrent:
        """Return a recurrent layer with random parameters; `growing` and `forgetting` are unusual."""
        params = recurrent_params(spec, self.generator)
        for name in ("A", "decay"):
            if name in params:
                params[name] = rates(params[name], numbers)
        return Recurrent(group or self.group(spec), checks=True, **params)

    def inputs(
        self,
        layer: Recurrent,
        lengths: Lengths | str,
        numbers: str = "usual",
        like: RecurrentInputs | None = None,
    ) -> RecurrentInputs:
        """Return a step whose continuing sequences have random states; all others are NaN."""
        if isinstance(lengths, str):
            lengths = BATCHES[lengths]
        queries, lens = lens_of(lengths)
        count = len(lengths) + 2
        states = layer.group.allocate_states(count)
        states.data.fill_(torch.nan)
        order = torch.randperm(count, generator=self.generator)[: len(lengths)].tolist()
        if like is not None and like.batch.state_slots is not None:
            order = like.batch.state_slots.tolist()
        slots, used = [], []
        for (query, length), slot in zip(lengths, order, strict=True):
            padding = query > 0 and length == 0
            slots.append(-1 if padding else slot)
            if length > query:
                shape = states.data.shape[1:]
                states.data[slot] = recurrent_state(layer.spec, shape, self.generator).to(
                    states.data
                )
            if query and not padding:
                used.append(slot)
        device = self.torch_device
        batch = Batch.from_lens(
            queries, lens, state_slots=torch.tensor(slots, dtype=torch.int64, device=device),
            device=device,
        )  # fmt: skip
        return RecurrentInputs(batch, self.tokens(layer, sum(queries), numbers), states, used)

    def moved(self, layer: Recurrent, lengths: Lengths | str, by_token: bool) -> RecurrentInputs:
        """Return a step whose states go elsewhere: each sequence's, or each of its tokens'."""
        step = self.inputs(layer, lengths)
        queries, lens = step.batch.query_lens, step.batch.lens
        held, slots = step.states.data, step.batch.state_slots
        assert slots is not None
        real = [query if length else 0 for query, length in zip(queries, lens, strict=True)]
        wanted = real if by_token else [min(count, 1) for count in real]
        free = (torch.randperm(sum(wanted), generator=self.generator) + len(held)).tolist()
        targets = torch.full((len(lens), max(wanted)), -1, dtype=torch.int64)
        for row, count in enumerate(wanted):
            targets[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        used = targets[targets >= 0].tolist()
        if by_token:  # as engines have it: a sequence goes on from one of its own slots
            row = max(range(len(lens)), key=lambda i: (lens[i] > queries[i], queries[i]))
            used[used.index(int(targets[row, -1]))] = int(slots[row])
            targets[row, -1] = slots[row]
        states = layer.group.allocate_states(len(held) + sum(wanted))
        states.data.fill_(torch.nan)
        states.data[: len(held)] = held
        targets = (targets if by_token else targets[:, 0]).to(self.torch_device)
        batch = Batch.from_lens(
            queries, lens, state_slots=slots, state_targets=targets, device=self.torch_device
        )
        return RecurrentInputs(batch, step.inputs, states, used)

    def tokens(self, layer: Recurrent, count: int, numbers: str = "usual") -> list[Tensor]:
        """Return the inputs of so many tokens, in the form's order."""
        inputs = recurrent_inputs(layer.spec, count, self.generator, self.torch_device)
        for index, name in enumerate(layer.form.inputs):
            if name in ("g", "w"):
                inputs[index] = rates(inputs[index], numbers)
        return inputs

    def run(self, layer: Recurrent, step: RecurrentInputs, plan: StepPlan | None = None) -> Tensor:
        """Run the layer into a poisoned output."""
        made = plan or layer.group.plan(step.batch)
        assert isinstance(made, RecurrentStep)
        shape, dtype = layer.output_shape(len(step.inputs[0])), STORAGE_DTYPES[layer.spec.dtype]
        out = torch.full(shape, torch.nan, device=self.torch_device).to(dtype)
        layer.run(made, tuple(step.inputs), step.states, out)
        return out

    def check(
        self,
        layer: Recurrent,
        step: RecurrentInputs,
        label: str = "",
        plan: StepPlan | None = None,
    ) -> Tensor:
        """Run and compare output and states with the recurrence as published."""
        spec = layer.spec
        named = dict(zip(layer.form.inputs, step.inputs, strict=True))
        before, given = step.states.data.clone(), [t.clone() for t in step.inputs]
        params = {name: tensor.clone() for name, tensor in layer.params.items()}
        expected, after = reference.forward(spec, named, layer.params, before, step.batch)
        out = self.run(layer, step, plan)
        for name, now, then in zip(named, step.inputs, given, strict=True):
            unchanged(name, now, then)
        for name, then in params.items():
            unchanged(name, layer.params[name], then)
        real = self.real_rows(step.batch)
        self.compare(spec, out[real], expected[real], label)
        now = step.states.data
        self.compare(spec, now[step.used].flatten(1), after[step.used].flatten(1), f"{label}state ")
        kept = [slot for slot in range(len(before)) if slot not in step.used]
        same = torch.equal(bits(now[kept]), bits(before[kept]))
        assert same, "a slot that no sequence of the step has was written"
        return out

    def compare(self, spec: LayerSpec, found: Tensor, expected: Tensor, label: str = "") -> None:
        """Assert that two tensors agree: by token, or by slot."""
        rows = len(expected)
        error = output_error(found.reshape(rows, -1), expected.reshape(rows, -1)) if rows else 0.0
        limit = tolerance_of(spec).output
        assert error <= limit, (
            f"{self.backend}: {label}is off by {error:.3g} (allowed {limit:g}) for {spec}"
        )

    @staticmethod
    def real_rows(batch: Batch) -> Tensor:
        """Return which tokens belong to no padding row."""
        assert batch.state_slots is not None
        real = (batch.state_slots >= 0).cpu()
        return torch.repeat_interleave(real, torch.tensor(batch.query_lens))


def rates(usual: Tensor, numbers: str) -> Tensor:
    """Return exponents of the same shape that make a state grow, or forget all at once."""
    if numbers == "growing" and usual.numel():
        return (usual.abs() / usual.abs().max().clamp(min=1e-6) * GROWTH).to(usual.dtype)
    if numbers == "forgetting":
        return usual - FORGETTING
    return usual
