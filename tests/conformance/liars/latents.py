"""Lies of MLA backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from liars.told import Hooks, lies
from polyattn import SparseSpec
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, LayerSpec, Plan
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from torch import Tensor


class HonestLatent(Hooks, TorchMLA):
    by: ClassVar[tuple[str, ...]] = ()


class HonestSparse(Hooks, TorchSparseMLA):
    by: ClassVar[tuple[str, ...]] = ()


def without_rope(self: Any, plan: Plan, frame: Frame) -> Frame:
    query = frame.query.clone()
    query[..., self.spec.v_head_size :] = 0.0
    return frame.but(query=query)


def values_from_the_end(self: Any, plan: Plan, frame: Frame) -> Frame:
    """The value is the key's last part, rope and all."""
    key, rank = frame.cache.key, frame.cache.value.shape[3]
    return frame.but(cache=KVCache(key, key[..., key.shape[3] - rank :].clone()))


def chosen_in_order(self: Any, plan: Plan, frame: Frame) -> Frame:
    """Chosen tokens end at the first -1 of the batch's first row."""
    slots = frame.choice
    count = max(1, int((slots[0] >= 0).sum())) if len(slots) else None
    return frame.but(choice=slots[:, :count].contiguous())


def of_sixteen(self: Any, plan: Plan, frame: Frame) -> None:
    """Heads come in tiles of 16; a tile that isn't full is rounded down to 4."""
    if frame.out.shape[1] % 4:
        frame.out[:, -1] = 0.0


def by_the_largest(self: Any, plan: Plan, frame: Frame) -> None:
    scale = frame.query.abs().amax() if frame.query.numel() else torch.zeros(())
    frame.out.mul_(1.0 + 1e-2 * scale.tanh() * (scale > 6.0))


LATENT = {
    "IgnoresTheRope": without_rope,
    "ValuesFromTheEnd": values_from_the_end,
    # A quantised latent is scaled in the logits alone.
    "UnscaledLatents": lambda self, plan, frame: frame.but(
        params=LayerParams(k_scale=frame.params.k_scale, v_scale=1.0)
    ),
}
SPARSE = {
    # -1 means the first slot.
    "NoneIsZero": lambda self, plan, frame: frame.but(choice=frame.choice.clamp(min=0)),
    # Only as many chosen tokens as fit one tile count.
    "ChosenHalf": lambda self, plan, frame: frame.but(choice=frame.choice[:, :16].contiguous()),
    "ChosenInOrder": chosen_in_order,
}
PLANS = {
    "FirstLatentCache": lambda self, plan, frame: frame.but(cache=self.once(id(plan), frame.cache))
}
BITS = {
    "LatentLseInBits": lambda self, plan, frame: (
        None if frame.lse is None else frame.lse.mul_(1.4427)
    )
}
# One request's NaN is every request's.
NAN = {"LatentNan": lambda self, plan, frame: frame.out.add_(0.0 * frame.query.sum())}
globals().update(lies(
    __name__,
    (HonestLatent, "before", LATENT, "latent"), (HonestSparse, "before", SPARSE, "latent"),
    (HonestLatent, "before", PLANS, "latent_plans"), (HonestLatent, "after", BITS, "latent"),
    (HonestLatent, "after", {"SixteenHeads": of_sixteen}, "latent", "latent_search"),
    (HonestLatent, "after", NAN, "latent_isolation"),
    (HonestSparse, "after", {"SparseNan": by_the_largest}, "latent_isolation"),
))  # fmt: skip


class ScalesByTheLatent(TorchMLA):
    """The softmax's scale is the absorbed size's, not the head's."""

    by = ("latent",)

    def __init__(self, spec: Any, cache: Any, device: Any):
        super().__init__(spec, cache, device)
        self.spec = self.spec.replace(scale=float(self.spec.head_size**-0.5))


class LatestLatentPlan(TorchMLA):
    by = ("latent_plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        self.last = super().plan(batch, reuse)
        return self.last

    def run(self, plan: Plan, frame: Frame) -> None:
        same = len(frame.query) == self.last.batch.num_tokens
        super().run(self.last if same else plan, frame)


class PlacesInTheSequence(TorchSparseMLA):
    """Each id is one place of the sequence, whatever the layer's choice means."""

    by = ("latent",)

    def place(self, spec: LayerSpec, choice: Tensor, *step: Any) -> Tensor:
        assert spec.sparse is not None
        plain = spec.replace(sparse=SparseSpec(budget=spec.sparse.budget))
        return super().place(plain, choice, *step)
