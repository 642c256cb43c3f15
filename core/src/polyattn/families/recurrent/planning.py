"""How is a step of a recurrence planned? By phase, each part with its sequences' state slots."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.recurrent.targets import check_room, token_by_token, whole_sequences
from polyattn.runtime.backend import RecurrentBackend
from polyattn.runtime.decompositions import Part, Phases, by_phase
from polyattn.runtime.graphs.step_buffers import StepSize
from polyattn.runtime.group import LayerGroup, StepPlan, StepPlanner
from polyattn.runtime.program import Call, Op, RecurrentFrame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.integers import upload


class PaddingOutput(Op):
    """The output of padding rows, 0, which kernels may leave as they found it."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    def run(self, frame: RecurrentFrame) -> None:
        frame.out.zero_()


def _padding(batch: Batch) -> Iterable[Op]:
    """Yield what writes the padding rows' output; a captured step has none, for rows change there."""
    if batch.lens_are_bounds or batch.host_lens.all():
        return
    tokens = np.flatnonzero(np.repeat(batch.host_lens == 0, batch.host_query_lens))
    if len(tokens):
        yield PaddingOutput(upload(tokens, batch.device))


class RecurrentStep(StepPlan):
    """A step's plan. `num_slots`: the slots that the states must have; 0 where only the device knows."""

    def __init__(self, group: LayerGroup, batch: Batch, ops: Iterable[Op]):
        super().__init__(group, batch, ops)
        self.num_slots = 0
        # A captured step's plan serves other steps than its batch.
        if batch.device.type == "cpu" and not group.spec.graph_capture:
            slots = (batch.state_slots, batch.state_targets)
            highest = (int(t.max()) for t in slots if t is not None and t.numel())
            self.num_slots = 1 + max(highest, default=-1)


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
            if phase == "decode":
                self.takes_drafts = info.capabilities.state_targets

    def check(self, batch: Batch) -> None:
        batch.check_queries()
        if batch.state_slots is None and batch.num_seqs:
            raise BatchError(
                f"{self.spec} keeps a state; the batch has no state_slots: pass "
                f"Batch(state_slots=...)"
            )
        if batch.state_targets is not None and batch.state_targets.dim() == 2:
            check_room(batch)

    def plan(self, batch: Batch) -> StepPlan:
        ops = self._by_phase(batch) if batch.state_targets is None else self._moving(batch)
        return RecurrentStep(self.group, batch, (*ops, *_padding(batch)))

    def refill(self, step: StepPlan, batch: Batch) -> None:
        moves = batch.state_targets is not None
        if moves != (step.batch.state_targets is not None):
            raise BatchError(
                f"the step has {'' if moves else 'no '}state_targets, the captured one "
                f"{'none' if moves else 'has'}; capture a StepSize of each"
            )
        phases = Phases(Part(batch, None), None) if moves else by_phase(batch)
        for call in step.calls:
            call.backend.plan(phases.of(call), call.plan)

    def _by_phase(self, batch: Batch) -> tuple[Call, ...]:
        phases = by_phase(batch)
        return tuple(
            self._call(phase, part)
            for phase, part in (("decode", phases.decode), ("prefill", phases.prefill))
            if part is not None and part.batch.num_tokens
        )

    @property
    def padding_rows(self) -> bool:
        """A recurrence has padding rows of any number of tokens."""
        return True

    def own(self, batch: Batch) -> Batch:
        """Return a captured step without targets where a state has room for drafts itself."""
        if batch.state_targets is None or not self._has_room:
            return batch
        batch = batch.copy()
        batch.state_targets = None
        return batch

    def size_problem(self, size: StepSize) -> str | None:
        """Targets that the backend doesn't take in its launch are copied as the host plans."""
        if not size.state_targets or self._has_room or self.takes_drafts:
            return None
        return (
            f"{self.names['decode']}, which runs {self.spec}, takes no state_targets in its launch; run "
            "such a step eagerly, or choose a backend that claims state_targets"
        )

    def replay_problem(self, batch: Batch) -> str | None:
        """A whole state that has room for drafts is moved by no launch."""
        if batch.state_targets is None or batch.state_targets.dim() == 2 or not self._has_room:
            return None
        return (
            f"state_targets names a slot for each sequence. A captured step doesn't move the drafts that "
            f"{self.spec} keeps in its own state; run the step eagerly, or pass a slot for each token"
        )

    @property
    def _has_room(self) -> bool:
        """Whether a state holds drafts itself, so that the next lengths say how many were accepted."""
        return self.spec.recurrent is not None and self.spec.recurrent.draft_tokens > 0

    def _moving(self, batch: Batch) -> Iterable[Op]:
        """Plan a step whose states end elsewhere: each sequence's, or each token's."""
        assert batch.state_targets is not None
        if batch.state_targets.dim() == 1:
            copy, inner = whole_sequences(batch)
            return copy, *self._by_phase(inner)
        self._refuse_two_rooms()
        if self.takes_drafts:
            return (self._call("decode", Part(batch, None)),)
        steps = ((copy, self._call("decode", part)) for copy, part in token_by_token(batch))
        return chain.from_iterable(steps)

    def _refuse_two_rooms(self) -> None:
        """Refuse a slot for each token where a state has room for drafts itself. Raises `BatchError`."""
        form = self.spec.recurrent
        if form is not None and self._has_room:
            raise BatchError(
                f"state_targets has a slot for each token, and {self.spec} keeps drafts in its own state "
                f"(recurrent.draft_tokens={form.draft_tokens}); leave them out of this group's batch: "
                "the next step's lengths tell how many were accepted"
            )

    def _call(self, phase: str, part: Part) -> Call:
        backend = self.backends[phase]
        return Call(phase, self.names[phase], backend, backend.plan(part.batch), part.rows)
