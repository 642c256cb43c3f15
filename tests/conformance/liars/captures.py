"""Lies of captured mixed steps, and of recurrences that take drafts in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from liars.plain import GraphPlan, HonestGraph
from liars.recurrences import Scan
from liars.told import lies
from polyattn.kernel import AttentionKind, Batch, Frame, Plan, RecurrentFrame
from polyattn_cpu.mla import TorchMLA
from torch import Tensor


class MixedPlan(GraphPlan):
    """And where queries start, which differs from step to step."""

    __slots__ = ("starts",)

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.starts = batch.query_start_loc.clone()


class HonestMixed(HonestGraph):
    """Reads where queries start from its plan's tensors, too."""

    planned: ClassVar[type[GraphPlan]] = MixedPlan

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        super().refill(plan, batch)
        assert isinstance(plan, MixedPlan)
        plan.starts.copy_(batch.query_start_loc)

    def held(self, plan: GraphPlan) -> Batch:
        assert isinstance(plan, MixedPlan)
        return Batch(plan.starts, plan.lens, plan.table)


class QueriesOfTheCapture(HonestMixed):
    """Prompts are cut where the captured step's were: right where rows are all as long."""

    by = ("mixed_reuse",)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        HonestGraph.refill(self, plan, batch)


class HonestMixedScan(Scan):
    """Reads slots, lengths and where queries start from its captured plan, which later steps refill."""

    by = ()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch)
        if reuse is None:
            return plan
        self.refill(reuse, plan)
        return reuse

    def refill(self, captured: Any, plan: Any) -> None:
        captured.slots, captured.before, captured.batch = plan.slots, plan.before, plan.batch


class PromptsOfTheCapture(HonestMixedScan):
    """A recurrence's prompts are cut where the captured step's were."""

    by = ("recurrent_mixed_reuse",)

    def refill(self, captured: Any, plan: Any) -> None:
        captured.slots, captured.before = plan.slots, plan.before


class PromptsEndWithTheirRoom(HonestMixedScan):
    """The last prompt also takes the tokens that its captured room has left."""

    by = ("recurrent_mixed_reuse",)

    def refill(self, captured: Any, plan: Any) -> None:
        super().refill(captured, plan)
        batch = plan.batch
        if batch.num_contexts is None:
            return
        last = max(i for i, slot in enumerate([0, *plan.slots]) if slot >= 0) - 1
        if last >= 0:
            starts = [
                *batch.starts[: last + 1],
                *batch.starts[-1:] * (len(batch.starts) - last - 1),
            ]
            captured.batch = Batch(starts, batch.lens, state_slots=batch.state_slots)


class HonestLatentGraph(TorchMLA):
    """Absorbs all rows of a captured step, and reads its plan's tensors alone."""

    by: ClassVar[tuple[str, ...]] = ()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        if not isinstance(reuse, MixedPlan):
            return MixedPlan(batch)
        self.refill(reuse, batch)
        return reuse

    def refill(self, plan: MixedPlan, batch: Batch) -> None:
        assert batch.block_table is not None
        plan.lens.copy_(batch.seq_lens)
        plan.table.copy_(batch.block_table)
        plan.starts.copy_(batch.query_start_loc)

    def run(self, plan: Any, frame: Frame) -> None:
        held = Batch(plan.starts, plan.lens, plan.table)
        super().run(super().plan(held), frame)


class LatentQueriesOfTheCapture(HonestLatentGraph):
    """Prompts over latents are cut where the captured step's were."""

    by = ("mixed_reuse",)

    def refill(self, plan: MixedPlan, batch: Batch) -> None:
        starts = plan.starts.clone()
        super().refill(plan, batch)
        plan.starts.copy_(starts)


class LatentLengthsOfTheCapture(HonestLatentGraph):
    """Drafts over latents see as many keys as the captured step's: the most there may be."""

    by = ("reuse",)

    def refill(self, plan: MixedPlan, batch: Batch) -> None:
        lens = plan.lens.clone()
        super().refill(plan, batch)
        if batch.max_query_len > 1:
            plan.lens.copy_(lens)


class HonestDrafts(Scan):
    """Takes drafts in one call: each token's state goes where it shall be."""

    by = ()

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        states = frame.states
        targets = plan.batch.state_targets
        if targets is None:
            super().run(plan, frame)
            return
        batch, before = plan.batch, states.clone()
        for index, slot in enumerate(plan.slots):
            if slot < 0:
                continue
            self.sequence(
                batch,
                index,
                (frame.inputs, frame.params, before, states, frame.out),
                targets[index],
            )

    def sequence(self, batch: Batch, index: int, given: Any, targets: Tensor) -> None:
        inputs, params, before, states, out = given
        assert batch.state_slots is not None
        held = before[batch.state_slots[index]][None].clone()
        start, count = batch.starts[index], batch.query_lens[index]
        for token in range(count):
            row = slice(start + token, start + token + 1)
            length = batch.lens[index] - count + token + 1
            one = Batch([0, 1], [length], state_slots=torch.zeros(1, dtype=torch.int64))
            part = {name: tensor[row] for name, tensor in inputs.items()}
            Scan.run(self, self.plan(one), RecurrentFrame(part, params, held, out[row]))
            self.keep(states, targets, token, count, held[0])

    def keep(self, states: Tensor, targets: Tensor, token: int, count: int, state: Tensor) -> None:
        states[targets[token]] = state


class LastStateForAll(HonestDrafts):
    """All of a sequence's drafts leave the state after the last."""

    by = ("state_targets",)

    def keep(self, states: Tensor, targets: Tensor, token: int, count: int, state: Tensor) -> None:
        if token == count - 1:
            states[targets[:count]] = state


class DraftsBeginAnew(HonestDrafts):
    """A sequence's first draft starts from nothing."""

    by = ("state_targets",)

    def sequence(self, batch: Batch, index: int, given: Any, targets: Tensor) -> None:
        inputs, params, before, states, out = given
        super().sequence(
            batch, index, (inputs, params, torch.zeros_like(before), states, out), targets
        )


def ungated(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    return frame.but(inputs={n: t for n, t in frame.inputs.items() if n != "z"})


class GateIsASigmoid(Scan):
    """y sigmoid(z) leaves, where it shall be y silu(z)."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, ungated(self, plan, frame))
        if "z" in frame.inputs:
            frame.out.mul_(frame.inputs["z"].sigmoid())


def first_channels(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """All of Mamba-1's channels have the first group's B and C."""
    names = "BC" if self.spec.kind is AttentionKind.MAMBA1 else ""
    some = {n: t for n, t in frame.inputs.items() if n in names and t.dim() == 3}
    some = {n: t[:, :1].expand_as(t).contiguous() for n, t in some.items()}
    return frame.but(inputs={**frame.inputs, **some})


def wide_as_narrow(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """B and C in float32 are read as if two of them were one in the layer's dtype."""
    inputs = dict(frame.inputs)
    for name in "BC" if self.spec.recurrent.bc_in_float32 else "":
        wide = inputs[name]
        inputs[name] = wide.view(torch.bfloat16)[..., : wide.shape[-1]].contiguous()
    return frame.but(inputs=inputs)


def narrow_copies(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """States in 16 bits are computed in a wider copy, which nobody writes back."""
    narrow = self.spec.recurrent.state_dtype != "auto"
    return frame.but(states=frame.states.clone()) if narrow else frame


globals().update(lies(__name__, (Scan, "before", {
    "IgnoresTheGate": ungated, "FirstChannelGroup": first_channels, "ReadsWideAsNarrow": wide_as_narrow,
    "NarrowStatesStay": narrow_copies,
})))  # fmt: skip
