"""VANILLA_SCAN: the published recurrences, a token at a time, in float64 on the host; slow."""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn.families.recurrent import reference
from polyattn.runtime.backend import RecurrentBackend
from polyattn.runtime.program import Plan, RecurrentFrame


class VanillaScan(RecurrentBackend):
    """Each sequence by `reference.scan`; its slot's state alone is read and written."""

    name: ClassVar[str] = "VANILLA_SCAN"

    def run(self, plan: Plan, frame: RecurrentFrame) -> None:
        inputs, params = frame.inputs, frame.params
        batch = plan.batch
        assert batch.state_slots is not None
        wide = {name: t.detach().to("cpu", torch.float64) for name, t in inputs.items()}
        held = {name: t.detach().to("cpu", torch.float64) for name, t in params.items()}
        for index, slot in enumerate(batch.state_slots.tolist()):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            if slot < 0 or rows.start == rows.stop:
                continue
            before = batch.lens[index] - batch.query_lens[index]
            state = frame.states[slot].to("cpu", torch.float64)
            state = state if before else torch.zeros_like(state)
            mine = {name: tensor[rows] for name, tensor in wide.items()}
            result, state = reference.scan(self.spec, mine, held, state, before)
            frame.out[rows].copy_(result)
            frame.states[slot].copy_(state)
