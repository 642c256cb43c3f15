"""Lies of recurrent backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from polyattn.kernel import AttentionKind, Batch, Plan, RecurrentFrame
from polyattn_cpu.hooks import TORCH_SCAN
from polyattn_cpu.recurrent import TorchScan
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Scan(TorchScan):
    by: ClassVar[tuple[str, ...]] = ("recurrence",)


class HonestScan(Scan):
    by = ()


class AlwaysContinues(Scan):
    """What a slot held before is where a fresh sequence starts."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        plan.before = [count or 1 for count in plan.before]
        return plan


class AlwaysFresh(Scan):
    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        plan.before = [0] * len(plan.before)
        return plan


class WritesThePadding(Scan):
    """Slot -1 is the last one."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        if -1 in plan.slots:
            frame.states[-1] = 0.0


class PaddingOfOneToken(Scan):
    """Padding rows of several tokens are sequences of the first slot."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        rows = zip(plan.slots, batch.query_lens, strict=True)
        plan.slots = [0 if slot < 0 and count > 1 else slot for slot, count in rows]
        return plan


class KeepsRejectedDrafts(Scan):
    """A convolution goes on where its last step ended, whatever of it was rejected."""

    by = ("rejected_drafts",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        ends = self.__dict__.setdefault("ends", {})
        for index, slot in enumerate(plan.slots):
            if plan.before[index]:
                plan.before[index] = ends.get(slot, plan.before[index])
            ends[slot] = plan.before[index] + batch.query_lens[index]
        return plan


class ClearsOtherSlots(Scan):
    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        frame.states.nan_to_num_(0.0)


class ForgetsTheState(Scan):
    """A decode gives its output and leaves the state as it was."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        kept = frame.states.clone() if plan.batch.all_decode else frame.states
        super().run(plan, frame.but(states=kept))


class ClampedGrowth(Scan):
    """Exponents are never positive."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        def clamped(tensors: Tensors) -> dict[str, Tensor]:
            return {
                n: t.clamp(max=0.0) if n in ("A", "decay", "g") else t for n, t in tensors.items()
            }

        super().run(
            plan,
            frame.but(inputs=clamped(frame.inputs), params=clamped(frame.params)),
        )


class NeverForgets(Scan):
    """Exponents are never below -20, and never more than -20 in a chunk."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        def clamped(tensors: Tensors) -> dict[str, Tensor]:
            return {
                n: t.clamp(min=-0.2) if n in ("A", "decay", "g") else t for n, t in tensors.items()
            }

        super().run(
            plan,
            frame.but(inputs=clamped(frame.inputs), params=clamped(frame.params)),
        )


class Without(Scan):
    """One parameter isn't read."""

    name_of: ClassVar[str] = ""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        params = frame.params
        kept = {n: t for n, t in params.items() if n != self.name_of}
        super().run(plan, frame.but(params=kept))


class IgnoresTheSkip(Without):
    name_of = "D"


class IgnoresTheStepBias(Without):
    name_of = "dt_bias"


class IgnoresTheConvBias(Without):
    name_of = "bias"


class OtherForm(Scan):
    """Computes another layer's recurrence."""

    def __init__(self, spec: Any, cache: Any, device: Any):
        super().__init__(self.other(spec), cache, device)

    def other(self, spec: Any) -> Any:
        return spec

    def form(self, spec: Any, **changes: Any) -> Any:
        return spec.replace(recurrent=replace(spec.recurrent, **changes))


class AlwaysSoftplus(OtherForm):
    def other(self, spec: Any) -> Any:
        return self.form(spec, dt_softplus=True)


class NeverActivates(OtherForm):
    def other(self, spec: Any) -> Any:
        return self.form(spec, activation=None)


class NeverNormalises(OtherForm):
    def other(self, spec: Any) -> Any:
        return self.form(spec, qk_norm=False)


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


class UnscaledQueries(OtherForm):
    def other(self, spec: Any) -> Any:
        scaled = spec.kind in (AttentionKind.LINEAR, AttentionKind.GDN)
        return spec.replace(scale=1.0) if scaled else spec


class FirstGroup(Scan):
    """Every head has the first group's B and C, or keys."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        inputs = frame.inputs
        grouped = {"B", "C", "q", "k"} if self.spec.kind is not AttentionKind.MAMBA1 else set()
        given = {
            n: t[:, :1].expand_as(t).contiguous() if n in grouped else t for n, t in inputs.items()
        }
        super().run(plan, frame.but(inputs=given))


class HalfStates(Scan):
    """States are rounded to the layer's dtype after each step."""

    by = ("recurrence", "pieces")

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        states = frame.states
        super().run(plan, frame)
        states.copy_(states.bfloat16())


class FirstWeights(Scan):
    by = ("recurrent_plans",)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        params = frame.params
        first = self.__dict__.setdefault("first", dict(params)) if params else params
        super().run(plan, frame.but(params=first))


class LatestSlots(Scan):
    by = ("recurrent_plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        self.__dict__.setdefault("kept", {})[len(plan.slots)] = plan.slots
        return plan

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        plan.slots = self.__dict__["kept"][len(plan.slots)]
        super().run(plan, frame)


class SpoilsItsInputs(Scan):
    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        next(iter(frame.inputs.values())).mul_(0.5)


class StatesTogether(Scan):
    """States of the batch are one matrix: NaN in one of them is in all."""

    by = ("state_isolation",)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        out = frame.out
        super().run(plan, frame)
        live = [s for s in plan.slots if s >= 0]
        if live:
            out.add_((0.0 * frame.states[live].sum()).to(out.dtype))


class ThirtyTwoSlots(Scan):
    """Sequences behind the 32nd are not computed."""

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        frame.out[plan.batch.starts[min(32, plan.batch.num_seqs)] :] = 0.0


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
