"""How is a step of a recurrence planned? By phase, each part with its sequences' state slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.backend import RecurrentBackend
from polyattn.runtime.batch import Batch
from polyattn.runtime.batch_checks import check_queries
from polyattn.runtime.decompositions import Part, by_phase
from polyattn.runtime.group import LayerGroup, StepPlanner
from polyattn.runtime.plan import Call, StepPlan


class RecurrentStep(StepPlan):
    """The calls of a step over states."""

    def __init__(self, group: LayerGroup, batch: Batch, calls: tuple[Call, ...]):
        super().__init__(group, batch)
        self._calls = calls

    @property
    def calls(self) -> tuple[Call, ...]:
        return self._calls

    def run(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        states: Tensor,
        out: Tensor,
    ) -> None:
        """Run the recurrence. Writes `out` and the batch's slots of `states`."""
        for call in self._calls:
            rows = call.rows
            if rows is None:
                call.backend.run(call.plan, inputs, params, states, out)
                continue
            given = {name: tensor[rows] for name, tensor in inputs.items()}
            if isinstance(rows, slice):
                call.backend.run(call.plan, given, params, states, out[rows])
            else:
                part = out.new_empty(len(rows), *out.shape[1:])
                call.backend.run(call.plan, given, params, states, part)
                out.index_copy_(0, rows, part)


class Planner(StepPlanner):
    """Plans for Mamba, linear attention, delta rules and short convolutions."""

    def __init__(self, group: LayerGroup):
        self.group, self.spec = group, group.spec
        self.backends, self.names = {}, {}
        for phase in ("prefill", "decode"):
            info = group.selection.backend(phase)
            assert info is not None
            self.backends[phase] = group.backend(phase, RecurrentBackend)
            self.names[phase] = info.name

    def plan(self, batch: Batch, reuse: Any = None) -> RecurrentStep:
        """Plan one step. Raises `BatchError`."""
        check_queries(batch)
        if batch.state_slots is None and batch.num_seqs:
            raise BatchError(f"{self.spec} keeps a state; the batch has no state_slots")
        before = {} if reuse is None else {call.phase: call.plan for call in reuse.calls}
        phases = by_phase(batch)
        calls = [
            self._call(phase, part, before.get(phase))
            for phase, part in (("decode", phases.decode), ("prefill", phases.prefill))
            if part is not None and part.batch.num_tokens
        ]
        if reuse is not None and {call.phase for call in calls} - before.keys():
            raise BatchError("the captured step has other phases; capture a graph for each kind")
        return RecurrentStep(self.group, batch, tuple(calls))

    def _call(self, phase: str, part: Part, earlier: Any) -> Call:
        backend = self.backends[phase]
        plan = backend.plan(part.batch, earlier)
        return Call(phase, self.names[phase], backend, plan, part.rows, None)
