"""One tiny step of each phase of a recurrence, and what it should give: what verification runs."""

from __future__ import annotations

import torch

from polyattn.families.recurrent import reference
from polyattn.families.recurrent.inputs import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.families.recurrent.layer import Recurrent
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.trial import Outcome


def run_trial(group: LayerGroup, phase: str, generator: torch.Generator) -> Outcome:
    """Run a step of `phase` of this group's layer on its device beside the float64 reference.

    The new states count like outputs.
    """
    spec, device = group.spec, group.torch_device
    layer = Recurrent(group, checks=False, **recurrent_params(spec, generator))
    queries, lens = ([1, 1], [5, 1]) if phase == "decode" else ([0, 70, 5], [3, 70, 9])
    states = group.allocate_states(4)
    states.data.copy_(recurrent_state(spec, states.data.shape, generator))
    slots = torch.tensor([3, 1, 0][: len(lens)], device=device)
    batch = Batch.from_lens(queries, lens, state_slots=slots, device=device)
    given = recurrent_inputs(spec, sum(queries), generator, device)
    named = dict(zip(layer.form.inputs, given, strict=True))
    expected, after = reference.forward(spec, named, layer.params, states.data, batch)
    out = layer(*given, states=states, plan=group.plan(batch))
    rows = len(out)
    return Outcome(
        out.reshape(rows, -1), expected.reshape(rows, -1), state=states.data.flatten(1),
        expected_state=after.flatten(1),
    )  # fmt: skip
