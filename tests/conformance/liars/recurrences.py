"""Lies of recurrent backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from liars.told import Hooks, lies
from polyattn.kernel import AttentionKind, Batch, Plan, RecurrentFrame
from polyattn_cpu.hooks import TORCH_SCAN
from polyattn_cpu.recurrent import TorchScan


class Scan(Hooks, TorchScan):
    by: ClassVar[tuple[str, ...]] = ("recurrence",)

    def replanned(self, plan: Any, batch: Batch) -> None:
        """Change what was planned."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        self.replanned(plan, batch)
        return plan


class HonestScan(Scan):
    by = ()


class OtherForm(Scan):
    """Computes another layer's recurrence."""

    def __init__(self, spec: Any, cache: Any, device: Any):
        super().__init__(self.other(spec), cache, device)

    def other(self, spec: Any) -> Any:
        return spec


def form(spec: Any, **changes: Any) -> Any:
    return spec.replace(recurrent=replace(spec.recurrent, **changes))


OTHER = {
    "AlwaysSoftplus": lambda self, spec: form(spec, dt_softplus=True),
    "NeverActivates": lambda self, spec: form(spec, activation=None),
    "NeverNormalises": lambda self, spec: form(spec, qk_norm=False),
    "AlwaysNormalises": lambda self, spec: (
        form(spec, qk_norm=True) if spec.kind is AttentionKind.GDN else spec
    ),
    "UnscaledQueries": lambda self, spec: (
        spec.replace(scale=1.0) if spec.kind in (AttentionKind.LINEAR, AttentionKind.GDN) else spec
    ),
}
REPLANNED = {
    # What a slot held before is where a fresh sequence starts.
    "AlwaysContinues": lambda self, plan, batch: setattr(
        plan, "before", [count or 1 for count in plan.before]
    ),
    "AlwaysFresh": lambda self, plan, batch: setattr(plan, "before", [0] * len(plan.before)),
    # Padding rows of several tokens are sequences of the first slot.
    "PaddingOfOneToken": lambda self, plan, batch: setattr(plan, "slots", [
        0 if slot < 0 and count > 1 else slot
        for slot, count in zip(plan.slots, batch.query_lens, strict=True)
    ]),
}  # fmt: skip


def clamped(frame: RecurrentFrame, **bounds: float) -> RecurrentFrame:
    """Bound the exponents of a step."""
    parts = {
        name: {n: t.clamp(**bounds) if n in ("A", "decay", "g") else t for n, t in part.items()}
        for name, part in (("inputs", frame.inputs), ("params", frame.params))
    }
    return frame.but(**parts)


def without(name: str) -> Any:
    """One parameter isn't read."""
    return lambda self, plan, frame: frame.but(
        params={n: t for n, t in frame.params.items() if n != name}
    )


def first_group(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """Every head has the first group's B and C, or keys."""
    grouped = {"B", "C", "q", "k"} if self.spec.kind is not AttentionKind.MAMBA1 else set()
    inputs = frame.inputs.items()
    return frame.but(
        inputs={n: t[:, :1].expand_as(t).contiguous() if n in grouped else t for n, t in inputs}
    )


def of_sums(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """Exponents are differences of running sums, which lose their digits where a token forgets all."""
    wide = {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in frame.inputs.items()}
    sums = {n: t.cumsum(0) for n, t in wide.items() if n in ("g", "w")}
    rates = {n: torch.cat([t[:1], t.diff(dim=0)]).to(frame.inputs[n]) for n, t in sums.items()}
    return frame.but(inputs={**frame.inputs, **rates})


BEFORE = {
    # A decode gives its output and leaves the state as it was.
    "ForgetsTheState": lambda self, plan, frame: frame.but(
        states=frame.states.clone() if plan.batch.all_decode else frame.states
    ),
    # Exponents are never positive.
    "ClampedGrowth": lambda self, plan, frame: clamped(frame, max=0.0),
    # Exponents are never below -20, and never more than -20 in a chunk.
    "NeverForgets": lambda self, plan, frame: clamped(frame, min=-0.2),
    "IgnoresTheSkip": without("D"),
    "IgnoresTheStepBias": without("dt_bias"),
    "IgnoresTheConvBias": without("bias"),
    "FirstGroup": first_group,
    "RatesOfSums": of_sums,
}


def padding_written(self: Any, plan: Any, frame: RecurrentFrame) -> None:
    """Slot -1 is the last one."""
    if -1 in plan.slots:
        frame.states[-1] = 0.0


def states_together(self: Any, plan: Any, frame: RecurrentFrame) -> None:
    """States of the batch are one matrix: NaN in one of them is in all."""
    live = [s for s in plan.slots if s >= 0]
    if live:
        frame.out.add_((0.0 * frame.states[live].sum()).to(frame.out.dtype))


AFTER = {
    "WritesThePadding": padding_written,
    "ClearsOtherSlots": lambda self, plan, frame: frame.states.nan_to_num_(0.0),
    "SpoilsItsInputs": lambda self, plan, frame: next(iter(frame.inputs.values())).mul_(0.5),
    # Sequences behind the 32nd are not computed.
    "ThirtyTwoSlots": lambda self, plan, frame: frame.out[
        plan.batch.starts[min(32, plan.batch.num_seqs)] :
    ].zero_(),
}
HALF = {
    # States are rounded to the layer's dtype after each step.
    "HalfStates": lambda self, plan, frame: frame.states.copy_(frame.states.bfloat16())
}
FIRST = {
    "FirstWeights": lambda self, plan, frame: (
        frame.but(params=self.once("params", dict(frame.params))) if frame.params else frame
    )
}
globals().update(lies(
    __name__,
    (OtherForm, "other", OTHER), (Scan, "replanned", REPLANNED), (Scan, "before", BEFORE),
    (Scan, "after", AFTER), (Scan, "after", HALF, "recurrence", "pieces"),
    (Scan, "before", FIRST, "recurrent_plans"),
    (Scan, "after", {"StatesTogether": states_together}, "state_isolation"),
))  # fmt: skip


class KeepsRejectedDrafts(Scan):
    """A convolution goes on where its last step ended, whatever of it was rejected."""

    by = ("rejected_drafts",)

    def replanned(self, plan: Any, batch: Batch) -> None:
        ends = self.__dict__.setdefault("ends", {})
        for index, slot in enumerate(plan.slots):
            if plan.before[index]:
                plan.before[index] = ends.get(slot, plan.before[index])
            ends[slot] = plan.before[index] + batch.query_lens[index]


class AlwaysElu(OtherForm):
    """A variant's map of features is taken for elu(x) + 1."""

    claimed: ClassVar[Any] = TORCH_SCAN.capabilities.but(
        kinds=frozenset({AttentionKind.PHI_LINEAR}), dtypes=frozenset({"float32"})
    )

    def other(self, spec: Any) -> Any:
        if spec.variant is None:
            return spec
        form = replace(spec.recurrent, feature_map="elu+1")
        return spec.replace(variant=None, recurrent=form)


class LatestSlots(Scan):
    by = ("recurrent_plans",)

    def replanned(self, plan: Any, batch: Batch) -> None:
        self.__dict__.setdefault("kept", {})[len(plan.slots)] = plan.slots

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        plan.slots = self.__dict__["kept"][len(plan.slots)]
        super().run(plan, frame)


class HandsItsRoomOver(Scan):
    """A call's output is the tensor that the next call writes."""

    by = ("recurrent_out",)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        room = self.__dict__.setdefault("room", torch.empty_like(frame.out))
        room.copy_(frame.out)
        frame.set_out(room)


class StartsAnewEachChunk(Scan):
    """A prompt's state is dropped after 64 tokens."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        out = frame.out
        super().run(plan, frame)
        for index, (start, count) in enumerate(
            zip(plan.batch.starts, plan.batch.query_lens, strict=False)
        ):
            if count > 64 and plan.slots[index] >= 0:
                out[start + 64 : start + count] *= torch.tensor(0.9, dtype=out.dtype)
